#!/usr/bin/env bash
# Everything that is checked before a change goes in: lint, format, types, tests.
#
#   bash tests/run.sh                  all
#   bash tests/run.sh -k config        the same, but only these tests: arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh
zest_venv test

failed=()
check() {
  local name=$1
  shift
  printf '== %s\n' "$name"
  "$@" || failed+=("$name")
}
check lint .venv/bin/ruff check .
check format .venv/bin/ruff format --check --quiet .
check types .venv/bin/mypy zest_jax
# Two at a time: compiling, which takes most of the time, uses one core. A file stays with one worker,
# since its tests share what they compile; files go in conftest's order, the long ones first.
check tests .venv/bin/python -m pytest -q -n "${ZEST_TEST_WORKERS:-2}" --dist loadfile \
  --no-loadscope-reorder "$@"

if ((${#failed[@]})); then
  zest_say "failed: ${failed[*]}"
  exit 1
fi
zest_say "all passed."
