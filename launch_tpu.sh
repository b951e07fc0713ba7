#!/usr/bin/env bash
# Trains on Cloud TPU: a TPU VM or a pod slice, from your machine through gcloud. docs/tpu.md is the guide.
#
#   ./launch_tpu.sh run --name=mine --zone=us-west4-a --type=v5e-8 --spot \
#     --bucket=gs://my-bucket/runs --config=configs/smoke.py
#
# makes the slice if it is not there, sets up every worker, starts the program, shows worker 0's
# log, and after a preemption does it all again, until the run is done. Commands:
#
#   create   make the slice and wait for it            status   the slice and the program on it
#   setup    code and packages on every worker         logs     worker 0's log, or --worker=K
#   run      all of it; --delete_after: and delete     stop     end the run, which saves (--now: kill)
#   delete   delete the slice
#
#   --name --zone --project     which slice; zone and project default to gcloud's own
#   --type=v5e-16               what to ask for; also v2-, v3-, v4-, v5p-, v6e-
#   --version=IMAGE             the VM's image; by default the type's usual one
#   --spot | --reserved         how it is paid; --queued: wait in Cloud TPU's queue
#   --repo=URL|. --commit=X     the code: by default this checkout's origin and commit; with --repo=. it
#                               is sent from here
#   --bucket=gs://…             a run's workdir is BUCKET/NAME unless --workdir is given
#   --data=gs://…               what the config reads (indexes, tasks, policies): copied to data/ in the
#                               checkout of every worker, before the program starts
#   --program=zest_jax.train    the module to run; --env=NAME=VALUE (repeatable) for its environment
#   --create_flag=… --ssh_flag=…   passed to gcloud as they are (a network, a service account)
#   --dry_run                   show every command, run none
#
# All else, and everything after --, goes to the program. On a TPU VM itself, without --name:
# ./launch_tpu.sh run --config=… sets up and runs there. On every worker of a slice at once, it is one run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/venv.sh
. scripts/tpu_cloud.sh
. scripts/tpu_run.sh

command=${1:-help}
shift || true
name='' zone='' project='' type='' version='' spot='' reserved='' queued='' dry_run=''
repo='' commit='' bucket='' data='' program=zest_jax.train worker=0 now='' delete_after=''
envs=() args=() create_flags=() ssh_flags=()

while (($#)); do
  flag=${1%%=*}
  flag=${flag//-/_}
  case $flag in
    __spot | __reserved | __queued | __dry_run | __delete_after | __now)
      [[ $1 != *=* ]] || zest_die "${1%%=*} takes no value." 2
      printf -v "${flag#__}" 1
      shift
      continue
      ;;
    __name | __zone | __project | __type | __version | __repo | __commit | __bucket | __data | __program | \
      __worker | __env | __create_flag | __ssh_flag)
      if [[ $1 == *=* ]]; then
        value=${1#*=}
        shift
      else
        (($# > 1)) || zest_die "$1 needs a value." 2
        value=$2
        shift 2
      fi
      [[ -n $value ]] || zest_die "--${flag#__} is empty." 2
      case $flag in
        __env)
          [[ $value =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || zest_die "--env is written --env=NAME=VALUE." 2
          envs+=("$value")
          ;;
        __create_flag) create_flags+=("$value") ;;
        __ssh_flag) ssh_flags+=("$value") ;;
        *) printf -v "${flag#__}" %s "$value" ;;
      esac
      continue
      ;;
  esac
  if [[ $1 == -- ]]; then
    shift
    args+=("$@")
    break
  fi
  args+=("$1")
  shift
done

case $command in
  create | setup | run | status | logs | stop | delete) ;;
  help | --help | -h)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit
    ;;
  *) zest_die "there is no command $command; see ./launch_tpu.sh help" 2 ;;
