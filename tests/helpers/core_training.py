"""Models in training without an engine: a mask, a sharded optimizer, groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sdp_deepspeed.checkpoint.files import Reader
from sdp_deepspeed.checkpoint.planners import LoadPlanner, State, add_box
from sdp_deepspeed.checkpoint.rank_state import RankState
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.engine.dense_view import DenseView
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.parallel.groups import Groups
from sdp_deepspeed.parallel.optimizer import ShardedOptimizer
from sdp_deepspeed.plan.planner import plan_model
from tests.helpers.models import batches, llama


def adamw(matrices: list[Any], vectors: list[Any]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def muon(matrices: list[Any], vectors: list[Any]) -> torch.optim.Optimizer:
    """DeepSpeed's, which steps whole matrices by Muon and all else by Adam."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    groups = [{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}]
    made: torch.optim.Optimizer = MuonWithAuxAdam([{"lr": 0.01, "weight_decay": 0.0} | group for group in groups])
    return made


@dataclass(frozen=True)
class Layout:
    """How a run is spread over its ranks.

    Args:
        size: number of ranks.
        block: of the config.
    """

    size: int
    stage: int = 1
    dtype: torch.dtype = torch.float32
    block: Mapping[str, Any] = field(default_factory=dict)
    bucket_size: int = 10**6
    optimizer: Any = adamw
    offload: bool = False


def small_model(dtype: torch.dtype) -> Any:
    """Tied embeddings, a frozen parameter, and a buffer that each rank fills with what it has seen."""
    model: Any = llama(tied=True)
    model.model.norm.weight.requires_grad_(False)
    model.register_buffer("seen", torch.zeros(3))
    return model.to(dtype)


class Training:
    """One rank of a run; all ranks make one."""

    def __init__(self, layout: Layout, earlier: Training | None = None, model: Any = None) -> None:
        """
        Args:
            earlier: whose model, dense, and optimizer go on.
            model: default: `small_model`.
        """
        self.layout, self.steps = layout, 0
        self.model: Any = small_model(layout.dtype) if model is None else model.to(layout.dtype)
        if earlier is not None:
            self.model = earlier.model
        block = SubnetworkConfig(**({} if "holders" in layout.block else {"holders": 1}) | dict(layout.block))
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        group_of = {name: int(p.dim() < 2) for name, p in named.items()}
        groups: list[list[Any]] = [[p for name, p in named.items() if group_of[name] == index] for index in range(2)]
        optimizer = layout.optimizer(*groups) if earlier is None else earlier.state.optimizer.optimizer
        plan, _ = plan_model(self.model, block, layout.size)
        self.mask = Mask(self.model, plan, dist.get_rank())
        sets = {holders for found in self.mask.pieces.values() for _, holders in found}
        self.groups = Groups(sets, control=dist.new_group(backend="gloo"))
        self.mask.apply()
        self.optimizer = ShardedOptimizer(
            optimizer,
            self.mask,
            self.groups,
            group_of,
            regime=plan.regime,  # type: ignore[arg-type]
            stage=layout.stage,  # type: ignore[arg-type]
            bucket_size=layout.bucket_size,
            offload=layout.offload,
        )

    @property
    def state(self) -> RankState:
        return RankState(self.mask, self.optimizer, self.groups)

    def train(self, num_steps: int, seed: int = 1) -> list[float]:
        losses = []
        for step in itertools.islice(batches(self.layout.size, 1, seed), self.steps, self.steps + num_steps):
            (tokens,) = step[dist.get_rank()]
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.reducer.finish_backward()
            self.optimizer.step()
            losses.append(loss.item())
            if hasattr(self.model, "seen"):
                self.model.seen += self.mask.rank + 1
        self.steps += num_steps
        return losses

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that this rank has, copied."""
        found = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for index, shard in enumerate(s for g in self.optimizer.optimizer.param_groups for s in g["params"]):
            found[f"master.{index}"] = shard.detach().clone()
            for key, value in self.optimizer.optimizer.state[shard].items():
                if torch.is_tensor(value):
                    found[f"{key}.{index}"] = value.clone()
        return found

    def end(self) -> None:
        """The model is dense again."""
        view = DenseView(self.mask, self.groups, torch.device("cpu"), wait=lambda _: None, changed=lambda: None)
        view.make_resident()
        view.close()

    def close(self) -> None:
        self.optimizer.close()
        self.groups.close()


@contextmanager
def training(layout: Layout, earlier: Training | None = None, model: Any = None) -> Iterator[Training]:
    run = Training(layout, earlier, model)
    yield run
    run.close()


def dense_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint but those of ranks, whole."""
    reader, state = Reader(path), dict[str, Any]()
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        if "/" in key and not key.startswith("rank/"):
            values = torch.full(stored.size, float("nan")).to(stored.properties.dtype)  # type: ignore[union-attr]
            add_box(state, key, values.shape, [0] * values.dim(), values)
    reader.read(LoadPlanner(), state)
    return {key: next(iter(boxes.parts.values())) for key, boxes in state.items()}


def dense_of(parts: list[State]) -> dict[str, torch.Tensor]:
    """All tensors that some ranks have boxes of, each element once."""
    whole: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for state in parts:
        for key, boxes in state.items():
            dense = whole.setdefault(key, torch.empty(boxes.shape, dtype=boxes.dtype))
            written = times.setdefault(key, torch.zeros(boxes.shape, dtype=torch.int32))
            for offsets, values in boxes.parts.items():
                place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
                dense[place].copy_(values)
                written[place] += 1
    wrong = [key for key, written in times.items() if not bool((written == 1).all())]
    assert not wrong, f"not written once: {wrong}"
    return whole
