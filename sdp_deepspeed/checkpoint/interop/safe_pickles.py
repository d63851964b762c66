"""Files of DeepSpeed, which are pickles: read without running what a stranger may have put into them."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import SubparamShape
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.checkpoint.storage.plain_pickles import refusal_reason


def _member(kind: Any, name: str) -> ZeroStageEnum:
    """In place of `getattr`, with which Python 3.11.0 to 3.11.3 pickles the members of an enum."""
    if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"GLOBAL getattr of {kind!r} and {name!r} is not a ZeRO stage")
    return ZeroStageEnum[name]


# All classes that DeepSpeed's own checkpoints have beside tensors and plain values; none runs code when it is made.
_KNOWN: list[Any] = [
    *(LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, SubparamShape, Namespace),
    (_member, "builtins.getattr"),
]
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextmanager
def known_classes_only() -> Iterator[None]:
    """Inside, `torch.load` makes tensors, plain values and DeepSpeed's few classes, whatever its caller asks for; the
    same in processes that are forked inside."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_KNOWN):
            yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def read_known(file: Path) -> Any:
    """Content of a file that `torch.save` wrote; tensors are mapped, and read from the disk when they are used.

    Raises:
        ValueError: it is damaged, or holds something that could run code.
    """
    try:
        with known_classes_only():
            return torch.load(regular(file), map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing") from None
    except pickle.UnpicklingError as problem:
        raise ValueError(
            f"{file} was not loaded, because it holds more than tensors and plain values, which could run foreign "
            f"code: {refusal_reason(problem)}"
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError) as problem:
        raise ValueError(f"{file} is damaged, or was not written by torch.save: {refusal_reason(problem)}") from None
