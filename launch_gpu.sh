#!/usr/bin/env bash
# Trains on this machine: on an NVIDIA GPU if there is one, else on the CPU. Starts from nothing
# but Python 3.11 to 3.13 (or uv); a second start reuses .venv and resumes the run.
#
#   ./launch_gpu.sh                                        the smoke run, into runs/smoke
#   ./launch_gpu.sh --config=configs/smoke.py:gpu          another config, into runs/smoke-gpu
#   ./launch_gpu.sh --config.solver.group_size=8 --workdir=runs/eight
#
#   ./launch_gpu.sh --devices=all …        all GPUs of this host, in one process; or a number of them
#   ./launch_gpu.sh --coordinator=HOST:PORT --processes=2 --process=0 …     on the first of two hosts
#   ./launch_gpu.sh --coordinator=HOST:PORT --processes=2 --process=1 …     on the second
#   srun --ntasks-per-node=1 ./launch_gpu.sh …             on all hosts of a SLURM job
#
# Without --devices (or ZEST_DEVICES) one process uses one GPU; of several, each uses all that it is
# given. CUDA_VISIBLE_DEVICES, if set, is what is chosen from. Each of several hosts needs the
# checkout and the workdir in the same place, on a disk that they share or in a bucket.
#
# ZEST_FLAVOUR=cuda12|cuda13|cpu chooses the build of JAX, else the driver does.
# All other arguments go to zest_jax.train. Relative paths are taken from the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/venv.sh

# No XLA flags are set here: docs/performance.md has none that made a whole run faster. The one that
# makes sampling faster (products by cuBLAS, not Triton: 2.53 to 2.38 ms a step at 1.5B) is given to
# that compiled program alone, in rollout/engine.py. XLA_FLAGS of yours are used as they are.

refuse() {
  zest_say "$1"
  exit 2
}

devices=${ZEST_DEVICES:-} coordinator='' processes='' process='' arguments=()
while (($#)); do
  case $1 in
    --devices=*) devices=${1#*=} ;;
    --coordinator=*) coordinator=${1#*=} ;;
    --processes=*) processes=${1#*=} ;;
    --process=*) process=${1#*=} ;;
    --devices | --coordinator | --processes | --process)
      (($# > 1)) || refuse "$1 needs a value."
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    --)
      arguments+=("$@")
      break
      ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
set -- ${arguments[@]+"${arguments[@]}"}

[[ -z $devices || $devices == all || $devices =~ ^[1-9][0-9]*$ ]] ||
  refuse "--devices is a number of GPUs, or all; not $devices."
if [[ -n $coordinator$processes$process ]]; then
  [[ -n $coordinator && -n $processes && -n $process ]] ||
    refuse "several hosts need all of --coordinator=HOST:PORT, --processes=N and --process=I."
  [[ $coordinator =~ ^.+:[0-9]+$ ]] ||
    refuse "--coordinator is HOST:PORT of the host with --process=0, not $coordinator."
  if [[ ! $processes =~ ^[1-9][0-9]*$ || ! $process =~ ^[0-9]+$ ]] || ((process >= processes)); then
    refuse "--process counts from 0 to one less than --processes, not $process of $processes."
  fi
  export ZEST_COORDINATOR=$coordinator ZEST_PROCESSES=$processes ZEST_PROCESS=$process
  unset ZEST_DISTRIBUTED
elif [[ -z ${ZEST_DISTRIBUTED:-}${ZEST_COORDINATOR:-} && -n ${SLURM_STEP_NODELIST:-} ]] &&
  ((${SLURM_NTASKS:-1} > 1)); then
  # Within srun; in a batch script outside of it there is one process.
  zest_say "one of $SLURM_NTASKS processes of SLURM job ${SLURM_JOB_ID:-}."
  export ZEST_DISTRIBUTED=auto
fi

# Leaves the program as many GPUs as it shall use.
choose_devices() {
  local there=() wanted=$devices line
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=, read -ra there <<<"$CUDA_VISIBLE_DEVICES"
  elif [[ ${ZEST_FLAVOUR:-} != cpu ]] && command -v nvidia-smi >/dev/null 2>&1; then
    while IFS= read -r line; do
      [[ ! $line =~ ^[0-9]+$ ]] || there+=("$line")
    done < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)
    # As nvidia-smi counts.
    export CUDA_DEVICE_ORDER=${CUDA_DEVICE_ORDER:-PCI_BUS_ID}
  fi
  # Whoever names GPUs, or starts several processes, has chosen.
  if [[ -z $wanted && -z ${CUDA_VISIBLE_DEVICES+set}${ZEST_DISTRIBUTED:-}${ZEST_COORDINATOR:-} ]] &&
    ((${#there[@]} > 1)); then
    wanted=1
    zest_say "using one GPU of ${#there[@]}; --devices=all uses all of them."
  fi
  if [[ -z $wanted || $wanted == all ]]; then
    return
  fi
  ((wanted <= ${#there[@]})) ||
    refuse "there are ${#there[@]} GPUs to choose from, and --devices asks for $wanted."
  local IFS=,
  export CUDA_VISIBLE_DEVICES="${there[*]:0:wanted}"
}
choose_devices

config='' workdir='' previous=''
for argument in "$@"; do
  case $argument in
    --config=* | -config=*) config=${argument#*=} ;;
    --workdir=* | -workdir=*) workdir=${argument#*=} ;;
  esac
  case $previous in
    --config | -config) config=$argument ;;
    --workdir | -workdir) workdir=$argument ;;
  esac
  previous=$argument
done

defaults=()
if [[ -z $config ]]; then
  config=configs/smoke.py
  defaults+=("--config=$config")
fi
if [[ -z $workdir ]]; then
  # configs/smoke.py:gpu -> runs/smoke-gpu
  name=${config%%:*}
  name=$(basename "$name" .py)
  [[ $config != *:* ]] || name=$name-${config#*:}
  defaults+=("--workdir=runs/${name//[^A-Za-z0-9._=-]/-}")
fi

zest_venv ""
# The form with + is for bash before 4.4, where an empty array counts as unset.
exec .venv/bin/python -m zest_jax.train ${defaults[@]+"${defaults[@]}"} "$@"
