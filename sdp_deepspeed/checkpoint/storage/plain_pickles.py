"""Pickles of tensors and plain values: read so that nothing else can come of them, and refused without PyTorch's advice
on how to let foreign code run after all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from sdp_deepspeed.atomic_files import regular

_FOREIGN = re.compile(r"GLOBAL ([\w.]+)")


def read_plain(file: Path) -> Any:
    """What `torch.save` wrote, on the host.

    Raises:
        ValueError: it is damaged, or holds more than tensors and plain values.
    """
    try:
        return torch.load(regular(file), map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:  # of many kinds, as the content decides
        reason = refusal_reason(problem)
        raise ValueError(f"checkpoint: {file} is damaged, or could run foreign code: {reason}") from None


def refusal_reason(problem: Exception) -> str:
    """What was found, in our words: PyTorch's go on to tell how to switch the check off."""
    text = str(problem)
    if found := _FOREIGN.search(text):
        return f"it names {found[1]}"
    if "mmap can only" in text:  # for all that is not
        return "it is no zip file"
    if "eights_only" in text or "eights only" in text or "safe_globals" in text:
        return "it is no pickle of tensors and plain values"
    return (text.splitlines() or [type(problem).__name__])[0][:300]
