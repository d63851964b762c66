"""DeepSpeed's own engine on the subnetwork of a team: `local_steps.teams` in the block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn

from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.engine.earlier_engines import refuse_masked
from sdp_deepspeed.engine.partitioned_model import PartitionedModel, is_partitioned
from sdp_deepspeed.engine.team_checkpoint import load_state, refuse_whole, written_together
from sdp_deepspeed.engine.tensor_parallel import DividedEngine, check_mpu
from sdp_deepspeed.init import DeferredWeights, has_meta_tensors
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.messages import KEY
from sdp_deepspeed.parallel.consistency import raise_on_all_ranks, run_on_all_ranks
from sdp_deepspeed.parallel.groups import control_group
from sdp_deepspeed.teams.join import make_team
from sdp_deepspeed.teams.team import Team
from sdp_deepspeed.teams.weights import TorchHost

_WIRE = {None: torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "bfp16": torch.bfloat16}


class DeepSpeedHost(TorchHost):
    """Reads and writes fp32 masters, and weights with them: below stage 3 a master alone reaches its weight one step
    later.

    Args:
        partitioned: weights of a model built under `zero.Init`.
    """

    def __init__(self, partitioned: PartitionedModel | None) -> None:
        super().__init__()
        self._partitioned = partitioned

    def reduce(self, mask: Mask) -> None:
        super().reduce(mask)
        if self._partitioned is not None:
            self._partitioned.reduce(mask)

    def read(self, name: str) -> torch.Tensor:
        parameter = self.parameter(name)
        values = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if values is not None:
            return values.detach().view(self.shapes[name])
        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        with _gathered(parameter):
            return parameter.detach().clone()

    def local(self) -> list[torch.Tensor]:
        return [value for value in super().local() if not hasattr(value, "ds_id")]  # stage 3 frees and gathers those

    def write(self, name: str, values: torch.Tensor) -> None:
        parameter = self.parameter(name)
        values = values.to(parameter.device)
        if parameter.requires_grad:
            safe_set_full_fp32_param(parameter, values)
        with _gathered(parameter):
            parameter.data.copy_(values)


def _gathered(parameter: torch.Tensor) -> Any:
    """Context in which a parameter is whole; at stage 3 it is gathered, and divided again with the values of rank 0."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