esac
[[ $command == run || ${#args[@]} -eq 0 ]] ||
  zest_die "$command does not know ${args[0]}; see ./launch_tpu.sh help" 2
[[ -z $data || $data == gs://?* ]] || zest_die "--data is a bucket's folder: --data=gs://BUCKET/FOLDER." 2
[[ -z $data || $command == run || $command == setup ]] || zest_die "--data goes with run or setup." 2
[[ -z $spot || -z $reserved ]] || zest_die "--spot and --reserved exclude each other." 2

# The value of a flag among the program's arguments, the last if there are several, or nothing.
given() {
  local word previous='' value=''
  for word in ${args[@]+"${args[@]}"}; do
    case $word in "--$1="* | "-$1="*) value=${word#*=} ;; esac
    case $previous in "--$1" | "-$1") value=$word ;; esac
    previous=$word
  done
  printf '%s' "$value"
}

if [[ -z $name ]]; then
  [[ $command == run || $command == setup ]] || zest_die "say which slice: --name=NAME." 2
  [[ -z $type$spot$reserved$queued$delete_after ]] || zest_die "name the slice: --name=NAME." 2
  if [[ -z $dry_run ]]; then
    bash scripts/tpu_worker.sh metadata accelerator-type >/dev/null ||
      zest_die "this is no TPU VM; from your own machine, name a slice: --name=NAME." 2
  fi
  [[ -z $bucket || -n $(given workdir) ]] || zest_die "on a TPU VM itself, give --workdir." 2
  words=(env ${data:+"ZEST_DATA=$data"} ${envs[@]+"${envs[@]}"} bash scripts/tpu_worker.sh)
  if [[ $command == setup ]]; then
    zest_do "${words[@]}" setup
    exit
  fi
  words+=(here "$program")
  words+=(${args[@]+"${args[@]}"})
  if [[ -n $dry_run ]]; then
    zest_do "${words[@]}"
    exit
  fi
  exec "${words[@]}"
fi

[[ $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ && ${#name} -le 62 ]] ||
  zest_die "a slice's name has lower-case letters, digits and hyphens, not $name." 2
[[ $worker == all || $worker =~ ^[0-9]+$ ]] || zest_die "--worker is a number, or all." 2
zest_check_cloud
me_at() {
  printf '%s' "./launch_tpu.sh $1 --name=$name --zone=$zone${project:+ --project=$project}"
}

# What code the workers shall have. Sets repo and commit.
choose_code() {
  local here origin=''
  here=$(git rev-parse --show-toplevel 2>/dev/null) || here=''
  if [[ $here == "$PWD" ]]; then
    origin=$(git remote get-url origin 2>/dev/null) || true
    commit=$(git rev-parse --verify --quiet "${commit:-HEAD}^{commit}") || {
      [[ -n $commit ]] || zest_die "this checkout has no commit yet." 2
    }
    [[ -z $(git status --porcelain --untracked-files=no) ]] ||
      zest_say "WARNING: changes that are not committed do not reach the workers."
  fi
  # Workers have no key of yours.
  [[ ! $origin =~ ^git@([^:]+):(.*)$ ]] || origin=https://${BASH_REMATCH[1]}/${BASH_REMATCH[2]}
  repo=${repo:-${origin:-.}}
  [[ $repo != . || $here == "$PWD" ]] || zest_die "this is no checkout; give --repo=URL." 2
  [[ $commit =~ ^[0-9a-f]{40}$ ]] ||
    zest_die "give --commit as 40 hexadecimal digits; ${commit:-nothing} cannot be looked up here." 2
  bundle=runs/tpu-$name.bundle
  [[ -n $dry_run || $repo != . ]] || mkdir -p runs
}

check_run() {
  local workdir
  if [[ $program == zest_jax.train && -z $(given config) ]]; then
    zest_die "no config is given; say which: --config=configs/smoke.py." 2
  fi
  workdir=$(given workdir)
  if [[ -z $workdir && -n $bucket ]]; then
    workdir=${bucket%/}/$name
    args=("--workdir=$workdir" ${args[@]+"${args[@]}"})
  fi
  if [[ $program == zest_jax.train && -z $workdir ]]; then
    zest_die "say where the run shall live: --bucket=gs://BUCKET/FOLDER or --workdir=gs://…" 2
  fi
  [[ -z $workdir || $workdir == gs://* ]] ||
    zest_say "WARNING: $workdir is on the slice's own disk, and is lost with the slice."
}

case $command in
  create)
    # Only the slice itself can tell, and a dry run does not look at it.
    [[ -z $dry_run ]] || zest_name_type
    zest_bring_up
    zest_note "and is there to be used, and paid, until it is deleted"
    [[ -n $dry_run ]] || zest_say "$name is ready, and costs money until: $(me_at delete)"
    ;;
  setup)
    choose_code
    zest_look
    zest_look_at_workers || zest_die "the workers of $name ($state) cannot be reached (see above)."
    ((going == 0)) || zest_die "a run is going on $name; end it first: $(me_at stop)" 2
    zest_set_up || zest_die "the workers of $name could not be set up (see above)."
    ;;
  run)
    check_run
    choose_code
    zest_run_on_slice
    ;;
  status)
    zest_look
    [[ -n $dry_run ]] || zest_say "$name: ${had_type:+$had_type, }${state#queue:}"
    if [[ $state == READY || -n $dry_run ]]; then
      zest_look_at_workers || zest_die "the workers of $name cannot be reached (see above)."
      printf '%s\n' ${tellings[@]+"${tellings[@]}"}
    fi
    ;;
  logs)
    if [[ $worker == all ]]; then
      folder=runs/tpu-$name/logs
      [[ -n $dry_run ]] || mkdir -p "$folder"
      zest_look_at_workers || zest_die "the workers of $name cannot be reached (see above)."
      for number in ${workers[@]+"${workers[@]}"}; do
        zest_ssh "$number" 'cat ~/zest-run/log' >"$folder/worker-$number.log"
      done
      [[ -n $dry_run ]] || zest_say "the logs are in $folder."
    else
      zest_ssh "$worker" "$(zest_on_worker follow 0)"
    fi
    ;;
  stop)
    zest_ssh all "$(zest_on_worker stop ${now:+now})" ||
      zest_die "not every worker of $name ended its program (see above)."
    [[ -n $dry_run ]] || zest_say "stopped. $name still costs money until: $(me_at delete)"
    ;;
  delete)
    zest_look
    if [[ $state == ABSENT ]]; then
      zest_say "there is no $name in $zone."
      exit
    fi
    if [[ -z $now && ($state == READY || -n $dry_run) ]]; then
      # A slice that does not answer is deleted all the same.
      zest_look_at_workers || true
      ((going == 0)) || zest_die "a run is going on $name; end it first, so that it saves:
  $(me_at stop)
or delete the slice at once with --now." 2
    fi
    zest_delete_slice || zest_die "$name could not be deleted (see above), and costs money."
    [[ -n $dry_run ]] || zest_say "$name is deleted."
    ;;
esac
