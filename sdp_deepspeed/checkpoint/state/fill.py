"""Fill what this rank has of the weights, masters and moments from dense tensors, whoever wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader

from sdp_deepspeed.checkpoint.state.chunks import Chunks, StateDict, read_chunks
from sdp_deepspeed.checkpoint.state.trained_state import RankState, TrainedState, WeightChunks
from sdp_deepspeed.checkpoint.storage.names import MASTER, WEIGHT
from sdp_deepspeed.messages import quoted


@dataclass(frozen=True)
class Targets:
    """Where a rank's part of all tensors goes.

    Args:
        chunks: state dicts, one after the other; a key may be in several.
        state: of the wrapped optimizer, with moments among `chunks`; None leaves its own.
    """

    chunks: Sequence[StateDict]
    state: Mapping[str, Any] | None


def fill(
    trained: TrainedState, reader: StorageReader, *, strict: bool, optimizer_metadata: Mapping[str, Any] | None
) -> None:
    """Read this rank's part of all tensors; no collective.

    Args:
        strict: the tensors must be those of the model, neither fewer nor more.
        optimizer_metadata: of the optimizer that wrote them (`OptimizerChunks.metadata`); None leaves moments and
            options as they are.

    Raises:
        ValueError: before anything is changed: it is of another model or optimizer.
        CheckpointException: DCP's, see `translated_dcp_errors`.
    """
    state = trained.rank_state()
    targets = make_targets(state, reader.read_metadata(), strict=strict, optimizer_metadata=optimizer_metadata)
    with torch.no_grad():
        for chunks in targets.chunks:
            read_chunks(chunks, reader)
        if targets.state is not None and optimizer_metadata is not None:
            state.optimizer.restore(targets.state, optimizer_metadata)


def make_targets(
    state: RankState, metadata: Metadata, *, strict: bool, optimizer_metadata: Mapping[str, Any] | None
) -> Targets:
    """Of weights, masters and moments.

    Args:
        state: of this rank.
        metadata: of the dense tensors that there are.
        strict, optimizer_metadata: as in `fill`.

    Raises:
        ValueError: as `fill`.
    """
    weights = _weight_targets(state.weights, metadata, strict=strict)
    masters = state.optimizer.master_targets(metadata.state_dict_metadata)
    _drop_unknown(masters, metadata)
    if optimizer_metadata is None:
        return Targets((weights, masters), None)
    moments, of_optimizer = state.optimizer.new_moments(metadata.state_dict_metadata, optimizer_metadata)
    return Targets((weights, masters, moments), of_optimizer)


def _weight_targets(weights: WeightChunks, metadata: Metadata, *, strict: bool) -> StateDict:
    """Where weights are loaded to; in another precision from masters, or they would be rounded twice."""
    stored = metadata.state_dict_metadata
    _check_names(weights, stored, strict=strict)
    result: StateDict = {}
    for name, box, values in weights.stored_weights():
        weight: Any = stored.get(f"{WEIGHT}/{name}")
        if weight is not None:
            is_rounded = weight.properties.dtype != values.dtype and f"{MASTER}/{name}" in stored
            key = f"{MASTER if is_rounded else WEIGHT}/{name}"
            result.setdefault(key, Chunks(weights.shape(name), values.dtype)).add(box, values)
    return result


def _check_names(weights: WeightChunks, stored: Mapping[str, Any], *, strict: bool) -> None:
    names = {key.removeprefix(f"{WEIGHT}/") for key in stored if key.startswith(f"{WEIGHT}/")}
    missing = sorted({name for name in weights.tensors if prod(weights.shape(name))} - names)
    unknown = sorted(names - set(weights.tensors))
    if strict and (missing or unknown):
        raise ValueError(
            f"checkpoint: it is of another model: {len(missing)} tensors are missing in it ({quoted(missing)}), "
            f"{len(unknown)} are not in the model ({quoted(unknown)}); build the model that was saved, or give "
            "load_module_strict=False"
        )
    for name in names & set(weights.tensors):
        saved, here = tuple(stored[f"{WEIGHT}/{name}"].size), weights.shape(name)
        if saved != here:
            raise ValueError(
                f"checkpoint: {name!r} has shape {saved} in it and {here} in the model; build the model that was saved"
            )
        dtype, wanted = stored[f"{WEIGHT}/{name}"].properties.dtype, weights.tensors[name].dtype
        if wanted.is_floating_point and not dtype.is_floating_point:  # the other way round is DeepSpeed's for buffers
            raise ValueError(
                f"checkpoint: {name!r} is of {dtype} in it and {wanted} in the model; build the model that was saved"
            )


def _drop_unknown(masters: StateDict, metadata: Metadata) -> None:
    """Masters of tensors that the checkpoint lacks (not strict) stay as they are."""
    for key in [key for key in masters if key not in metadata.state_dict_metadata]:
        del masters[key]
