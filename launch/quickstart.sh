#!/usr/bin/env bash
# Trains a small Llama with subnetwork data parallelism on four ranks, then with plain ZeRO-1 at equal FLOPs, and prints
# a comparison. Output is in runs/quickstart*. Run it again to resume, or to show the result again.
# QUICKSTART_STEPS and QUICKSTART_WORKERS make it smaller; key=value arguments override the recipe. launch/test.sh uses
# both.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for argument in "$@"; do
  if [[ $argument != *=* ]]; then
    echo "error: quickstart.sh takes key=value overrides of the recipe, got: $argument; for your own runs see launch/pretrain.py --help" >&2
    exit 2
  fi
done
overrides=("$@")
# shellcheck source=launch/_environment.sh
source launch/_environment.sh deepspeed

# With both ends whole, a step of subnetworks takes 2/3 of a dense step's FLOPs.
readonly workers=${QUICKSTART_WORKERS:-4} steps=${QUICKSTART_STEPS:-120}
readonly recipe=configs/recipes/quickstart.yaml folder=${QUICKSTART_FOLDER:-runs}/quickstart

# Warnings of deprecated calls in DeepSpeed and PyTorch, once for each worker, are not news for a reader here.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::FutureWarning}"

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "${DS_ACCELERATOR:-}" = cpu ] || [ "$gpus" -lt "$workers" ]; then
  say "$workers workers on the CPU ($gpus GPUs; each worker needs one)"
  cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
  export DS_ACCELERATOR=cpu OMP_NUM_THREADS=$((cores > workers ? cores / workers : 1))
fi

pretrain() {
  deepspeed --num_gpus "$workers" --master_port "$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')" \
    --log_level warning benchmarks/quickstart.py "$recipe" "training.save_steps=$((steps / 2))" "training.eval_steps=$((steps / 2))" \
    "${overrides[@]}" "$@"
}

say "1/4 subnetwork data parallelism: half of the blocks on each of $workers workers (the first and last layer on all) -> $folder
    starts $workers processes and tokenizes Python's source code (half a minute), then trains $steps steps (a minute)"
pretrain "training.max_steps=$steps" "training.output_dir=$folder"

say "2/4 plain ZeRO-1, the same model and data, equal FLOPs: $((steps * 2 / 3)) steps (a minute) -> ${folder}_zero1"
pretrain "training.max_steps=$((steps * 2 / 3))" "training.output_dir=${folder}_zero1" sdp=off

say "3/4 measured: of the busiest worker, memory, and compute and bytes sent of the run; model state is weights, gradients
    and optimizer state; dense loss is the whole model's on held-out text, in nats per token, after too few steps to judge"
python benchmarks/quickstart_table.py "$folder" "${folder}_zero1"

say "4/4 text from the trained model, loaded with Transformers alone from $folder/hf: gibberish, since it saw 1 MB of code"
python -c '
import sys
from transformers import pipeline, set_seed
set_seed(0)
generate = pipeline("text-generation", sys.argv[1])
print(generate("def ", max_new_tokens=60, do_sample=True, top_p=0.8)[0]["generated_text"])' "$folder/hf"
