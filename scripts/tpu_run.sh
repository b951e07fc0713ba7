# shellcheck shell=bash
# A run on a slice, from the machine that watches it: brought up, set up, started, followed, and
# started again after a preemption. To be sourced after tpu_cloud.sh; the caller also sets program,
# args, envs, repo, commit, bundle, data and delete_after, and defines me_at, which tells the command line
# of another command on the same slice.
#
# Variables are those of tpu_cloud.sh and of the caller:
# shellcheck disable=SC2154,SC2034

# Waits until the slice can be used, making it (again) where there is none.
zest_bring_up() {
  local said='' wanted=$type code
  while :; do
    zest_look
    if [[ -n $dry_run ]]; then
      if [[ -n $type ]]; then
        zest_note "where that finds no slice, and again after a preemption:"
        zest_ask_for_slice
      fi
      zest_note "when the slice is READY:"
      return
    fi
    if [[ $state == READY ]]; then
      [[ -z $wanted || -z $had_type || ${wanted/#v5e-/v5litepod-} == "$had_type" ]] ||
        zest_die "$name is $had_type, not $wanted; give another --name, or delete it first." 2
      was_ready=1
      return
    fi
    # Only these can be preempted: it is not made again at another price.
    [[ $state != PREEMPTED || -n $reserved ]] || spot=1
    if [[ $state == queue:FAILED && -z $was_ready ]]; then
      zest_die "the queue refused the request for $name; why:
  gcloud compute tpus queued-resources describe $name --zone=$zone
and to make room for another request: $(me_at delete)"
    elif zest_is_gone "$state"; then
      # Before what is left of it is deleted, it must be known what to ask for.
      zest_name_type
      zest_say "$name is ${state#queue:}: making it anew."
      if ! { zest_delete_slice && zest_ask; }; then
        sleep "$POLL"
      fi
      continue
    fi
    case $state in
      ABSENT) zest_ask || sleep "$POLL" ;;
      STOPPED | STOPPING | HIDDEN | HIDING)
        zest_die "$name is $state; start it first:
  gcloud compute tpus tpu-vm start $name --zone=$zone" 2
        ;;
      *)
        [[ $said == "$state" ]] || zest_say "$name is ${state#queue:}: waiting."
        said=$state
        sleep "$POLL"
        ;;
    esac
  done
}

# Asks for the slice and counts that in made; fails where none is free now.
zest_ask() {
  local code=0
  zest_ask_for_slice || code=$?
  if ((code == 0)); then
    made=$((${made:-0} + 1))
  else
    zest_say "no $type is free in $zone; asking again in $POLL s
(--queued waits in Cloud TPU's own queue)."
  fi
  return "$code"
}

# Brings the code, at the commit, what it needs, and the run's data to every worker.
zest_set_up() {
  local source=$repo line code=0
  if [[ $repo == . ]]; then
    # shellcheck disable=SC2088  # the worker's shell is to expand it
    source='~/zest.bundle'
    zest_do git bundle create --quiet "$bundle" HEAD --all || return
    zest_do gcloud compute tpus tpu-vm scp "$bundle" "$name:zest.bundle" --worker=all \
      "${place[@]}" || return
  else
    source=$(zest_quoted "$repo")
  fi
  line="set -e; git init --quiet ~/zest_jax; cd ~/zest_jax"
  line+="; git cat-file -e $commit^{commit} 2>/dev/null"
  line+=" || git fetch --quiet --tags $source HEAD '+refs/heads/*:refs/remotes/zest/*'"
  line+="; git cat-file -e $commit^{commit} 2>/dev/null || exit 42"
  line+="; git checkout --quiet --force --detach $commit; exec env"
  [[ -z $data ]] || line+=" $(zest_quoted "ZEST_DATA=$data")"
  line+=" bash scripts/tpu_worker.sh setup"
  zest_ssh all "$line" || code=$?
  ((code != 42)) || zest_die "commit $commit is not in $repo: push it, or send it from here with
--repo=." 2
  return "$code"
}

# Asks every worker how its program is. Sets workers (their numbers), tellings (a line for each), going
# (how many run), run_id (the run that goes), behind (whether a worker knows nothing of that run),
# stopped, and code: the run's exit code, or "lost" where a program left none.
zest_look_at_workers() {
  local line told words number its_state its_id its_code its_stop ids=''
  # shellcheck disable=SC2016  # the worker's shell is to expand it
  words='f=~/zest_jax/scripts/tpu_worker.sh; if [ -f "$f" ]; then bash "$f" status'
  words+='; else echo zest-worker 0 none - - -; fi'
  workers=() tellings=() going=0 run_id='' behind='' stopped='' code=''
  if [[ -n $dry_run ]]; then
    zest_ssh all "$words"
    return
  fi
  told=$(zest_ssh all "$words") || return
  while read -r line; do
    [[ $line == zest-worker\ * ]] || continue
    read -r _ number its_state its_id its_code its_stop <<<"$line"
    workers+=("$number") ids+=" $its_id"
    tellings+=("worker $number: $its_state, run $its_id, exit code $its_code")
    [[ $its_stop != stopped ]] || stopped=1
    case $its_state in
      running) going=$((going + 1)) run_id=$its_id ;;
      ended) code=$(zest_graver "$code" "$its_code") ;;
      lost) code=$(zest_graver "$code" lost) ;;
    esac
  done <<<"$told"
  for line in $ids; do
    [[ -z $run_id || $line == "$run_id" ]] || behind=1
  done
}

