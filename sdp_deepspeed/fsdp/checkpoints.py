"""Checkpoints of sharded models, in the format of both hosts (`checkpoint`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from sdp_deepspeed.checkpoint import manager
from sdp_deepspeed.checkpoint.hugging_face import load_pretrained
from sdp_deepspeed.checkpoint.state import NUMBER, Other, RankState, group_facts
from sdp_deepspeed.fsdp.parts import Box, Part
from sdp_deepspeed.fsdp.sharded_model import ShardedModel, local_of, sharded_model_of
from sdp_deepspeed.fsdp.wrappers import without_wrappers
from sdp_deepspeed.parallel.agree import gather_objects, run_on_all_ranks
from sdp_deepspeed.parallel.optimizer_kinds import groups_of_whole_tensors, is_elementwise
from sdp_deepspeed.units import Piece


class SteppedBox(NamedTuple):
    """A box of a slice, in a parameter that an optimizer steps."""

    parameter: nn.Parameter
    box: Box

    @property
    def piece(self) -> Piece:
        return self.box.piece

    def boxes(self, tensor: Any, *, flat: bool = False) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Where it is in the slice, and the view into a tensor that is sharded like the parameter."""
        assert not flat
        yield self.box.offsets, local_of(tensor)[self.box.inside]


class SteppedShards:
    """An optimizer over the shards of a model, as checkpoints see it. Every rank constructs it.

    Attributes:
        param_groups: by dense name of what is stepped, number of its param group in the run.
        group_numbers: of each param group of the optimizer; those that `param_groups` divided by mesh have one.

    Raises:
        ValueError: on all ranks: the optimizer steps parameters that are not the model's.
    """

    def __init__(self, sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
        self.sharded, self.optimizer = sharded, optimizer
        sharded.reshard()
        control = sharded.groups.control
        self.group_numbers = [group.get(NUMBER, index) for index, group in enumerate(optimizer.param_groups)]
        own = run_on_all_ranks(self._numbers_by_name, control)
        every = {name: number for of_rank in gather_objects(own, control) for name, number in of_rank.items()}
        self.param_groups = {name: every[name] for name in sharded.parts if name in every}

    def _numbers_by_name(self) -> dict[str, int]:
        names = {id(self.sharded.parameter(part)): part.name for part in self._own_parts()}
        lacking = {id(parameter) for parameter in self.sharded.module.parameters() if not parameter.numel()}
        result = {}
        for number, group in zip(self.group_numbers, self.optimizer.param_groups, strict=True):
            for parameter in group["params"]:
                if id(parameter) in names and parameter.requires_grad:
                    result[names[id(parameter)]] = number
                elif id(parameter) not in names and id(parameter) not in lacking:
                    raise ValueError(
                        f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that is not the sharded "
                        "model's; make it of parameters of the model after fully_shard"
                    )
        return result

    def _own_parts(self) -> Iterator[Part]:
        yield from self.sharded.held_parts()
        yield from (self.sharded.parts[name][0] for name in self.sharded.ignored)

    def shard_parts(self, *, owned: bool) -> list[SteppedBox]:
        """What this rank steps. Each element is one rank's, but for what FSDP2 ignores, which rank 0 owns."""
        return [
            SteppedBox(parameter, box)
            for parameter, box, is_owned in self.boxes()
            if box.piece.parameter in self.param_groups and (is_owned or not owned)
        ]

    def boxes(self) -> Iterator[tuple[Any, Box, bool]]:
        """Of all parameters: the parameter, what this rank has of a slice, and whether it owns that."""
        sharded = self.sharded
        for part in sharded.held_parts():
            parameter = sharded.parameter(part)
            yield from ((parameter, box, True) for box in part.boxes(sharded.rank))
        for (part,) in (sharded.parts[name] for name in sharded.ignored):
            inside, zeros = tuple(slice(0, size) for size in part.shape), (0,) * len(part.shape)
            yield sharded.parameter(part), Box(part.pieces[0], zeros, inside, part.shape), sharded.rank == 0

    def return_weights(self) -> None:
        """Nothing: what is stepped are the weights."""


@dataclass(frozen=True)
class ShardedState(RankState):
    """A sharded model in training, on one rank."""

    optimizer: SteppedShards

    @property
    def model(self) -> nn.Module:
        return self.optimizer.sharded.dense.module  # FSDP2 has changed the class of the other

    @property
    def group_numbers(self) -> list[int]:
        return self.optimizer.group_numbers

    def others(self) -> Iterator[Other]:
        sharded = self.optimizer.sharded
        for parameter, box, is_owned in self.optimizer.boxes():
            if box.piece.parameter not in self.optimizer.param_groups:
                yield Other(box.piece, is_owned, box.offsets, local_of(parameter)[box.inside])
        for name, buffer in self.live_buffers().items():
            for piece, holders in self.mask.pieces_of(name):
                if self.mask.is_held(piece):
                    values = self.mask.view(piece, local_of(buffer))
                    yield Other(piece, holders[0] == sharded.rank, (0,) * values.dim(), values)


def state_of(sharded: ShardedModel, optimizer: torch.optim.Optimizer | None = None) -> ShardedState:
    """Every rank calls it.

    Args:
        optimizer: None if only the model matters.
    """
    if optimizer is None:
        sharded.reshard()
        optimizer = torch.optim.SGD([sharded.parameter(part) for part in sharded.held_parts()])
    return ShardedState(sharded.mask, SteppedShards(sharded, optimizer), sharded.groups, sharded.shards)


class CheckpointManager:
    """Checkpoints of a model that `sdp_deepspeed.fully_shard` returned; all ranks call each method, between steps.

    The block's `checkpoint` counts here too: `keep_last`, and `asynchronous`, with which saving returns when everything
    is copied to host memory.

    Args:
        model: sharded.
        optimizer: of its parameters; to be given before its first step, as its steps are counted from here on.
        lr_scheduler: what has a `state_dict` and a `load_state_dict`.

    Attributes:
        global_steps: of the optimizer so far, of the runs that this one resumes too; it names checkpoints without a
            tag.

    Raises:
        ValueError: the model was not sharded by `sdp_deepspeed.fully_shard`, or the optimizer was made before that;
            at the first step, the optimizer's state is not one value for each element.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        self._sharded, self._optimizer, self._lr_scheduler = sharded_model_of(model), optimizer, lr_scheduler
        state_of(self._sharded, optimizer)  # checks it
        run_on_all_ranks(lambda: _check_whole(self._sharded, optimizer), self._sharded.groups.control)
        options = self._sharded.block.checkpoint
        self._manager = manager.CheckpointManager(
            asynchronous=options.asynchronous, keep_last=options.keep_last, verify=options.verify
        )
        self.global_steps = 0
        self._is_checked = False
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.global_steps += 1
        if not (self._is_checked or is_elementwise(type(self._optimizer).__name__)):
            self._is_checked = True
            group_facts(state_of(self._sharded, self._optimizer))  # at the first checkpoint hours would be lost

    def _state(self, call: str) -> ShardedState:
        self._sharded.meetings.meet(call)
        self._sharded.average_statistics()
        return state_of(self._sharded, self._optimizer)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Write the dense model in training, complete or not at all; it loads under any plan and number of ranks, here
        and in the DeepSpeed host, with or without tensor parallelism.

        Args:
            save_dir: folder of all checkpoints, which all ranks see.
            tag: its name there; None names the step.
            client_state: tensors, numbers, strings, lists and dicts that `load_checkpoint` returns; rank 0's is kept.
            save_latest: whether `latest` names it afterward.
            exclude_frozen_parameters: leave out parameters that needed no gradients.

        Raises:
            ValueError: on all ranks: client state that could not be loaded safely, or an optimizer whose state is not
                one value for each element.
            RuntimeError: on all ranks, if it cannot be written; earlier checkpoints are as they were. On those that
                wait, if a rank does not call it.
        """
        with without_wrappers(self._sharded.module):
            state = self._state("save_checkpoint")
            common = {
                "counters": {"global_steps": self.global_steps, "global_samples": 0, "skipped_steps": 0},
                "lr_scheduler": None if self._lr_scheduler is None else self._lr_scheduler.state_dict(),
                "loss_scaler": {},
                "client_state": dict(client_state or {}),
            }
            name = f"global_step{self.global_steps}" if tag is None else str(tag)
            options = {"latest": save_latest, "exclude_frozen": exclude_frozen_parameters}
            self._manager.save(Path(save_dir), name, state, common, **options)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint of this host or of the DeepSpeed host, whatever its layout. Gradients that
        wait in FSDP2 for the end of an accumulation are not dropped: load between steps.

        Args:
            load_dir: folder of all checkpoints.
            tag: None for the one that `latest` names, or the newest complete one.
            load_module_strict: the tensors must be those of the model, neither fewer nor more.
            load_optimizer_states, load_lr_scheduler_states: whether these go on too.
            load_module_only: nothing but the model.

        Returns:
            Path of the checkpoint and the client state; (None, None) if `load_dir` has no checkpoint.

        Raises:
            ValueError: on all ranks, before anything is changed: it is damaged, or of another model, optimizer or LR
                scheduler.
        """
        with without_wrappers(self._sharded.module):
            state = self._state("load_checkpoint")
            found = self._manager.load(
                Path(load_dir),
                None if tag is None else str(tag),
                state,
                optimizer_states=load_optimizer_states and not load_module_only,
                own_state=not load_module_only,
                strict=load_module_strict,
            )
        if found is None:
            return None, None
        common = found.common
        if not load_module_only:
            self.global_steps = common["counters"]["global_steps"]
            stored = common["lr_scheduler"]
            if load_lr_scheduler_states and self._lr_scheduler is not None and stored is not None:
                run_on_all_ranks(lambda: self._lr_scheduler.load_state_dict(stored), state.groups.control)
                _fit_to_groups(self._lr_scheduler, self._optimizer.param_groups)
        return str(found.path), common["client_state"]

    def load_pretrained(self, folder: str | Path) -> None:
        """Start from a local folder in Hugging Face format (safetensors): every rank reads what it holds. The
        optimizer's moments, counters and the LR scheduler stay as they are.

        Raises:
            ValueError: on all ranks, before anything is changed: files are missing or damaged, or of another model.
        """
        with without_wrappers(self._sharded.module):
            load_pretrained(self._state("load_pretrained"), Path(folder))

    def wait_for_checkpoint(self) -> None:
        """Until a checkpoint that is written in the background is complete; all ranks call it, before they leave.

        Raises:
            RuntimeError: on all ranks, if it could not be written.
        """
        self._manager.wait()


def _check_whole(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """ValueError for an optimizer of whole tensors, of which holder sets have parts: each part would be updated as if
    it were the matrix."""
    is_divided = any(part.dim is not None for own in sharded.parts.values() for part in own)
    if is_divided and groups_of_whole_tensors(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} updates whole matrices, of which ranks hold neurons or heads; use "
            'the strategy "block", or an optimizer such as AdamW'
        )


def _fit_to_groups(lr_scheduler: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Have a scheduler of PyTorch's, and those that it is made of, keep what each param group of this rank has: the run
    that was saved may have divided its groups otherwise. Groups got their rates back by their parameters' names."""
    if hasattr(lr_scheduler, "base_lrs"):
        lr_scheduler.base_lrs = [group["initial_lr"] for group in groups]
    if hasattr(lr_scheduler, "_last_lr"):
        lr_scheduler._last_lr = [group["lr"] for group in groups]
    for inner in getattr(lr_scheduler, "_schedulers", ()):
        _fit_to_groups(inner, groups)
