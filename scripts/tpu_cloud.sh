# shellcheck shell=bash
# The cloud's side of launch_tpu.sh: commands shown or run, a slice looked at, made and deleted, and
# commands on its workers. To be sourced; the caller sets name, zone, project, type, version, spot,
# reserved, queued, dry_run, create_flags and ssh_flags, and reads what zest_look sets:
# shellcheck disable=SC2154,SC2034

POLL=${ZEST_POLL:-30} # Seconds between two looks at what is waited for.
# Where a machine learns that it is taken back (zest_jax/preemption.py).
NOTICE=http://metadata.google.internal/computeMetadata/v1/instance/preempted

zest_die() {
  zest_say "$1"
  exit "${2:-1}"
}

# Words as a shell reads them back, on stdout: quoted only where there is need.
zest_quoted() {
  local word out=''
  for word; do
    if [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then
      out+="$word "
      continue
    fi
    out+=\'
    while [[ $word == *\'* ]]; do
      out+="${word%%\'*}'\\''"
      word=${word#*\'}
    done
    out+="$word' "
  done
  printf '%s' "${out% }"
}

# Runs a command, or shows it.
zest_do() {
  if [[ -n $dry_run ]]; then
    zest_quoted "$@"
    printf '\n'
  else
    "$@" </dev/null
  fi
}

zest_note() { [[ -z $dry_run ]] || printf '# %s\n' "$*"; }

# gcloud compute tpus …, in the slice's place. What it says on stderr is kept in $errors.
zest_tpus() {
  local code=0
  if [[ -n $dry_run ]]; then
    zest_do gcloud compute tpus "$@" "${place[@]}"
    return
  fi
  gcloud compute tpus "$@" "${place[@]}" </dev/null 2>"$errors" || code=$?
  return "$code"
}

zest_not_found() { zest_failed_with 'NOT_FOUND|was not found'; }

zest_failed_with() { grep -Eiq -- "$1" "$errors"; }

# Whether gcloud can be used at all. Sets place.
zest_check_cloud() {
  place=(--zone="$zone" --quiet)
  [[ -z $project ]] || place+=(--project="$project")
  if [[ -n $dry_run ]]; then
    [[ -n $zone ]] || zest_die "say where the slice is: --zone=us-central2-b, for example." 2
    return 0
  fi
  command -v gcloud >/dev/null 2>&1 ||
    zest_die "gcloud is not there; install the Google Cloud CLI, then: gcloud auth login" 2
  # The filter's warning about an empty list says nothing new.
  [[ -n $(gcloud auth list --filter=status:ACTIVE '--format=value(account)' 2>/dev/null) ]] ||
    zest_die "gcloud is not logged in; run: gcloud auth login" 2
  [[ -n $project || -n $(gcloud config get-value project 2>/dev/null) ]] ||
    zest_die "no project is set; give --project=…, or run: gcloud config set project PROJECT" 2
  [[ -n $zone ]] || zone=$(gcloud config get-value compute/zone 2>/dev/null)
  [[ -n $zone ]] || zest_die "say where the slice is: --zone=us-central2-b, for example." 2
  place[0]=--zone=$zone
  errors=$(mktemp)
  trap 'rm -f "$errors"' EXIT
}

# Looks at the slice. Sets state: the node's own word (READY, PREEMPTED, …); queue:STATE where there
# is only a request in the queue; ABSENT; UNKNOWN if the cloud did not answer. Sets what was not
# given of type, version, spot, reserved and queued to what the slice has, and had_type.
zest_look() {
  local told its_type its_version its_spot its_reserved its_request
  state=UNKNOWN
  had_type=''
  if [[ -n $dry_run ]]; then
    zest_tpus tpu-vm describe "$name" "--format=$ABOUT_NODE"
    return
  fi
  if told=$(zest_tpus tpu-vm describe "$name" "--format=$ABOUT_NODE"); then
    IFS='|' read -r state its_type its_version its_spot its_reserved its_request <<<"$told"
    had_type=$its_type
    type=${type:-$its_type} version=${version:-$its_version}
    [[ $its_spot != [Tt]rue || -n $reserved ]] || spot=1
    [[ $its_reserved != [Tt]rue || -n $spot ]] || reserved=1
    [[ -z $its_request ]] || queued=1
    return
  fi
  if ! zest_not_found; then
    cat "$errors" >&2
    return
  fi
  if told=$(zest_tpus queued-resources describe "$name" '--format=value(state.state)'); then
    state=queue:$told
    queued=1
  elif zest_not_found; then
    state=ABSENT
  else
    cat "$errors" >&2
  fi
}
ABOUT_NODE='csv[no-heading,separator="|"](state,acceleratorType,runtimeVersion,schedulingConfig.spot,schedulingConfig.reserved,queuedResource)'

# Whether a state is the end of a slice, which has to be made anew.
zest_is_gone() {
  case $1 in
    PREEMPTED | TERMINATED | queue:SUSPENDED | queue:SUSPENDING | queue:FAILED) return 0 ;;
    # A spot slice cannot be started again.
    STOPPED) [[ -z $spot ]] || return 0 ;;
  esac
  return 1
}

# Whether a failed command failed for want of free TPUs.
zest_no_capacity() {
  zest_failed_with 'no more capacity|insufficient.*capacity|stockout|currently unavailable' ||
    { zest_failed_with 'RESOURCE_EXHAUSTED' && ! zest_failed_with 'quota'; }
}

# Asks for the slice. Returns 0 if that was taken, 3 if no TPU is free; ends if asking again is vain.
zest_ask_for_slice() {
  local words=() why=''
  zest_name_type
  [[ -z $spot ]] || words+=(--spot)
  [[ -z $reserved ]] || words+=(--reserved)
  words+=(${create_flags[@]+"${create_flags[@]}"})
  zest_say "asking for $name, $type in $zone${spot:+ (spot)}${reserved:+ (reserved)}" \
    "${queued:+through the queue }with $version."
  if [[ -n $queued ]]; then
    zest_tpus queued-resources create "$name" --node-id="$name" --accelerator-type="$type" \
      --runtime-version="$version" ${words[@]+"${words[@]}"} && return 0
  else
    zest_tpus tpu-vm create "$name" --accelerator-type="$type" --version="$version" \
      ${words[@]+"${words[@]}"} && return 0
  fi
  cat "$errors" >&2
  if zest_failed_with 'ALREADY_EXISTS|already exists'; then
    zest_say "$name exists already; it is used as it is."
    return 0
  elif zest_no_capacity; then
    return 3
  elif zest_failed_with 'SERVICE_DISABLED|has not been used|API .*not enabled'; then
    why="the TPU API is off in this project; run: gcloud services enable tpu.googleapis.com"
  elif zest_failed_with 'quota'; then
    why="the project's quota does not cover $type${spot:+ (spot)} in $zone; another zone or a
smaller slice may fit, or ask for more on the console's page of quotas."
  elif zest_failed_with 'PERMISSION_DENIED'; then
    why="this account may not make TPUs in the project; it needs the role TPU Admin."
  elif zest_failed_with 'accelerator.?type|runtime.?version|INVALID_ARGUMENT|NOT_FOUND'; then
    why="$type with $version cannot be had in $zone (see above). What can be had there:
  gcloud compute tpus accelerator-types list --zone=$zone
  gcloud compute tpus tpu-vm versions list --zone=$zone"
  fi
  zest_die "${why:-the slice could not be made (see above).}" 2
}

# Deletes what there is of the slice.
zest_delete_slice() {
  if [[ -n $queued ]]; then
    zest_tpus queued-resources delete "$name" --force && return
    zest_not_found || {
      cat "$errors" >&2
      return 1
    }
    # It was not made through the queue.
  fi
  zest_tpus tpu-vm delete "$name" || zest_not_found || {
    cat "$errors" >&2
    return 1
  }
}

# Runs a command line on a worker (a number, or all).
zest_ssh() {
  local code=0
  zest_do gcloud compute tpus tpu-vm ssh "$name" --worker="$1" "${place[@]}" \
    --ssh-flag=-oServerAliveInterval=15 ${ssh_flags[@]+"${ssh_flags[@]}"} --command="$2" ||
    code=$?
  return "$code"
}

# The command line that calls scripts/tpu_worker.sh with these words.
zest_on_worker() {
  # shellcheck disable=SC2016  # the worker's shell is to expand it
  printf 'bash "$HOME"/zest_jax/scripts/tpu_worker.sh %s' "$(zest_quoted "$@")"
}

# Sets version to the image that suits the type, if none is given, and refuses unknown types.
zest_name_type() {
  [[ -n $type ]] || zest_die "say what to ask for: --type=v5e-16, for example." 2
  type=${type/#v5e-/v5litepod-}
  local image=''
  case $type in
    v5litepod-*) image=v2-alpha-tpuv5-lite ;;
    v5p-*) image=v2-alpha-tpuv5 ;;
    v6e-*) image=v2-alpha-tpuv6e ;;
    v2-* | v3-* | v4-*) image=tpu-ubuntu2204-base ;;
  esac
  [[ -n $image && ${type#*-} =~ ^[1-9][0-9]*$ ]] ||
    zest_die "there is no type $type; types are v2-N, v3-N, v4-N, v5e-N, v5p-N and v6e-N, where N
counts chips for v5e and v6e, cores (two a chip) for the others." 2
  version=${version:-$image}
}