# Which of two workers' exit codes is the run's. If one process goes, its peers fail too, so that
# what may have taken one comes before errors; a mistake of the user's is before all.
zest_graver() {
  local pattern
  for pattern in 2 75 lost '1[3-9][0-9]' '2[0-9][0-9]' '[1-46-9]*' '[1-9]*'; do
    # shellcheck disable=SC2254
    case $1 in $pattern) printf '%s' "$1" && return ;; esac
    # shellcheck disable=SC2254
    case $2 in $pattern) printf '%s' "$2" && return ;; esac
  done
  printf 0
}

# Shows worker 0's log as it grows, also into runs/tpu-NAME, until the program ends. Fails if the
# slice goes before.
zest_watch() {
  local have looks=0
  zest_note "the log, also into $folder/worker-0.log; again where the connection is lost:"
  while :; do
    have=0
    [[ ! -e $folder/worker-0.log ]] || have=$(($(wc -c <"$folder/worker-0.log")))
    if [[ -n $dry_run ]]; then
      zest_ssh 0 "$(zest_on_worker follow "$have")"
      zest_look_at_workers
      return
    fi
    mkdir -p "$folder"
    if zest_ssh 0 "$(zest_on_worker follow "$have")" | tee -a "$folder/worker-0.log" &&
      zest_look_at_workers; then
      ((going)) || return 0
      # The others end a little later; without worker 0 they cannot go on.
      ((looks += 1))
      if ((looks == 20)); then
        zest_ssh all "$(zest_on_worker stop now)" || true
        continue
      fi
    else
      zest_look
      if [[ $state == ABSENT || $state == STOPPED ]] || zest_is_gone "$state"; then
        return 1
      fi
      zest_say "the connection to $name ($state) was lost; the run goes on. Trying again."
    fi
    sleep "$POLL"
  done
}

# The logs of workers other than 0, into files here.
zest_fetch_logs() {
  local worker
  zest_note "the logs of the other workers, one by one:"
  [[ -z $dry_run ]] || workers=(0 1)
  for worker in ${workers[@]+"${workers[@]}"}; do
    if [[ $worker == 0 ]]; then
      continue
    elif [[ -n $dry_run ]]; then
      zest_ssh "$worker" 'cat ~/zest-run/log'
    else
      zest_ssh "$worker" 'cat ~/zest-run/log' >"$folder/worker-$worker.log" ||
        zest_say "the log of worker $worker could not be fetched."
    fi
  done
}

