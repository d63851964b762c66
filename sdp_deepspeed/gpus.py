"""GPUs of this machine that torch cannot use: a run would train on the CPU without a word."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

_DEV = Path("/dev")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# What comes after the first name that is none does not count. Slurm hides GPUs from jobs without any by "NoDevFiles".
_NAMES_A_GPU = re.compile(r"\s*(\d|GPU-|MIG-)")
_FILES = ("nvidia[0-9]*", "kfd")  # one for each of NVIDIA's GPUs; AMD's


def unusable_gpus() -> str | None:
    """Why torch cannot use GPUs that are there, such as a driver that is too old for it, and what to do. None if it can
    use them, if there are none, or if the environment hides them or asks for the CPU. Starts no GPU that works."""
    is_hidden = any(name in os.environ and not _NAMES_A_GPU.match(os.environ[name]) for name in _VISIBLE)
    files = sorted(str(file) for name in _FILES for file in _DEV.glob(name))
    if not files or is_hidden or os.environ.get("DS_ACCELERATOR") == "cpu":
        return None
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own words, which are in ours
        if torch.cuda.is_available():
            return None
    return (
        f"torch {torch.__version__} cannot use this machine's GPUs ({', '.join(files[:2])}): {_reason()}. Update their "
        "driver, or install a torch that was built for it; DS_ACCELERATOR=cpu says that the CPU is meant"
    )


def _reason() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "it was built for CPUs"
    try:
        torch.cuda.init()
    except Exception as error:  # of several kinds
        return f"{error}".split(". ")[0].removesuffix(".")
    return "it does not say why"
