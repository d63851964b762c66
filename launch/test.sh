#!/usr/bin/env bash
# The gate: installs the package with its test extra, then checks lint, format, types and tests, in about eight minutes on
# two idle cores. --full runs all tests: those marked slow, the whole oracle grid, thorough property tests. Other
# arguments go straight to pytest: bash launch/test.sh tests/unit/plan -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
arguments=("$@")
set --
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the package
# shellcheck source=launch/_environment.sh
source launch/_environment.sh test
build_cpu_adam
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # at most one core for each worker and rank

if [ ${#arguments[@]} -gt 0 ] && [ "${arguments[*]}" != --full ]; then
  say "pytest ${arguments[*]}"
  exec python -m pytest "${arguments[@]}"
fi
say "ruff check"
ruff check .
say "ruff format --check"
ruff format --check .
say "mypy"
mypy
say "pytest${arguments[*]:+ ${arguments[*]}}; the 25 slowest at the end"
# Ranks and programs wait for each other, so more workers than cores pay off, but each needs half a minute of a core to
# import everything. In alphabetical order, programs run first and the many quick tests last, so that all workers finish
# at about the same time.
exec python -m pytest "${arguments[@]}" --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 25
