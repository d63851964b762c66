"""Train an image classifier with or without subnetwork data parallelism, under DeepSpeed or FSDP2.

    deepspeed --num_gpus 4 launch/train_vision.py --dataset digits --model configs/vision/models/digits.json \
        --deepspeed_config configs/vision/digits.json --run-folder runs/digits --epochs 40
    deepspeed --num_gpus 8 launch/train_vision.py --dataset cifar10 --model configs/vision/models/resnet18.json \
        --deepspeed_config configs/vision/recipes/resnet-forward-neuron-4of8.json --run-folder runs/cifar10 --epochs 200

Ctrl-C or SIGTERM saves and stops; the same command resumes. `--help` lists the options.
"""

from __future__ import annotations

import sys

from sdp_deepspeed.vision.main import main

if __name__ == "__main__":
    sys.exit(main())
