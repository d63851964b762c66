#!/usr/bin/env bash
# Installs the package with its test extra; then lint, format, types and all tests. With arguments it goes straight to
# pytest with them: bash launch/test.sh tests/unit/plan -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_NO_COMPILE=no      # pip's way to say that it shall not; what tests import is compiled when they do
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the package
source launch/_environment.sh test

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # each worker, and each rank, has a core at most
if [ $# -gt 0 ]; then
  say "pytest $*"
  exec python -m pytest "$@"
fi
say "ruff check"
ruff check .
say "ruff format --check"
ruff format --check .
say "mypy, beside the tests"
mypy &
types=$!
say "pytest, all tests, properties with all their examples; the 25 slowest at the end"
# Files in the order of their names: programs first, then ranks, and the many quick ones last, so that all workers end
# together. Two for each core, as programs and ranks wait for more
# than half of their time.
status=0
python -m pytest --hypothesis-profile thorough --numprocesses 4 --dist loadfile --no-loadscope-reorder --durations 25 ||
  status=$?
wait "$types" || { say "mypy failed: its lines are above, among the tests'" && exit 1; }
exit "$status"
