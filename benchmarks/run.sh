#!/usr/bin/env bash
# What a step holds, takes and sends beside plain PyTorch's and stock DeepSpeed's, how that scales with ranks, and what
# it costs the host as units, layers and ranks grow. Prints the tables at the end.
#
#     bash benchmarks/run.sh [cpu|gpu] [--quick] [--output FOLDER]
#
# Without cpu or gpu it takes the GPUs that torch finds. The raw figures go to runs/benchmarks_cpu or _gpu, those of
# --quick (a small model, few subjects and repeats) to runs/benchmarks_cpu_quick. Interrupted, it goes on where it was;
# what is finished is not measured again, and a folder with figures of another device or of other settings is refused.
# All of it takes about half an hour on two cores, which should have nothing else to do.
set -euo pipefail
started_in=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
  echo "error: $*; usage: bash benchmarks/run.sh [cpu|gpu] [--quick] [--output FOLDER]" >&2
  exit 2
}

where="" quick="" folder=""
while [ $# -gt 0 ]; do
  case $1 in
    cpu | gpu)
      [ -z "$where" ] || refuse "$where or $1, not both"
      where=$1
      ;;
    --quick) quick=yes ;;
    --output)
      [ -n "${2:-}" ] || refuse "--output needs a folder"
      folder=$2
      [[ $folder = /* ]] || folder=$started_in/$folder
      shift
      ;;
    *) refuse "run.sh knows no argument $1" ;;
  esac
  shift
done
make_folder() {
  if ! mkdir -p "$folder" 2>/dev/null || [ ! -w "$folder" ]; then refuse "--output: cannot write to $folder"; fi
}
[ -z "$folder" ] || make_folder
source launch/_environment.sh "" # without an argument the sourced script would see ours

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ -z "$where" ]; then
  if [ "$gpus" -gt 0 ] && [ "${DS_ACCELERATOR:-}" != cpu ]; then where=gpu; else where=cpu; fi
elif [ "$where" = gpu ] && [ "$gpus" -eq 0 ]; then
  refuse "gpu: there is no GPU that torch can use; cpu measures on the CPU"
fi
folder=${folder:-runs/benchmarks_$where${quick:+_quick}}
make_folder
device=CPU
[ "$where" = cpu ] || device=$(python -c 'import torch; print(torch.cuda.get_device_name())')

# What is in the folder is not measured again, so it must be of the same device and settings.
settings="$device${quick:+, quick}"
if [ -f "$folder/settings.txt" ]; then
  before=$(cat "$folder/settings.txt")
  [ "$before" = "$settings" ] || refuse "$folder has figures of $before, not of $settings: name another with --output"
elif compgen -G "$folder/*_ranks.json" >/dev/null; then
  refuse "$folder has figures without the settings.txt that says what they are of: name another with --output"
fi
echo "$settings" >"$folder/settings.txt"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
free_port() { python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

files=()
# Measures into a file of its name, unless it is there: section NAME COMMAND...
section() {
  local target="$folder/$1.json" unfinished="$folder/unfinished_$1.json"
  if [ -f "$target" ]; then
    say "$1 is there already; remove $target to measure it again"
  else
    say "$1 -> $target"
    "${@:2}" --output "$unfinished"
    mv "$unfinished" "$target"
  fi
  files+=("$target")
}

# on_ranks NUMBER SCRIPT OPTIONS...
on_ranks() {
  local on=(--num_gpus "$1")
  if [ "$where" = gpu ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then # the launcher would take the machine's first
    on=(--include "localhost:$(cut -d, -f "1-$1" <<<"$CUDA_VISIBLE_DEVICES")")
  fi
  deepspeed "${on[@]}" --master_port "$(free_port)" --log_level warning "${@:2}"
}

if [ "$where" = gpu ]; then
  if [[ ! ${CUDA_VISIBLE_DEVICES:-0} =~ ^[0-9,]+$ ]]; then
    refuse "CUDA_VISIBLE_DEVICES is $CUDA_VISIBLE_DEVICES, and DeepSpeed's launcher takes numbers"
  fi
  say "$gpus GPUs, bf16, one rank on each"
  if [ "$gpus" -eq 1 ]; then
    say "one GPU: nothing is sent or shared out, so bytes, ZeRO, coverages below 1 and scaling cannot be shown;" \
      "benchmarks/on_gpu.py steps measures a worker of many without its peers"
  fi
  numbers=(1)
  for number in 2 4 8; do if [ "$number" -le "$gpus" ]; then numbers+=("$number"); fi; done
  ranks=$gpus
  sizes=(--model medium --sequence 1024 --precision bf16 --bucket 5e7)
else
  export DS_ACCELERATOR=cpu
  build_cpu_operators
  numbers=(1 2 4 8) ranks=4 sizes=()
fi
few=() shapes=() worlds=(8 64 512)
if [ -n "$quick" ]; then
  sizes=(--model tiny --sequence 32 --warmup 1 --repeats 3 --splits 2)
  few=(--modes "forward x block" --stages 1 --coverages 1 0.5)
  shapes=(--layers 2 4) worlds=(8)
  if [ "$where" = cpu ]; then numbers=(1 2) ranks=2; fi
fi

section "systems_${ranks}_ranks" on_ranks "$ranks" benchmarks/side_by_side.py "${sizes[@]}" "${few[@]}"
for number in "${numbers[@]}"; do
  section "scaling_${number}_ranks" on_ranks "$number" benchmarks/scaling.py "${sizes[@]}"
done
for number in "${worlds[@]}"; do
  section "growth_${number}_ranks" env DS_ACCELERATOR=cpu python benchmarks/growth.py --ranks "$number" "${shapes[@]}"
done
section "collectives_${ranks}_ranks" on_ranks "$ranks" benchmarks/collectives.py "${shapes[@]}"

say "the tables, of $folder"
python benchmarks/tables/make.py "${files[@]}"
