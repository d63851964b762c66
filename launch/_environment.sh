# Sourced by quickstart.sh and test.sh: a Python environment with the package and everything it needs.
# Uses the active virtual environment, else makes .venv here. Safe to run again: does nothing when nothing changed.
# Arguments: the package's extras, e.g. `source launch/_environment.sh test`.

say() { printf '==> %s\n' "$*"; }

find_python() {
  local candidate
  for candidate in python3.12 python3.11 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "error: Python 3.11 or 3.12 is needed and none is on PATH; install one, or activate an environment" >&2
  return 1
}

activate_environment() {
  if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    say "using the active environment ${VIRTUAL_ENV:-$CONDA_PREFIX}"
    return
  fi
  if [ ! -x .venv/bin/python ]; then
    local python
    python=$(find_python) || return
    say "making a virtual environment in .venv with $("$python" --version)"
    "$python" -m venv .venv || return
  else
    say "using .venv"
  fi
  source .venv/bin/activate
}

install_package() {
  local extras=$1 stamp wanted
  stamp="$(python -c 'import sys; print(sys.prefix)')/.sdp_deepspeed-${extras:-base}"
  wanted="$PWD $(cat pyproject.toml setup.cfg constraints.txt sdp_deepspeed/version.py | python -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    say "sdp_deepspeed is already installed"
    return
  fi
  say "installing torch (first and alone: deepspeed's set-up imports it)"
  python -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)" || return
  say "installing sdp_deepspeed${extras:+[$extras]}, editable, with the versions of constraints.txt"
  python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
    --editable ".${extras:+[$extras]}" || return
  build_cpu_operator ShareMemCommBuilder "communication operator" || return
  if [ "$extras" = test ]; then # the offload tests take it; ranks that compiled it would do so against their time limit
    build_cpu_operator CPUAdamBuilder "optimizer" || return
  fi
  echo "$wanted" >"$stamp"
}

# On a CPU DeepSpeed compiles a C++ operator when ranks first meet; done here, once, so that no run waits for it.
build_cpu_operator() {
  local builder=$1 what=$2
  if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    return
  fi
  if ! command -v "${CXX:-c++}" >/dev/null; then
    echo "error: DeepSpeed needs a C++ compiler on machines without a GPU; install g++ and run this again" >&2
    return 1
  fi
  say "building DeepSpeed's $what for CPUs (once; about a minute)"
  DS_ACCELERATOR=cpu python -c '
import sys
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder(sys.argv[1]).load(verbose=False)' "$builder" >/dev/null
}

activate_environment || return
# Compiled operators go into the environment: elsewhere two environments rebuild them by turns, each for its own paths.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$(python -c 'import sys; print(sys.prefix)')/torch_extensions}"
install_package "${1:-}"
