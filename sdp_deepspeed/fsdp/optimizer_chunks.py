"""What a torch optimizer over this rank's shards keeps, in the dense model's coordinates: moments, counts, options.

Any optimizer of torch's interface whose state has one value for each element, beside numbers such as a step count. The
weights are its masters, in whatever dtype the parameters are.

Ranks have other parameters than one another, and a group may be divided by mesh (`param_groups`). So what a checkpoint
calls a param group is put together here: all that has the same options and the same counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sdp_deepspeed.checkpoint.state.chunks import StateDict
from sdp_deepspeed.checkpoint.state.optimizer_metadata import (
    as_optimizer_counts,
    counts_of,
    kind_of,
    refuse_another_kind,
)
from sdp_deepspeed.checkpoint.storage.names import MASTER, WEIGHT
from sdp_deepspeed.fsdp.local_chunks import LocalChunks, LocalTensor, local_of
from sdp_deepspeed.messages import listed

# Options that say how a step is computed and not what it is. No checkpoint decides them.
HOW = ("fused", "foreach", "capturable", "differentiable")
Kept = tuple[tuple[tuple[str, float], ...], tuple[str, ...]]
"""What an optimizer keeps for a tensor: its numbers, and the names of its moments; sorted."""
Options = tuple[tuple[str, str], ...]
"""Of a param group, as something that is the same on all ranks where they are."""
_MEMBERS = ("params", "param_names")  # of a param group; all else are options


@dataclass(frozen=True)
class GroupOfRank:
    """A param group as one rank has it.

    Args:
        options: all but its members.
        members: positions of their names in the dense model, by what the optimizer keeps for them; none of what this
            rank lacks.
    """

    options: Mapping[str, Any]
    members: Mapping[Kept, Sequence[int]]


class ShardedOptimizerChunks:
    """Of this rank.

    Args:
        optimizer: torch's, or any with its interface; made of the sharded model's parameters.
        chunks: of the same model.

    Raises:
        ValueError: it has parameters that are not the model's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, chunks: LocalChunks) -> None:
        self._optimizer, self._chunks = optimizer, chunks
        self._locals = {id(local.tensor): local for local in chunks.local_tensors}
        self._refuse_others()

    def _refuse_others(self) -> None:
        """What a lacking unit has left of its parameters has no elements."""
        others = [p for p in self._parameters() if id(p) not in self._locals and p.numel()]
        if others:
            raise ValueError(
                f"checkpoint: the optimizer has {len(others)} parameters that are not the sharded model's (the first "
                f"of shape {list(others[0].shape)}); make it of model.parameters() after sdp_deepspeed.fully_shard"
            )

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _held(self, group: Mapping[str, Any]) -> list[LocalTensor]:
        """Without what is frozen and was never stepped."""
        held = [p for p in group["params"] if id(p) in self._locals]
        return [self._locals[id(p)] for p in held if p.requires_grad or self._optimizer.state.get(p)]

    def counts(self) -> list[GroupOfRank]:
        """Param groups of this rank: what other ranks must know for `metadata`."""
        positions = {name: index for index, name in enumerate(self._chunks.tensors)}
        counts = self._counts_by_parameter()
        result = []
        for group in self._optimizer.param_groups:
            members: dict[Kept, list[int]] = {}
            for local in self._held(group):
                numbers = tuple(sorted(counts.get(id(local.tensor), {}).items()))
                kept = numbers, tuple(sorted(key for key, _ in self._moments(local.tensor)))
                members.setdefault(kept, []).append(positions[local.name])
            options = {key: _on_host(value) for key, value in group.items() if key not in _MEMBERS}
            result.append(GroupOfRank(options, members))
        return result

    def _moments(self, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        state = self._optimizer.state.get(parameter, {})
        return [(key, value) for key, value in state.items() if torch.is_tensor(value) and value.dim()]

    def _counts_by_parameter(self) -> dict[int, dict[str, float]]:
        """State that is one number. The host waits once for all that are on a device."""
        result: dict[int, dict[str, float]] = {}
        tensors: list[tuple[int, str, torch.Tensor]] = []
        for parameter in self._parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value) and value.dim() == 0:
                    tensors.append((id(parameter), key, local_of(value)))
                elif not torch.is_tensor(value) and value is not None:
                    result.setdefault(id(parameter), {})[key] = self._number(key, value)
        by_device: dict[torch.device, list[tuple[int, str, torch.Tensor]]] = {}
        for item in tensors:
            by_device.setdefault(item[2].device, []).append(item)
        for items in by_device.values():
            values = torch.stack([value.detach().to(torch.float64) for *_, value in items]).tolist()
            for (parameter_id, key, _), number in zip(items, values, strict=True):
                result.setdefault(parameter_id, {})[key] = number
        return result

    def _number(self, key: str, value: Any) -> float:
        if not isinstance(value, (bool, int, float)):
            raise ValueError(
                f"checkpoint: optimizer {type(self._optimizer).__name__!r} keeps what is neither a tensor nor a number "
                f"({key!r}), so no checkpoint can hold its state; use another optimizer"
            )
        return value

    def metadata(self, counts: Sequence[Sequence[GroupOfRank]]) -> dict[str, Any]:
        """All but the tensors of elements, the same on every rank.

        Args:
            counts: of all ranks.

        Raises:
            ValueError: parts of one dense tensor were stepped differently, for which the format has no place.
        """
        names, options = list(self._chunks.tensors), dict[Options, Mapping[str, Any]]()
        found: dict[str, tuple[Options, Kept]] = {}
        for group in (group for of_rank in counts for group in of_rank):
            key = _comparable(group.options)
            options.setdefault(key, group.options)
            for kept, name in ((kept, names[place]) for kept, places in group.members.items() for place in places):
                if found.setdefault(name, (key, kept)) != (key, kept):
                    raise ValueError(_apart(name, found[name], (key, kept)))
        order = {key: index for index, key in enumerate(options)}
        groups = {name: (order[key], numbers) for name, (key, (numbers, _)) in found.items()}
        distinct = sorted(set(groups.values()))
        numbered = {group: index for index, group in enumerate(distinct)}
        in_order = list(options.values())
        return {
            "groups": {name: numbered[groups[name]] for name in names if name in groups},
            "options": [dict(in_order[index]) for index, _ in distinct],
            "counts": [dict(numbers) for _, numbers in distinct],
            "kind": kind_of(self._optimizer),
            "loss_scaler": {},
        }

    def written(self, *, exclude_frozen: bool) -> StateDict:
        """Weights and moments that this rank writes.

        Args:
            exclude_frozen: leave out parameters that need no gradients.

        Raises:
            ValueError: the optimizer keeps something for a tensor as a whole.
        """
        result = self._chunks.written_weights(exclude_frozen=exclude_frozen)
        in_optimizer = {id(parameter) for parameter in self._parameters()}
        for local in self._chunks.written_tensors():
            for key, value in self._moments(local.tensor) if id(local.tensor) in in_optimizer else ():
                self._refuse_odd(local, key, value)
                self._chunks.add(result, key, local, value)
        return result

    def check(self) -> None:
        """ValueError if it keeps something for a tensor as a whole, or what is no number."""
        self._counts_by_parameter()
        for parameter in self._parameters():
            for key, value in self._moments(parameter) if id(parameter) in self._locals else ():
                self._refuse_odd(self._locals[id(parameter)], key, value)

    def _refuse_odd(self, local: LocalTensor, key: str, value: torch.Tensor) -> None:
        """ValueError for state that does not lie as the parameter does."""
        tensor = local.tensor
        is_like_it = local_of(value).shape == local_of(tensor).shape
        if isinstance(tensor, DTensor) and isinstance(value, DTensor):
            is_like_it = value.shape == tensor.shape and value.placements == tensor.placements
        if not is_like_it or not value.is_floating_point():
            raise ValueError(
                f"checkpoint: optimizer {type(self._optimizer).__name__!r} keeps {key!r} of shape {list(value.shape)} "
                f"and {value.dtype} for {local.name!r} of shape {list(tensor.shape)}: under FSDP2 a checkpoint holds "
                "state of single elements and step counts only; use an optimizer that updates each element by itself, "
                "such as AdamW"
            )

    def master_targets(self, stored: Mapping[str, Any]) -> StateDict:
        """None: the weights are stepped."""
        return {}

    def new_moments(self, stored: Mapping[str, Any], metadata: Mapping[str, Any]) -> tuple[StateDict, dict[str, Any]]:
        """Where moments are loaded to, and the state dict of the optimizer that has them.

        Args:
            stored: DCP's metadata of what the checkpoint has, by key.
            metadata: of the run that wrote it.

        Raises:
            ValueError: the state is of another kind of optimizer, or of whole tensors.
        """
        refuse_another_kind(metadata, self._optimizer)
        by_name = moments_by_name(stored)
        targets: StateDict = {}
        states: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(self._parameters()):
            local = self._locals.get(id(parameter))
            if local is None:
                continue
            state: dict[str, Any] = {}
            for key in by_name.get(local.name, ()):
                self._refuse_whole(key, local.name, stored)
                state[key] = torch.zeros_like(parameter.detach())
                self._chunks.add(targets, key, local, state[key])
            state |= as_optimizer_counts(self._optimizer, counts_of(local.name, metadata))
            if state:
                states[index] = state
        return targets, {"state": states, "param_groups": self._options(metadata)}

    def _refuse_whole(self, key: str, name: str, stored: Mapping[str, Any]) -> None:
        shape = tuple(stored[f"{key}/{name}"].size)
        if shape != self._chunks.shape(name):
            raise ValueError(
                f"checkpoint: it has {key!r} of {name!r} in shape {list(shape)}, which is state of a whole tensor, and "
                "under FSDP2 each rank has a part; load it with load_optimizer_states=False"
            )

    def _options(self, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Of the param groups: those of the checkpoint for their tensors, as far as this optimizer has them, where all
        tensors of a group had the same; how a step is computed stays as it is here."""
        first, result = 0, []
        for group in self._optimizer.param_groups:
            known = {key: value for key, value in group.items() if key not in _MEMBERS}
            numbers = {metadata["groups"].get(local.name) for local in self._held(group)} - {None}
            stored = {_comparable(metadata["options"][number]): metadata["options"][number] for number in numbers}
            if len(stored) == 1:
                (options,) = stored.values()
                known |= {k: v for k, v in options.items() if k not in HOW and (k in known or k == "initial_lr")}
            result.append(known | {"params": list(range(first, first + len(group["params"])))})
            first += len(group["params"])
        return result

    def restore(self, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Give the optimizer what `new_moments` made."""
        self._optimizer.load_state_dict(dict(state))


def _on_host(value: Any) -> Any:
    """A learning rate may be a tensor."""
    return value.detach().cpu() if torch.is_tensor(value) else value


def _apart(name: str, one: tuple[Options, Kept], other: tuple[Options, Kept]) -> str:
    if one[0] != other[0]:
        differ = [str(pair) for pair in zip(one[0], other[0], strict=False) if pair[0] != pair[1]]
        what = f"in param groups with other options ({listed(differ)}); give all ranks' groups the same"
    else:
        what = f"stepped differently (the optimizer keeps {one[1]} and {other[1]}); train all of it together"
    return f"checkpoint: parts of {name!r} are {what}, since a checkpoint has one step count and one group for it"


def _comparable(options: Mapping[str, Any]) -> Options:
    return tuple(
        (key, repr(value.tolist() if torch.is_tensor(value) else value))
        for key, value in sorted(options.items())
        if key not in HOW
    )


def moments_by_name(stored: Iterable[str]) -> dict[str, list[str]]:
    """Keys of the optimizer's tensors that a checkpoint has for each of the model's; in one pass, as a mixture may have
    tens of thousands of tensors."""
    found: dict[str, list[str]] = {}
    for key, _, name in (text.partition("/") for text in sorted(stored)):
        if key not in (WEIGHT, MASTER):
            found.setdefault(name, []).append(key)
    return found
