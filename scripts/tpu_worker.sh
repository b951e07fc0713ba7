#!/usr/bin/env bash
# What launch_tpu.sh asks of a TPU VM. It runs there, in the checkout:
#
#   bash scripts/tpu_worker.sh setup                            .venv with the TPU build of JAX; what
#                                                               the bucket $ZEST_DATA has, in data/
#   bash scripts/tpu_worker.sh here MODULE ARGUMENTS...         set up, then run in the foreground
#   bash scripts/tpu_worker.sh start ID [NAME=VALUE...] -- MODULE ARGUMENTS...     run detached
#   bash scripts/tpu_worker.sh status                           one line for launch_tpu.sh
#   bash scripts/tpu_worker.sh follow BYTES                     the log from there on, until the end
#   bash scripts/tpu_worker.sh stop [now]                       SIGTERM (or SIGKILL), and wait
#
# A detached program belongs to no terminal and no ssh: a dropped connection does not end it. What
# is known of it lies in ~/zest-run: `id`, `log`, `pid` (the program), `keeper` (the shell around
# it), `code` once it has ended, `stopped` if `stop` asked for that. Keeper and program hold `lock`
# as long as they live, which even a reboot cannot leave behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

RUN=$HOME/zest-run

die() {
  zest_say "$1"
  exit "${2:-1}"
}

# An attribute of this VM, as the metadata server tells it; fails elsewhere.
metadata() {
  curl --fail --silent --max-time 5 --retry 2 -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1" 2>/dev/null
}

running() { [[ -e $RUN/lock ]] && ! flock --nonblock "$RUN/lock" true; }

told() { cat "$RUN/$1" 2>/dev/null || printf '%s' -; }

setup() {
  local python
  export PATH=$HOME/.local/bin:$PATH
  # Images have Python 3.10: uv brings one that fits.
  if ! command -v uv >/dev/null 2>&1 && ! { python=$(zest_find_python) &&
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; }; then
    zest_say "this machine has no Python 3.11 to 3.13: fetching uv, which brings one."
    python3 -m pip install --quiet --user uv || curl -LsSf https://astral.sh/uv/install.sh | sh ||
      die "uv could not be installed (see above)."
    hash -r
  fi
  ZEST_FLAVOUR=${ZEST_FLAVOUR:-tpu} zest_venv ""
  [[ -z ${ZEST_DATA:-} ]] || fetch_data
}

# Copies what has changed, since a slice may be set up many times.
fetch_data() {
  command -v gcloud >/dev/null 2>&1 ||
    die "gcloud, which copies $ZEST_DATA, is not there; use an image of Cloud TPU."
  mkdir -p data
  gcloud storage rsync --quiet --recursive "$ZEST_DATA" data ||
    die "$ZEST_DATA could not be copied (see above); may the slice's service account read it?"
}

# A slice of several hosts is one run of as many processes, which JAX itself finds.
say_who_is_there() {
  local hosts
  [[ -z ${ZEST_DISTRIBUTED:-}${ZEST_COORDINATOR:-} ]] || return 0
  hosts=$(metadata worker-network-endpoints) ||
    die "the metadata server does not tell which hosts this slice has; is this a TPU VM?"
  [[ $hosts != *,* ]] || export ZEST_DISTRIBUTED=auto
}

here() {
  setup
  say_who_is_there
  exec .venv/bin/python -m "$@"
}

start() {
  local id=$1 tries
  shift
  say_who_is_there
  mkdir -p "$RUN"
  exec 9>"$RUN/lock"
  if ! flock --nonblock 9; then
    # The answer to an earlier start may have been lost on the way.
    [[ $(told id) != "$id" ]] || return 0
    die "another run ($(told id)) is going on this machine."
  fi
  [[ ! -s $RUN/log ]] || mv "$RUN/log" "$RUN/log.$(told id)"
  rm -f "$RUN/code" "$RUN/stopped" "$RUN/pid" "$RUN/keeper"
  : >"$RUN/log"
  printf '%s\n' "$id" >"$RUN/id"
  setsid nohup bash scripts/tpu_worker.sh keep "$@" </dev/null >>"$RUN/log" 2>&1 &
  for ((tries = 0; tries < 100; tries++)); do
    [[ ! -s $RUN/keeper ]] || return 0
    sleep 0.1
  done
  die "the program did not start within ten seconds; see $RUN/log."
}

# Runs the program, and writes down what became of it.
keep() {
  local code=0 workdir='' word previous='' told_to_end=''
  while [[ $1 != -- ]]; do
    export "${1?}"
    shift
  done
  shift
  # A machine that is shut down signals every process. The program saves and ends; a shell with a
  # trap waits for it.
  trap told_to_end=1 TERM
  trap : INT HUP
  printf '%s\n' $$ >"$RUN/keeper.new"
  mv "$RUN/keeper.new" "$RUN/keeper"
  # shellcheck disable=SC2016  # the inner shell is to expand them
  setsid --wait bash -c 'printf "%s\n" $$ >"$1"; shift; exec "$@"' - "$RUN/pid" \
    .venv/bin/python -m "$@" || code=$?
  # A program that ends well when it is told to end is not done.
  [[ -z $told_to_end || $code != 0 ]] || code=75
  for word; do
    [[ $word != --workdir=gs://* ]] || workdir=${word#*=}
    [[ $previous != --workdir || $word != gs://* ]] || workdir=$word
    previous=$word
  done
  if [[ -n $workdir ]] && command -v gcloud >/dev/null 2>&1; then
    # A preempted machine takes its disk with it, half a minute after the signal.
    timeout 20 gcloud storage cp --quiet "$RUN/log" \
      "${workdir%/}/logs/$(told id)-worker-$(metadata agent-worker-number).log" >/dev/null 2>&1 ||
      zest_say "the log could not be copied to $workdir."
  fi
  printf '%s\n' "$code" >"$RUN/code.new"
  mv "$RUN/code.new" "$RUN/code"
}

# zest-worker NUMBER none|running|ended|lost ID CODE stopped|-
status() {
  local state=none number stopped=-
  number=$(metadata agent-worker-number) || number=0
  [[ ! -e $RUN/id ]] || state=lost
  [[ ! -e $RUN/code ]] || state=ended
  ! running || state=running
  [[ ! -e $RUN/stopped ]] || stopped=stopped
  printf 'zest-worker %s %s %s %s %s\n' "${number:-0}" "$state" "$(told id)" "$(told code)" "$stopped"
}

follow() {
  local from=$(($1 + 1))
  [[ -e $RUN/log ]] || die "nothing was started on this machine."
  if running; then
    exec tail --pid="$(told keeper)" --sleep-interval=0.2 --bytes="+$from" --follow "$RUN/log"
  fi
  exec tail --bytes="+$from" "$RUN/log"
}

stop() {
  if ! running; then
    zest_say "nothing is running on this machine."
    return
  fi
  : >"$RUN/stopped"
  if [[ ${1:-} == now ]]; then
    # With all that it started, which would hold the lock (and the chips) on.
    kill -KILL -- "-$(told pid)"
  else
    kill -TERM "$(told pid)"
  fi
  flock --timeout 600 "$RUN/lock" true ||
    die "the program has not ended after ten minutes; stop it without saving: stop --now."
}

"$@"
