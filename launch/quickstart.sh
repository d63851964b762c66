#!/usr/bin/env bash
# Trains a small LLaMA with subnetwork data parallelism on four workers, then with plain ZeRO-1 for as many FLOPs, and
# sets them side by side. Everything lands in runs/quickstart/. Interrupted, it goes on where it was; finished, it shows
# the result again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -gt 0 ]; then
  echo "error: quickstart.sh takes no arguments, got: $*; for a run of your own see launch/pretrain.py --help" >&2
  exit 2
fi
source launch/_environment.sh "" # without an argument the sourced script would see ours

# A step of subnetworks with the first and the last layer and half of the blocks between takes 0.67 of a plain one's
# FLOPs, head included: 60 of those and 60 of the dense model are 100 plain ones. tests/unit/repository/test_configs.py
# counts them.
readonly workers=4 steps=120 plain_steps=100 folder=runs/quickstart

free_port() { python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

pretrain() {
  deepspeed "${where[@]}" --master_port "$(free_port)" --log_level warning launch/pretrain.py \
    --model configs/models/tiny.json --deepspeed_config configs/quickstart.json --data configs/data/quickstart.json \
    --eval-interval 25 "$@"
}

# DeepSpeed's launcher takes as many workers as it is told, and two on one GPU would not get far.
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "${DS_ACCELERATOR:-}" = cpu ]; then
  on_the_cpu="DS_ACCELERATOR=cpu"
elif [ "$gpus" -eq 0 ]; then
  on_the_cpu="no GPU that torch can use"
elif [ "$gpus" -lt "$workers" ]; then
  on_the_cpu="$gpus GPU$([ "$gpus" -eq 1 ] || echo s), and each worker would need its own"
else
  on_the_cpu=""
fi
if [ -n "$on_the_cpu" ]; then
  say "$workers workers; $on_the_cpu: all of them run on the CPU"
  cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
  export DS_ACCELERATOR=cpu
  export OMP_NUM_THREADS=$((cores > workers ? cores / workers : 1))
  if [ "$gpus" -gt 0 ]; then say "the GPUs stay untouched; for a run on them see launch/pretrain.py --help"; fi
  build_cpu_operators
else
  say "$workers workers, $gpus GPUs: each worker runs on its own"
fi

where=(--num_gpus "$workers")
# With that the launcher takes the machine's first GPUs, whichever the user has chosen.
if [ -z "$on_the_cpu" ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
  if [[ ! $CUDA_VISIBLE_DEVICES =~ ^[0-9,]+$ ]]; then
    echo "error: CUDA_VISIBLE_DEVICES is $CUDA_VISIBLE_DEVICES; DeepSpeed's launcher takes numbers" >&2
    exit 2
  fi
  where=(--include "localhost:$(cut -d, -f "1-$workers" <<<"$CUDA_VISIBLE_DEVICES")")
fi

say "1/4 subnetwork data parallelism: $workers workers, each with half of the blocks (all at both ends) until the run is half over -> $folder"
pretrain --run-folder "$folder" --steps "$steps"

say "2/4 the baseline, plain ZeRO-1: same model and data, as many FLOPs -> $folder/zero1"
pretrain --run-folder "$folder/zero1" --steps "$plain_steps" --baseline

say "3/4 what a worker pays, at equal FLOPs of all workers; tokens and steps differ"
python -m sdp_deepspeed report "$folder" "$folder/zero1"

say "4/4 the trained model, loaded by Transformers alone from $folder/hf"
python launch/sample.py "$folder/hf" "def "
