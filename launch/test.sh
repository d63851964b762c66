#!/usr/bin/env bash
# Installs the package with its test extra, then lint, format, types and tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/_environment.sh test

say "ruff check"
ruff check .
say "ruff format --check"
ruff format --check .
say "mypy"
mypy
say "pytest"
exec python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
