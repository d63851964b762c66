# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: a Python environment with the package and everything it needs.
# Uses the active environment, else makes .venv here. A torch that the environment or the system brings stays as it is.
# Safe to run again: does nothing when nothing changed.
# Argument: the package's extra, such as `test`, which has all that `deepspeed` has; "" is `deepspeed`.

say() { printf '==> %s\n' "$*"; }

# Minor versions of Python 3: the lowest that pyproject.toml declares, and the first beyond.
python_range() { sed -n 's/^requires-python = ">=3\.\([0-9]*\),<3\.\([0-9]*\)".*/\1 \2/p' pyproject.toml; }

python_fits() {
  # shellcheck disable=SC2046  # two words
  "$1" -c 'import sys; low, beyond = map(int, sys.argv[1:]); sys.exit(not (3, low) <= sys.version_info[:2] < (3, beyond))' \
    $(python_range) 2>/dev/null
}

brings_torch() { "$1" launch/_torch.py fits 2>/dev/null; }

# The newest Python on PATH that is declared; with an argument, the newest of those for which that command succeeds.
find_python() {
  local also=${1:-true} low beyond minor candidate candidates=""
  read -r low beyond <<<"$(python_range)"
  for ((minor = low; minor < beyond; minor++)); do candidates="python3.$minor $candidates"; done
  for candidate in $candidates python3 python; do
    if python_fits "$candidate" && "$also" "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

need_python() {
  local low beyond
  read -r low beyond <<<"$(python_range)"
  echo "error: Python 3.$low to 3.$((beyond - 1)) is needed and $*" >&2
  return 1
}

make_environment() {
  local python with_system=""
  if python=$(find_python brings_torch); then
    with_system=--system-site-packages
  elif python=$(find_python); then
    "$python" launch/_torch.py fits || true # says which torch there is and why it is not used
  else
    need_python "none is on PATH; install one, or activate an environment"
    return
  fi
  say "making a virtual environment in .venv with $("$python" --version)${with_system:+ and its packages, torch among them}"
  "$python" -m venv $with_system .venv
  if [ -n "$with_system" ]; then # that Python may be an environment of its own, of whose packages a new one sees none
    "$python" launch/_torch.py folder \
      >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/with_torch.pth"
  fi
}

activate_environment() {
  if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    say "using the active environment ${VIRTUAL_ENV:-$CONDA_PREFIX}"
  else
    if [ -x .venv/bin/python ]; then say "using .venv"; else make_environment || return; fi
    # shellcheck source=/dev/null
    source .venv/bin/activate
  fi
  python_fits python || need_python "the environment has $(python --version 2>&1); activate another, or remove .venv"
}

pip_install() { python -m pip install --quiet --disable-pip-version-check "$@"; }

install_package() {
  local extras=$1 prefix stamp constraints torch
  prefix=$(python -c 'import sys; print(sys.prefix)')
  stamp="$prefix/.sdp_deepspeed-$extras"
  constraints="$prefix/.sdp_deepspeed-constraints.txt"
  python launch/_torch.py constraints >"$constraints" || return
  if [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint "$constraints")" ]; then
    say "sdp_deepspeed is already installed"
    return
  fi
  torch=$(grep '^torch==' "$constraints")
  if grep -qxF "$torch" constraints.txt; then
    say "installing torch (first and alone: deepspeed's set-up imports it)"
    pip_install --constraint "$constraints" torch || return
  else
    say "torch ${torch#torch==} is here and stays as it is"
  fi
  say "installing sdp_deepspeed[$extras], editable, with the versions of constraints.txt"
  pip_install --constraint "$constraints" --editable ".[$extras]" || return
  if [ ! -x "$prefix/bin/deepspeed" ]; then # the command of a system's own would start the system's Python
    pip_install --constraint "$constraints" --no-deps --ignore-installed deepspeed || return
  fi
  build_cpu_operators "$extras" || return
  python launch/_torch.py constraints >"$constraints" || return # names the torch that was installed
  fingerprint "$constraints" >"$stamp"
}

# What an installation depends on, as one line.
fingerprint() {
  echo "$PWD $(cat pyproject.toml setup.cfg "$1" sdp_deepspeed/version.py | python -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
}

# On a CPU DeepSpeed compiles a C++ operator when ranks first meet; done here, once, so that no run waits for it.
build_cpu_operators() {
  if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    return
  fi
  local optimizer=""
  if [ "$1" = test ]; then # the offload tests take it; ranks that compiled it would do so against their time limit
    build_cpu_operator CPUAdamBuilder "optimizer" &
    optimizer=$!
  fi
  build_cpu_operator ShareMemCommBuilder "communication operator" || return
  if [ -n "$optimizer" ]; then
    wait "$optimizer" || return
  fi
}

build_cpu_operator() {
  local builder=$1 what=$2
  if ! command -v "${CXX:-c++}" >/dev/null || ! has_python_headers; then
    echo "error: for workers on the CPU DeepSpeed needs a C++ compiler and Python's headers; install them (Debian," \
      "Ubuntu: g++ python3-dev; Fedora: gcc-c++ python3-devel) and run this again" >&2
    return 1
  fi
  say "building DeepSpeed's $what for CPUs (once; about a minute)"
  # A build that was killed leaves its lock, for which the next one would wait without end.
  find "$TORCH_EXTENSIONS_DIR" -name lock -mmin +15 -delete 2>/dev/null || true
  DS_ACCELERATOR=cpu python -c '
import sys
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder(sys.argv[1]).load(verbose=False)' "$builder" >/dev/null
}

has_python_headers() {
  python -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

activate_environment || return
# Compiled operators go into the environment: elsewhere two environments rebuild them by turns, each for its own paths.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$(python -c 'import sys; print(sys.prefix)')/torch_extensions}"
install_package "${1:-deepspeed}" || return
say "$(python launch/_torch.py describe)"
