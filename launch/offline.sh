#!/usr/bin/env bash
# For a machine without a network whose Python has a torch:
#
#   bash launch/offline.sh prepare wheels 3.12   # here, in an environment with torch: wheels for its Python
#   bash launch/offline.sh install wheels .venv  # there, in a copy of this folder
#
# Left at home is what torch brings and what only text corpora, plots and lint need. A torch outside the range of
# pyproject.toml is used all the same, and the last lines of `install` say what is untested.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly here of_torch="torch numpy sympy mpmath networkx Jinja2 MarkupSafe"
readonly of_text="datasets dill multiprocess pandas pyarrow python-dateutil tzdata xxhash"
readonly of_plots="matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing"
readonly of_lint="ruff mypy mypy_extensions ast_serialize librt pathspec pre_commit"

usage() {
  sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

prepare() {
  local folder=$1 version=$2 name left_out="" platforms="" glibc
  for name in $of_torch $of_text $of_plots $of_lint deepspeed; do left_out+="|$name"; done
  for ((glibc = 39; glibc >= 5; glibc--)); do platforms+=" --platform manylinux_2_${glibc}_x86_64"; done
  mkdir -p "$folder"
  python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" \
    "$(grep '^deepspeed==' "$here/constraints.txt")" # for any Python; it is not there as a wheel
  grep -vE "^(#|(${left_out#|})==)" "$here/constraints.txt" >"$folder/requirements.txt"
  # shellcheck disable=SC2086
  python -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    $platforms --platform manylinux2014_x86_64 --dest "$folder" --requirement "$folder/requirements.txt"
  du -sh "$folder"
}

install() {
  local wheels=$1 environment=$2
  python3 -m venv --system-site-packages --without-pip "$environment"
  # That Python may be an environment of its own, of whose packages a new one would see none; and this checkout.
  { python3 "$here/launch/_torch.py" folder && echo "$here"; } \
    >"$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/offline.pth"
  python3 -m pip --python "$environment/bin/python" install --quiet --no-index --no-deps --no-compile --ignore-installed \
    "$wheels"/*.whl
  export PATH="$environment/bin:$PATH" # for ninja
  # Of ranks on the CPU, which would compile it against their time limit.
  DS_ACCELERATOR=cpu python -c '
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)' >/dev/null 2>&1 ||
    echo "DeepSpeed's communication operator cannot be built: no ranks on the CPU (a C++ compiler? Python's headers?)"
  cd "$here"
  python launch/_torch.py describe
  DS_ACCELERATOR=cpu python -c '
from sdp_deepspeed.engine.private_api import check_hosts
print(*check_hosts(), sep="\n")'
}

[ $# -eq 3 ] || usage
case $1 in
prepare) prepare "$2" "$3" ;;
install) install "$(cd "$2" && pwd)" "$(realpath -m "$3")" ;;
*) usage ;;
esac
