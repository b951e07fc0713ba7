#!/usr/bin/env bash
# Trains on this machine: on an NVIDIA GPU if there is one, else on the CPU. Starts from nothing
# but Python 3.11 to 3.13 (or uv); a second start reuses .venv and resumes the run.
#
#   ./launch_gpu.sh                                        the smoke run, into runs/smoke
#   ./launch_gpu.sh --config=configs/smoke.py:gpu          another config, into runs/smoke-gpu
#   ./launch_gpu.sh --config.solver.group_size=8 --workdir=runs/eight
#
# All arguments go to zest_jax.train. Relative paths are taken from the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/venv.sh

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