# Starts the program unless it is there already. Fails if the workers cannot be reached.
zest_begin() {
  local print
  print=$(zest_quoted ${envs[@]+"${envs[@]}"} -- "$program" ${args[@]+"${args[@]}"} | cksum)
  print=${print%% *}
  zest_look_at_workers || return
  if ((going)); then
    [[ ${run_id%%-*} == "$print" ]] ||
      zest_die "another run is going on $name; follow it with $(me_at logs)
or end it (it saves) with $(me_at stop)" 2
  fi
  if ((going)) && [[ -z $behind ]]; then
    zest_say "the run is going already."
  else
    if ((going)); then
      # They wait for their peers, and have done nothing yet.
      zest_say "not every worker has begun: starting all of them again."
      zest_ssh all "$(zest_on_worker stop now)" || return
    fi
    zest_set_up || return
    run_id=$print-$(date -u +%Y%m%dT%H%M%SZ)
    zest_ssh all "$(zest_on_worker start "$run_id" ZEST_PREEMPTED_EXIT=75 \
      ZEST_PREEMPTION_NOTICE="$NOTICE" \
      ${envs[@]+"${envs[@]}"} -- "$program" ${args[@]+"${args[@]}"})" || return
  fi
  folder=runs/tpu-$name/$run_id
}

zest_interrupted() {
  if [[ -n $folder ]]; then
    zest_say "the run on $name goes on, and costs what it costs.
Its log: $(me_at logs)
To end it (it saves): $(me_at stop)
Nobody starts it again after a preemption until you give the same command as before."
  else
    zest_say "the run had not begun. The slice may be there, or be on its way, and costs money until:
$(me_at delete)"
  fi
  exit 130
}

# The whole of it; exits with the program's code.
zest_run_on_slice() {
  local unreached=0 crashed=0 begun before
  trap zest_interrupted INT
  was_ready='' folder='' made=0
  while :; do
    before=$made
    zest_bring_up
    # What went wrong on another machine does not count.
    ((made == before)) || unreached=0
    if ! zest_begin; then
      ((unreached += 1))
      ((unreached < 5)) || zest_die "the workers of $name could not be set up or reached (see above).
With several workers ssh needs the key in an agent: ssh-add ~/.ssh/google_compute_engine"
      sleep "$POLL"
      continue
    fi
    unreached=0 begun=$SECONDS
    if ! zest_watch; then
      [[ $state != ABSENT ]] || zest_die "$name was deleted; the same command makes it again."
      ! zest_is_gone "$state" || zest_say "$name was preempted (${state#queue:})."
      continue
    fi
    if [[ -n $dry_run ]]; then
      zest_fetch_logs
      if [[ -n $delete_after ]]; then
        zest_delete_slice
      fi
      return
    fi
    if [[ -n $stopped ]]; then
      zest_fetch_logs
      zest_say "the run was stopped; the same command goes on with it."
      exit 130
    fi
    case $code in
      0) zest_say "done." && zest_finish 0 ;;
      2) zest_say "the program refused what it was given (above); not started again." &&
        zest_finish 2 ;;
    esac
    # An error may be the first sign of a preemption.
    sleep "$POLL"
    zest_look
    if zest_is_gone "$state" || [[ $code == 75 ]]; then
      zest_say "the program was told to end and saved; going on with it."
      continue
    elif [[ $code != lost ]] && ((code != 5 && (code < 128 || code == 130))); then
      zest_say "the program ended with code $code (1 an error, 3 out of memory, 4 disk full, 130
interrupted); not started again."
      zest_finish "$code"
    fi
    # A machine that is repaired every other day is no reason to give up.
    ((SECONDS - begun < 1800)) || crashed=0
    ((crashed += 1))
    if ((crashed > 3)); then
      zest_say "the program was killed $crashed times on a healthy slice (code $code); giving up."
      [[ $code != lost ]] || code=1
      zest_finish "$code"
    fi
    zest_say "the program was killed (code $code); starting it again."
  done
}

zest_finish() {
  zest_fetch_logs
  zest_say "logs are in $folder."
  if [[ -n $delete_after ]]; then
    zest_say "deleting $name."
    zest_delete_slice || zest_say "WARNING: $name could not be deleted, and costs money: $(me_at delete)"
  else
    zest_say "$name is still there, and costs money until: $(me_at delete)"
  fi
  exit "$1"
}
