"""Pre-train a decoder with or without subnetwork data parallelism, under DeepSpeed's launcher.

    deepspeed --num_gpus 4 launch/pretrain.py --model configs/models/tiny.json \
        --deepspeed_config configs/quickstart.json --run-folder runs/first --steps 200

Ctrl-C or SIGTERM saves and stops; the same command resumes. `--help` lists the options.
"""

from __future__ import annotations

import sys

from sdp_deepspeed.training.main import main

if __name__ == "__main__":
    sys.exit(main())