class TeamEngine(DividedEngine):
    """DeepSpeed's engine, at any stage, of a model that is reduced to the subnetwork of this team.

    It starts with the first forward pass in training, after any `load_checkpoint`, unless `team.start()` was called.

    Attributes:
        team: see `sdp_deepspeed.join`. `step` meets the other teams, `save_checkpoint` and `load_checkpoint` include
            its state.
    """

    block: SubnetworkConfig
    team: Team
    _has_warned = False

    def __init__(
        self,
        args: Any,
        model: nn.Module,
        *arguments: Any,
        config: Any = None,
        **options: Any,
    ) -> None:
        refuse_masked(model)
        _refuse(model, config)
        check_mpu(options.get("mpu"))
        self._deferred = DeferredWeights(model) if has_meta_tensors(model) else None
        options["dont_change_device"] = options.get("dont_change_device", False) or self._deferred is not None
        self._control = control_group()
        super().__init__(args, model, *arguments, config=config, **options)

    def _configure_distributed_model(self, model: nn.Module) -> None:
        super()._configure_distributed_model(model)
        partitioned = PartitionedModel(model) if is_partitioned(model) else None
        self._find_tensor_parallel()
        dense = dict(model.named_parameters())
        self.team = make_team(
            model,
            self.config[KEY],
            DeepSpeedHost(partitioned),
            _WIRE[self.config.get("communication_data_type")],
            deferred=self._deferred,
            device=self.device,
            branches=self.tensor_parallel.branches,
            shards=self.tensor_parallel.shards,
            data_parallel=self._data_parallel_groups(),
        )
        self._deferred = None
        self._absent = {id(p) for p in dense.values()} - {id(p) for p in model.parameters()}
        self.tensor_parallel.sum_partial_gradients(dense)

    def _broadcast_model(self) -> None:
        if self._deferred is None:  # else all ranks initialize the same weights
            super()._broadcast_model()

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        if isinstance(client_optimizer, torch.optim.Optimizer):
            for group in client_optimizer.param_groups:
                group["params"] = _without(group["params"], self._absent)
        super()._configure_optimizer(client_optimizer, _without(model_parameters, self._absent))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As in DeepSpeed. Outside `dense` it runs the subnetwork, in evaluation as well, which is warned of once."""
        if self.module.training and torch.is_grad_enabled():
            if not self.team.has_started:
                self.team.start()
            self._follow_team()
        if not (self.module.training or self.team.is_dense or torch.is_grad_enabled() or self._has_warned):
            self._has_warned = True
            logger.warning(f"{KEY}: this evaluates the subnetwork of a team; use `with engine.dense():` in all teams")
        return super().forward(*inputs, **kwargs)

    def backward(self, *arguments: Any, **options: Any) -> Any:
        self._refuse_dense("backward")
        return super().backward(*arguments, **options)

    def step(self, *arguments: Any, **options: Any) -> None:
        self._refuse_dense("step")
        before = self.global_steps
        super().step(*arguments, **options)
        if self.global_steps > before:
            self.team.step()
            self._follow_team()

    def _follow_team(self) -> None:
        """Go on at the step of weights that the team has taken over: step count and learning rate."""
        ahead = max(self.team.num_steps - self.global_steps, 0)
        self.global_steps += ahead
        self.global_samples += ahead * int(self.train_batch_size())
        for _ in range(ahead if self.lr_scheduler is not None else 0):
            self.lr_scheduler.step()

    @contextmanager
    def dense(self) -> Iterator[None]:
        """`Team.dense`: at stage 3, too, each rank has the whole dense model inside. Collective in all teams.

        With tensor parallelism each rank has its part of it; `state_dict` of the module returns whole tensors.
        """
        with self.team.dense(), self._state_dicts.whole():
            if self.autotp_size() > 1:  # its check of the first batch removes itself from the subnetwork's hooks only
                self.module._forward_pre_hooks.pop(self.first_dataloader_check.id, None)
            yield

    def _refuse_dense(self, call: str) -> None:
        if self.team.is_dense:
            raise RuntimeError(f"{call} inside engine.dense(): leave the context first, in all teams")

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """`Team.save_pretrained`: collective in all teams."""
        self.team.save_pretrained(folder, **options)

    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: Any = None, save_latest: bool = True, **options: Any
    ) -> Any:
        """Save DeepSpeed's checkpoint of this team, in a folder of the team's own, with the team's state.

        Raises:
            OSError, RuntimeError: on all ranks of the team, if one cannot write. `latest` names the checkpoint before.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        is_later = self.checkpoint_engine.is_decoupled()  # writes in the background
        latest = save_latest and not is_later
        with written_together(self, self.team, Path(save_dir), tag, latest=latest, control=self._control):
            return super().save_checkpoint(save_dir, tag, client_state or {}, save_latest and is_later, **options)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Load DeepSpeed's checkpoint and the team's state, before the first step. If that state is damaged or missing,
        the team takes the others' weights over."""
        if self.team.has_started:
            raise RuntimeError(
                "load_checkpoint: the team trains already; load before the first step, with a new engine"
            )
        run_on_all_ranks(lambda: refuse_whole(Path(load_dir), tag), self._control)
        path, client_state, problem = None, None, None
        try:
            path, client_state = super().load_checkpoint(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
        except Exception as error:  # of a damaged file, on one rank
            if self.zero_optimization_partition_weights():
                raise  # others may wait for this rank in a collective of DeepSpeed's, until it ends
            problem = error
        raise_on_all_ranks(problem, self._control)
        if path is not None:
            num_steps = None if load_module_only else int(self.global_steps)  # DeepSpeed then loads no counters
            load_state(self.team, Path(path).parent, num_steps, self._control)
        return path, client_state


def _refuse(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Raise ValueError for what would not train, or differ between ranks of the team."""
    wire, stage = config.get("communication_data_type"), (config.get("zero_optimization") or {}).get("stage", 0)
    if wire not in _WIRE:
        raise ValueError(f"communication_data_type: got {wire!r}, expected fp32 or bf16 with {KEY}.local_steps")
    if is_partitioned(model) and stage != 3:
        raise ValueError(f"zero_optimization.stage: got {stage}, but deepspeed.zero.Init has divided the model; use 3")
    if any(map(is_moe_param, model.parameters())):
        raise ValueError(f"DeepSpeed's MoE layers are not supported with {KEY}.local_steps; use a model's own experts")
    half = [name for name in ("fp16", "bf16", "bfloat16") if _is_on(config, name)]
    if half and stage == 0:
        raise ValueError(f"{half[0]} at stage 0: {KEY}.local_steps cannot reach its masters; use stage 1")


def _is_on(config: Mapping[str, Any], name: str) -> bool:
    return str(config.get(name, {}).get("enabled", False)).lower() == "true"


def _without(parameters: Sequence[Any], absent: set[int]) -> list[Any]:
    """Parameters, or param groups, without absent ones."""
    kept: list[Any] = []
    for item in parameters:
        if isinstance(item, Mapping):
            kept.append({**item, "params": [p for p in item["params"] if id(p) not in absent]})
        elif id(item) not in absent:
            kept.append(item)
    return kept
