# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: a Python environment with this package, editable, and the versions of
# constraints.txt. Takes the active environment, whose torch stays as it is, else .venv. Safe to run again: does nothing
# when nothing changed. Argument: the package's extra (deepspeed; test).

say() { printf '==> %s\n' "$*"; }

# DeepSpeed compiles two C++ operators for workers on the CPU when it first needs them; done here, no rank waits for it.
build_cpu_operators() {
  if ! command -v "${CXX:-c++}" >/dev/null ||
    ! python -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; then
    echo "error: for workers on the CPU DeepSpeed needs a C++ compiler and Python's headers; install them (Debian," \
      "Ubuntu: g++ python3-dev; Fedora: gcc-c++ python3-devel) and run this again" >&2
    return 1
  fi
  say "building DeepSpeed's operators for CPUs, unless they are there (once; about a minute)"
  DS_ACCELERATOR=cpu python -c '
import sdp_deepspeed  # which removes the lock of a build that was killed
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder
for builder in (ShareMemCommBuilder, CPUAdamBuilder):
    builder().load(verbose=False)' >/dev/null
}

pip_install() { python -m pip install --quiet --disable-pip-version-check "$@"; }

python_fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; }

if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
  say "using the active environment ${VIRTUAL_ENV:-$CONDA_PREFIX}"
else
  for python in .venv/bin/python python3.{14,13,12,11} python3 python; do
    if python_fits "$python"; then break; fi
  done
  if [ ! -x .venv/bin/python ] && python_fits "$python"; then
    say "making a virtual environment in .venv with $("$python" --version)"
    "$python" -m venv .venv || { rm -rf .venv && return 1; } # Debian: without python3-venv it is half done
  fi
  # shellcheck source=/dev/null
  [ ! -x .venv/bin/python ] || source .venv/bin/activate
fi
if ! python_fits python; then
  echo "error: Python 3.11 to 3.14 is needed, found $(python --version 2>&1); install one, or activate an environment" >&2
  return 1
fi

prefix=$(python -c 'import sys; print(sys.prefix)')
# Elsewhere two environments would rebuild operators by turns, each for its own paths.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$prefix/torch_extensions}"
stamp=$prefix/.sdp_deepspeed-${1:-deepspeed}
contents="$PWD $(cat pyproject.toml constraints.txt sdp_deepspeed/version.py | cksum)"
if grep -qsxF "$contents" "$stamp" "$prefix/.sdp_deepspeed-test"; then # the test extra has the others
  say "sdp_deepspeed is already installed"
else
  cat constraints.txt >"$prefix/constraints.txt"
  torch=$(python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
  if [ -n "$torch" ] && [ "$prefix" != "$PWD/.venv" ]; then
    say "torch $torch is here and stays as it is"
    sed "s/^torch==.*/torch==$torch/" constraints.txt >"$prefix/constraints.txt"
  else
    say "installing torch (first and alone: deepspeed's set-up imports it)"
    pip_install --constraint "$prefix/constraints.txt" torch
  fi
  say "installing sdp_deepspeed[${1:-deepspeed}], editable, with the versions of constraints.txt"
  pip_install --constraint "$prefix/constraints.txt" --editable ".[${1:-deepspeed}]"
  echo "$contents" >"$stamp"
fi
