"""What the wrapped optimizer keeps, in the dense model's coordinates: masters, moments, step counts and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sdp_deepspeed.checkpoint.state.chunks import StateDict
from sdp_deepspeed.checkpoint.state.optimizer_metadata import (
    Counts,
    as_optimizer_counts,
    counts_of,
    highest,
    kind_of,
    refuse_another_kind,
    same,
    same_counts,
)
from sdp_deepspeed.checkpoint.state.rank_chunks import RankChunks, locate
from sdp_deepspeed.checkpoint.state.whole_state import is_tensor_state, moments_by_name, new_whole_state, whole_state
from sdp_deepspeed.checkpoint.storage.names import MASTER, WEIGHT
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.optimizer.stepped_group import SteppedGroup
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED
from sdp_deepspeed.support.optimizers import HOW

Finder = Callable[[Fragment, Sequence[torch.Tensor]], torch.Tensor]


class OptimizerState:
    """Of this rank.

    Args:
        optimizer: of a running engine.
        rank_chunks: of the same engine.
    """

    def __init__(self, optimizer: SubnetworkOptimizer, rank_chunks: RankChunks) -> None:
        self._optimizer, self._rank_chunks = optimizer, rank_chunks
        self._finders: list[Finder] = [locate(group) for group in optimizer.groups]

    def owned_fragments(self) -> list[list[Fragment]]:
        """Of each group what this rank owns; at stage 0 that is less than what it steps."""
        exchange = self._optimizer.exchange
        result: list[list[Fragment]] = [[] for _ in self._groups]
        for bucket in exchange.buckets:
            for segment, fragments in exchange.owned(bucket):
                result[segment.group].extend(fragments)
        return result

    def written(self, *, exclude_frozen: bool) -> StateDict:
        """Weights, masters and moments that this rank writes: each element of the dense model is written by one rank.

        Args:
            exclude_frozen: leave out parameters that need no gradients.
        """
        fragments = [fragment for fragments in self.owned_fragments() for fragment in fragments]
        weights = self._rank_chunks.owned_weights(fragments, exclude_frozen=exclude_frozen)
        return self._rank_chunks.of_one_writer(weights | self.owned())

    def owned(self) -> StateDict:
        """Masters and moments that this rank writes."""
        return self._of(self.owned_fragments())

    def stepped(self) -> StateDict:
        """Masters and moments that this rank has."""
        return self._of([group.fragments for group in self._groups])

    def _of(self, fragments_of_groups: Sequence[Sequence[Fragment]]) -> StateDict:
        result: StateDict = {}
        for group, find, fragments in zip(self._groups, self._finders, fragments_of_groups, strict=True):
            if not fragments:
                continue
            if not group.in_place:
                self._add(result, MASTER, fragments, find, group.tensors)
            if group.is_whole:
                owned = {fragment.piece for fragment in fragments}
                result |= whole_state(group, self._optimizer.state, owned, self._rank_chunks)
                continue
            states = self._states(group)
            for key in _moments(states, group):
                # Zeros for what was frozen before its first step (stage 0).
                values = zip(group.tensors, (state.get(key) for state in states), strict=True)
                moments = [torch.zeros_like(tensor.detach()) if value is None else value for tensor, value in values]
                self._add(result, key, fragments, find, moments)
        return result

    def _states(self, group: SteppedGroup) -> list[Mapping[str, Any]]:
        return [self._optimizer.state.get(tensor, {}) for tensor in group.tensors]

    def _add(
        self,
        target: StateDict,
        key: str,
        fragments: Sequence[Fragment],
        find: Finder,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._rank_chunks.add_stretches(target, key, fragments, lambda fragment: find(fragment, tensors))

    def counts(self) -> list[Counts | None]:
        """Of each group its state that is one number; None where this rank steps nothing of the group."""
        return [_counts(self._states(group), group) if group.tensors else None for group in self._groups]

    def metadata(self, counts: Sequence[Sequence[Counts | None]]) -> dict[str, Any]:
        """All but the tensors of elements, the same on every rank.

        Args:
            counts: of all ranks.
        """
        scaler = {
            key: value for key, value in vars(self._optimizer.loss_scaler).items() if isinstance(value, (int, float))
        }
        return {
            "groups": self._group_of_name(),
            "options": [
                {key: value for key, value in options.items() if key != "params"}
                for options in self._optimizer.param_groups
            ],
            "counts": merged(counts),
            "kind": kind_of(self._optimizer.optimizer),
            "loss_scaler": scaler,
        }

    def _group_of_name(self) -> dict[str, int]:
        return {info.name: info.group for info in self._optimizer.model.tensors if info.group != NOT_OPTIMIZED}

    @property
    def _groups(self) -> list[SteppedGroup]:
        return self._optimizer.groups

    def master_targets(self, stored: Mapping[str, Any]) -> StateDict:
        """Where fp32 masters are loaded to, from stored masters or else from weights.

        Args:
            stored: keys of the checkpoint.
        """
        result: StateDict = {}
        for group, find in zip(self._groups, self._finders, strict=True):
            for fragment in group.fragments if not group.in_place else ():
                key = MASTER if f"{MASTER}/{fragment.piece.parameter}" in stored else WEIGHT
                self._add(result, key, [fragment], find, group.tensors)
        return result

    def new_moments(self, stored: Mapping[str, Any], metadata: Mapping[str, Any]) -> tuple[StateDict, dict[str, Any]]:
        """Where moments are loaded to, and the state dict of the wrapped optimizer that has them.

        Args:
            stored: keys of the checkpoint.
            metadata: of the run that wrote it.

        Raises:
            ValueError: the state is of another kind of optimizer, or tensors that are stepped together here were not
                when the checkpoint was written.
        """
        refuse_another_kind(metadata, self._optimizer.optimizer)
        targets: StateDict = {}
        states: dict[int, dict[str, Any]] = {}
        by_name, first = moments_by_name(stored), 0
        for group, find in zip(self._groups, self._finders, strict=True):
            names = list(dict.fromkeys(fragment.piece.parameter for fragment in group.fragments))
            counts = same_counts([counts_of(name, metadata) for name in names], names)
            if group.is_whole:
                own_targets, values = new_whole_state(group, stored, by_name, self._rank_chunks)
                targets |= own_targets
            else:
                moments = same({tuple(by_name.get(name, ())) for name in names}, names, "optimizer state")
                values = [{key: torch.empty_like(tensor.detach()) for key in moments or ()} for tensor in group.tensors]
                for key in moments or ():
                    self._add(targets, key, group.fragments, find, [state[key] for state in values])
            for index, state in enumerate(values):
                states[first + index] = state | as_optimizer_counts(self._optimizer.optimizer, counts)
            first += len(group.tensors)
        return targets, {"state": states, "param_groups": self._options(metadata)}

    def _options(self, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Of the param groups: those of the checkpoint, as far as this optimizer has them, if both group alike."""
        here = self._optimizer.param_groups
        stored = [{key: value for key, value in options.items() if key not in HOW} for options in metadata["options"]]
        groups, stored_groups = self._group_of_name(), metadata["groups"]
        alike = all(groups[name] == stored_groups[name] for name in groups.keys() & stored_groups.keys())
        same = (alike or metadata.get("unknown_members", False)) and len(stored) == len(here)
        first, result = 0, []
        for index, (options, group) in enumerate(zip(here, self._groups, strict=True)):
            known = {key: value for key, value in options.items() if key != "params"}
            if same:
                known |= {key: value for key, value in stored[index].items() if key in known or key == "initial_lr"}
            result.append(known | {"params": list(range(first, first + len(group.tensors)))})
            first += len(group.tensors)
        return result

    def restore(self, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Give the wrapped optimizer what `new_moments` made, and the scaler its state."""
        optimizer = self._optimizer.optimizer
        optimizer.load_state_dict(dict(state))
        tensors = [tensor for group in self._groups for tensor in group.tensors]
        for index, own in state["state"].items():  # PyTorch makes floats of what is none, such as moments of 8 bits
            exact = {k: v for k, v in own.items() if torch.is_tensor(v) and not v.is_floating_point()}
            optimizer.state[tensors[index]].update(exact)
        scaler = metadata["loss_scaler"]
        if self._optimizer.loss_scaler.dynamic and scaler.get("dynamic", True):  # not the 1 of a run in bf16 or fp32
            vars(self._optimizer.loss_scaler).update(scaler)

    def restore_in_place(self, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """As `restore`; param groups stay the objects that they are, which others may have."""
        optimizer = self._optimizer.optimizer
        groups = optimizer.param_groups
        self.restore(state, metadata)
        for group, restored in zip(groups, optimizer.param_groups, strict=True):
            group.clear()
            group.update(restored)
        optimizer.param_groups = groups


def merged(counts: Sequence[Sequence[Counts | None]]) -> list[Counts | None]:
    """Counts of the groups, from those of all ranks; None where no rank steps anything of a group."""
    return [next((known for known in group if known is not None), None) for group in zip(*counts, strict=True)]


def _moments(states: Sequence[Mapping[str, Any]], group: SteppedGroup) -> list[str]:
    """Keys of state that has one value for each element."""
    return list(
        dict.fromkeys(
            key
            for state, tensor in zip(states, group.tensors, strict=True)
            for key, value in state.items()
            if torch.is_tensor(value) and value.shape == tensor.shape
        )
    )


def _counts(states: Sequence[Mapping[str, Any]], group: SteppedGroup) -> dict[str, float]:
    """State that is one number for a tensor: the highest in a group, whose tensors are stepped together. DeepSpeed's
    FusedAdam counts in the last of them only, and what was frozen for a while (stage 0) is behind."""
    moments, found = [] if group.is_whole else _moments(states, group), dict[str, list[Any]]()
    for key, value in (item for state in states for item in state.items()):
        if key not in moments and value is not None and not (group.is_whole and is_tensor_state(value)):
            found.setdefault(key, []).append(value)
    return {key: highest(values) for key, values in found.items()}
