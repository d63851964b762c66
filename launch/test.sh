#!/usr/bin/env bash
# The gate: installs the package with its test extra; then lint, format, types and tests, about eight minutes on two
# idle cores. With --full all tests: those marked slow, the whole oracle grid, thorough properties. Other arguments go
# straight to pytest: bash launch/test.sh tests/unit/plan -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
arguments=("$@")
set --
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the package
# shellcheck source=launch/_environment.sh
source launch/_environment.sh test
build_cpu_operators
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # each worker, and each rank, has a core at most

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
# Ranks and programs wait for each other, so there are more workers than cores, but each takes half a minute of a core
# to import everything. In the order of names, programs come first and the many quick tests last, so that all workers
# end together.
exec python -m pytest "${arguments[@]}" --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 25
