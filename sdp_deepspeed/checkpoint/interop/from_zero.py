"""From a ZeRO checkpoint of DeepSpeed (stages 1, 2, 3) to its universal format, by DeepSpeed's own program.

That program unpickles whatever the files hold. Here every file is looked at first, and nothing is made of it but
tensors, plain values and DeepSpeed's few classes (safe_pickles).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal

from sdp_deepspeed.atomic_files import complete_or_absent, regular, write_text
from sdp_deepspeed.checkpoint.interop.safe_pickles import known_classes_only, read_known
from sdp_deepspeed.checkpoint.interop.universal import FP32, LATEST_UNIVERSAL, PARAM, ZERO, is_universal
from sdp_deepspeed.checkpoint.storage.names import LATEST, MANIFEST
from sdp_deepspeed.checkpoint.storage.plain_pickles import refusal_reason
from sdp_deepspeed.messages import quoted

_OPTIMIZERS = "*_optim_states.pt"
_RANK = re.compile(r"zero_pp_rank_(\d+)_")
_MOMENTS = {"exp_avg", "exp_avg_sq"}


def convert(source: Path, out: Path, *, tag: str | None = None) -> Path:
    """Write `out/<tag>_universal`, and `out/latest_universal` that names it, so that `load_checkpoint(out)` loads it.

    Args:
        source: a checkpoint's folder, or the folder above with `latest`.
        out: a folder, made if it is not there.

    Raises:
        ValueError: `source` is no ZeRO checkpoint of an Adam, is damaged, or could run foreign code.
    """
    folder = _tag_folder(source, tag)
    files = sorted(folder.glob("*.pt"))
    _check(folder, files)
    name = f"{folder.name}_universal"
    out.mkdir(parents=True, exist_ok=True)
    with complete_or_absent(out / name) as staging:
        written = staging / name  # DeepSpeed writes beside its output too
        _run(folder, written)
        _add_rest(folder, written / ZERO)
        for path in written.iterdir():
            os.rename(path, staging / path.name)
        for rest in (written, staging / LATEST_UNIVERSAL):
            rest.rmdir() if rest.is_dir() else rest.unlink(missing_ok=True)
    write_text(out / LATEST_UNIVERSAL, name)
    return out / name


def _run(folder: Path, out: Path) -> None:
    arguments = Namespace(
        input_folder=str(folder),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,  # what only Megatron's models record
    )
    with known_classes_only(), contextlib.redirect_stdout(sys.stderr):
        try:
            ds_to_universal.main(arguments)
        except (AssertionError, KeyError, RuntimeError, ValueError, OSError, UnpicklingError) as problem:
            reason = refusal_reason(problem) if isinstance(problem, UnpicklingError) else repr(problem)
            raise ValueError(f"{folder}: DeepSpeed cannot convert it: {reason}") from None


def _add_rest(folder: Path, zero: Path) -> None:
    """Buffers and frozen parameters of ZeRO-3, which DeepSpeed's program leaves out."""
    files = list(folder.glob("*zero_pp_rank_*_mp_rank_00_model_states.pt"))
    files.sort(key=lambda file: int(_RANK.findall(file.name)[0]))
    if not files:
        return
    states = [read_known(file) for file in files]
    tensors = {name: states[0]["module"][name] for name in states[0].get("buffer_names") or ()}
    for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
        flat = torch.cat([state["frozen_param_fragments"][name].view(-1) for state in states])
        tensors[name] = flat[: torch.Size(shape).numel()].view(shape)
    for name, tensor in tensors.items():
        (zero / name).mkdir(exist_ok=True)
        torch.save({PARAM: tensor.float()}, zero / name / f"{FP32}.pt")


def _tag_folder(source: Path, tag: str | None) -> Path:
    if not source.is_dir():
        raise ValueError(f"there is no folder {source}")
    if tag is None and any(source.glob(_OPTIMIZERS)):
        return _foreign(source)
    if tag is None:
        pointer = source / LATEST
        if not pointer.is_file():
            raise ValueError(
                f"{source} has no files {_OPTIMIZERS} and no {LATEST}; give the folder of a ZeRO checkpoint"
            )
        tag = regular(pointer).read_text(encoding="utf-8").strip()
    folder = _foreign(source / tag)
    if not any(folder.glob(_OPTIMIZERS)):
        hint = "it is universal already" if is_universal(folder) else "it is no ZeRO checkpoint of DeepSpeed"
        raise ValueError(f"{folder} has no files {_OPTIMIZERS}: {hint}")
    return folder


def _foreign(folder: Path) -> Path:
    if (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} is a checkpoint of sdp_deepspeed already; give it to engine.load_checkpoint")
    return folder


def _check(folder: Path, files: Iterable[Path]) -> None:
    """What DeepSpeed's program would load, execute or take for a path."""
    has_optimizer = False
    for file in files:
        content = read_known(file)
        if not isinstance(content, dict):
            raise ValueError(f"{file} is damaged: it holds no state")
        if paths := [name for name in _names(content) if os.sep in name or name.startswith(".")]:
            raise ValueError(f"{file} has tensors with names that are paths: {quoted(paths)}; it was not loaded")
        state = content.get("optimizer_state_dict")
        if isinstance(state, dict):
            has_optimizer = True
            _check_moments(file, state)
    if not has_optimizer:
        raise ValueError(f"{folder} has no optimizer state of ZeRO")


def _names(content: dict[str, Any]) -> Iterable[str]:
    """Of the tensors that a file speaks of: they become names of folders."""
    for key in ("module", "frozen_param_shapes"):
        yield from content.get(key) or ()
    for group in content.get("param_shapes") or ():
        yield from group
    state = content.get("optimizer_state_dict")
    for group in (state.get("param_slice_mappings") or ()) if isinstance(state, dict) else ():
        yield from group


def _check_moments(file: Path, state: dict[str, Any]) -> None:
    base = state.get("base_optimizer_state") or state.get("optimizer_state_dict") or {}
    for moments in base.get("state", {}).values() if isinstance(base, dict) else ():
        if not moments.keys() >= _MOMENTS:
            raise ValueError(
                f"{file}: DeepSpeed converts only Adam's state ({', '.join(sorted(_MOMENTS))}); here are "
                f"{quoted(sorted(moments))}. For the weights alone run the zero_to_fp32.py beside the checkpoint with "
                "--safe_serialization where you trust its source, and give the result to engine.load_pretrained"
            )
