# shellcheck shell=bash
# Sets up .venv in the checkout. To be sourced with the checkout as the current folder:
#
#   . scripts/venv.sh
#   zest_venv EXTRA          afterwards .venv/bin/python has zest_jax, the right JAX and EXTRA ("": none)
#
# A venv that fits is reused: .venv/.zest-stamp tells what it was made from. Settings:
#   ZEST_FLAVOUR=cpu|cuda12|cuda13|tpu   instead of looking for a GPU
#   ZEST_PYTHON=/path/to/python          instead of looking for one

ZEST_VENV=.venv

zest_say() { printf 'zest_jax: %s\n' "$*" >&2; }

# The build of JAX that suits this machine, on stdout; the reason, on stderr.
zest_flavour() {
  local gpu driver major
  if [[ -n ${ZEST_FLAVOUR:-} ]]; then
    zest_say "using the ${ZEST_FLAVOUR} build of JAX, as ZEST_FLAVOUR says."
    printf '%s\n' "$ZEST_FLAVOUR"
    return
  fi
  if ! command -v nvidia-smi >/dev/null 2>&1; then
    zest_say "no NVIDIA GPU found (there is no nvidia-smi): using the CPU build of JAX."
    printf 'cpu\n'
    return
  fi
  if ! gpu=$(nvidia-smi --query-gpu=driver_version,name --format=csv,noheader 2>/dev/null) ||
    [[ -z $gpu ]]; then
    zest_say "nvidia-smi finds no GPU: using the CPU build of JAX."
    printf 'cpu\n'
    return
  fi
  gpu=${gpu%%$'\n'*}
  driver=${gpu%%,*}
  major=${driver%%.*}
  if [[ ! $major =~ ^[0-9]+$ ]] || ((major < 525)); then
    zest_say "the NVIDIA driver ($driver) is older than 525: using the CPU build of JAX."
    printf 'cpu\n'
  elif ((major >= 580)); then
    zest_say "found${gpu#*,} with driver $driver: using the CUDA 13 build of JAX."
    printf 'cuda13\n'
  else
    zest_say "found${gpu#*,} with driver $driver (CUDA 13 needs 580): using the CUDA 12 build of JAX."
    printf 'cuda12\n'
  fi
}

# Whether a python exists, is 3.11 to 3.13 and can make a venv.
zest_python_fits() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
    >/dev/null 2>&1
}

# A fitting python, on stdout; fails if there is none.
zest_find_python() {
  local candidate
  for candidate in ${ZEST_PYTHON:+"$ZEST_PYTHON"} python3 python3.12 python3.13 python3.11 python; do
    if zest_python_fits "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

zest_make_venv() {
  local python
  if command -v uv >/dev/null 2>&1; then
    # uv fetches a python where none fits.
    python=$(zest_find_python) || python='>=3.11,<3.14'
    zest_say "making $ZEST_VENV with uv."
    uv venv --quiet --python "$python" "$ZEST_VENV"
    return
  fi
  if ! python=$(zest_find_python); then
    zest_say "no Python 3.11, 3.12 or 3.13 found; install one (or uv, which brings its own)," \
      "or name it: ZEST_PYTHON=/path/to/python $0"
    return 1
  fi
  if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    zest_say "$python cannot make a venv; install its venv package" \
      "(on Debian and Ubuntu: apt-get install python3-venv) or uv."
    return 1
  fi
  zest_say "making $ZEST_VENV with $python."
  "$python" -m venv "$ZEST_VENV"
}

zest_install() {
  if command -v uv >/dev/null 2>&1; then
    uv pip install --quiet --python "$ZEST_VENV/bin/python" -e "$1"
  else
    # A venv whose making was interrupted has none.
    "$ZEST_VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
      "$ZEST_VENV/bin/python" -m ensurepip >/dev/null
    "$ZEST_VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e "$1"
  fi
}

# Makes .venv or reuses it. The argument is an extra of setup.cfg, such as "test", or empty.
# One process at a time: the others of a host, or of hosts that share the checkout, wait and reuse
# it. What is locked is setup.cfg, so that no file is left behind, and nothing is locked after a kill.
zest_venv() {
  # Where there is no flock (macOS) nobody starts several processes at once; who may not write here
  # can only use what is there.
  if [[ -w setup.cfg ]] && command -v flock >/dev/null 2>&1; then
    exec 9>>setup.cfg
    if ! flock --nonblock 9; then
      zest_say "another process is setting up $ZEST_VENV: waiting for it."
      flock 9 || zest_say "WARNING: this file system knows no locks; going on without."
    fi
  fi
  zest_venv_alone "$1"
  # Else the program that is started next would hold it for as long as it runs.
  exec 9>&-
}

zest_venv_alone() {
  local extra=$1 stamp=$ZEST_VENV/.zest-stamp flavour sum extras
  local old_flavour='' old_extra='' old_sum=''
  flavour=$(zest_flavour)
  sum=$(cat setup.cfg pyproject.toml | cksum)
  sum=${sum// /-}
  if [[ -f $stamp ]]; then
    IFS='|' read -r old_flavour old_extra old_sum <"$stamp" || true
  fi
  # What is installed already stays: a launch after the tests keeps the tools of the tests.
  extra=${extra:-$old_extra}

  if [[ -e $ZEST_VENV ]]; then
    if ! zest_python_fits "$ZEST_VENV/bin/python"; then
      zest_say "the python of $ZEST_VENV is gone or not 3.11 to 3.13: making it anew."
      rm -rf "$ZEST_VENV"
    elif [[ -n $old_flavour && $old_flavour != "$flavour" ]]; then
      # Two CUDA plugins in one environment get in each other's way.
      zest_say "$ZEST_VENV holds the $old_flavour build of JAX: making it anew."
      rm -rf "$ZEST_VENV"
    elif [[ "$old_flavour|$old_extra|$old_sum" == "$flavour|$extra|$sum" ]]; then
      return
    fi
  fi
  [[ -e $ZEST_VENV ]] || zest_make_venv

  extras=$extra
  [[ $flavour == cpu ]] || extras=$flavour${extra:+,$extra}
  zest_say "installing zest_jax${extras:+ with $extras} into $ZEST_VENV (a minute or so)."
  rm -f "$stamp"
  if ! zest_install ".${extras:+[$extras]}"; then
    zest_say "the installation failed (see above); run the same command to try again."
    return 1
  fi
  if [[ $flavour == cuda* ]]; then
    "$ZEST_VENV/bin/python" -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu")' ||
      zest_say "WARNING: JAX does not see the GPU and will use the CPU; see its message above."
  fi
  printf '%s|%s|%s\n' "$flavour" "$extra" "$sum" >"$stamp"
}
