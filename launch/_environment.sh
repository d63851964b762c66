# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: installs this package in editable mode with the versions of constraints.txt, into
# the active environment (whose torch is kept), or else into .venv. Does nothing if nothing has changed. Argument: the
# package's extra (deepspeed or test).

say() { printf '==> %s\n' "$*"; }

# DeepSpeed compiles its Adam for CPUs on first use, without "torch_adam". Building it here keeps tests from waiting.
build_cpu_adam() {
  if ! command -v "${CXX:-c++}" >/dev/null ||
    ! python -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; then
    echo "error: DeepSpeed's Adam on the CPU needs a C++ compiler and Python's headers; install them (Debian," \
      "Ubuntu: g++ python3-dev; Fedora: gcc-c++ python3-devel) and run this again" >&2
    return 1
  fi
  say "building DeepSpeed's Adam for CPUs (once; about a minute)"
  rm -f "$prefix"/torch_extensions/*/lock # left by a killed build; PyTorch would wait for it
  DS_ACCELERATOR=cpu python -c '
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
CPUAdamBuilder().load(verbose=False)' >/dev/null
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
    "$python" -m venv .venv || { rm -rf .venv && return 1; } # Debian without python3-venv leaves half an environment
  fi
  # shellcheck source=/dev/null
  [ ! -x .venv/bin/python ] || source .venv/bin/activate
fi
if ! python_fits python; then
  echo "error: Python 3.11 to 3.14 is needed, found $(python --version 2>&1); install one, or activate an environment" >&2
  return 1
fi

prefix=$(python -c 'import sys; print(sys.prefix)')
# One folder per environment: operators are built for its paths.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$prefix/torch_extensions}"
stamp=$prefix/.sdp_deepspeed-${1:-deepspeed}
contents="$PWD $(cat pyproject.toml constraints.txt sdp_deepspeed/version.py | cksum)"
if grep -qsxF "$contents" "$stamp" "$prefix/.sdp_deepspeed-test"; then # the test extra includes the others
  say "sdp_deepspeed is already installed"
else
  cat constraints.txt >"$prefix/constraints.txt"
  torch=$(python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
  if [ -n "$torch" ] && [ "$prefix" != "$PWD/.venv" ]; then
    say "keeping the installed torch $torch"
    sed "s/^torch==.*/torch==$torch/" constraints.txt >"$prefix/constraints.txt"
  else
    say "installing torch (first: deepspeed's setup imports it; half a minute, and the download of up to 3 GB with CUDA)"
    pip_install --constraint "$prefix/constraints.txt" torch
  fi
  say "installing sdp_deepspeed[${1:-deepspeed}], editable, with the versions of constraints.txt (about a minute)"
  pip_install --constraint "$prefix/constraints.txt" --editable ".[${1:-deepspeed}]"
  echo "$contents" >"$stamp"
fi
