"""Pre-train a decoder with or without subnetwork data parallelism, under DeepSpeed or FSDP2.

    deepspeed --num_gpus 4 launch/pretrain.py --model configs/models/tiny.json \
        --deepspeed_config configs/quickstart.json --run-folder runs/first --steps 200
    torchrun --nproc-per-node 8 launch/pretrain.py --host fsdp2 --model configs/models/134M.json \
        --deepspeed_config configs/recipes/134M-forward-block-4of8.json --run-folder runs/second --steps 200

Ctrl-C or SIGTERM saves and stops; the same command resumes. `--help` lists the options.
"""

from __future__ import annotations

import sys

from sdp_deepspeed.training.main import main

if __name__ == "__main__":
    sys.exit(main())
