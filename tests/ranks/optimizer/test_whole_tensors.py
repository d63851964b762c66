"""Optimizers that update each tensor by itself, Muon above all: as in the reference, as in stock DeepSpeed, and saved
and loaded on any layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState
from torch import nn

import sdp_deepspeed
from sdp_deepspeed.checkpoint.storage.names import MASTER, WEIGHT
from sdp_deepspeed.reference.virtual_workers import Reference
from tests.helpers.dense_checkpoints import dense_tensors
from tests.helpers.fused_adam import not_compiled
from tests.helpers.models import batches, config, llama, loss_of, two_groups, without_block
from tests.helpers.oracle import CaseCheck
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, micro_step, refusal, train
from tests.helpers.whole_tensors import WHOLE_TENSORS, Lamb, deepspeeds_muon

Check = Callable[[Rank], None]


@dataclass(frozen=True)
class Eager:
    """A check in which DeepSpeed's Muon runs as it is written, since compiling it takes a minute, and in fp32: where
    the CPU has instructions for fp16 it takes those, and a difference in the last bit becomes 2**-11."""

    check: Check

    def __call__(self, rank: Rank) -> None:
        in_fp32 = mock.patch("deepspeed.runtime.zero.muon.original_muon.ns_compute_dtype", return_value=torch.float32)
        with torch.compiler.set_stance("force_eager"), in_fp32:
            self.check(rank)


def settings_of(stage: int = 1, clip: float = 0.0, **block: Any) -> dict[str, Any]:
    result = config(**({"holders": 1} | block)) | {"zero_optimization": {"stage": stage}, "gradient_clipping": clip}
    return result | {"zero_allow_untested_optimizer": True}


def client(name: str, settings: dict[str, Any], model: nn.Module | None = None) -> Any:
    """An engine with one of the optimizers, of two param groups."""
    model = llama() if model is None else model
    settings = {key: value for key, value in settings.items() if key != "optimizer"}
    return engine_of(settings, model, optimizer=WHOLE_TENSORS[name](two_groups(dict(model.named_parameters()))))


PARAMS: dict[str, Any] = {"muon_lr": 0.02, "adam_lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}
JSON = {"type": "Muon", "params": PARAMS}


def from_json(rank: Rank) -> None:
    """DeepSpeed says itself which parameters are Muon's, also of units that a rank lacks."""
    for stage, clip in ((1, 0.0), (0, 0.3)):
        settings, dense = settings_of(stage, clip, check_agreement=True), llama()
        with nullcontext() if stage else sdp_deepspeed.Init():
            model = llama()
        engine = engine_of(settings | {"optimizer": JSON}, model)
        kinds = {info.name: info.is_whole for info in engine.optimizer.model.tensors}
        assert kinds["model.layers.0.mlp.up_proj.weight"]
        assert not any(kinds[name] for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"))
        reference = Reference(dense, engine.plan, partial(as_deepspeed, engine), loss_of, engine.gradient_clipping())
        for step in itertools.islice(batches(rank.size, 1), 4):
            losses, norm = reference.step(step)
            assert abs(micro_step(engine, step[rank.rank][0]) - losses[rank.rank][0]) <= 1e-5
            assert abs(engine.get_global_grad_norm() - norm) <= 1e-5 * norm
        assert_close(dense_state(engine), dict(dense.named_parameters()))


def as_deepspeed(engine: Any, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """What it would build of the dense model."""
    for info in engine.optimizer.model.tensors:
        parameter: Any = named[info.name]
        parameter.use_muon = info.is_whole
    options = {key: value for key, value in PARAMS.items() if key != "torch_adam"}
    groups = engine._muon_param_groups(named.values(), options)
    return type(engine.optimizer.optimizer)(groups, adam_optimizer=torch.optim.AdamW)


def fused_adam_beside_muon(rank: Rank) -> None:
    """What "Muon" without `torch_adam` has: it counts in integers, in the last tensor of a group only."""
    options = {key: value for key, value in PARAMS.items() if key != "torch_adam"}
    settings = settings_of() | {"optimizer": {"type": "Muon", "params": options}}
    with not_compiled():
        engine, resumed = engine_of(settings), engine_of(settings)
    assert type(engine.optimizer.optimizer.aux_optimizer).__name__ == "FusedAdam"
    train(engine, num_steps=2)
    engine.save_checkpoint(str(rank.folder / "fused"))
    resumed.load_checkpoint(str(rank.folder / "fused"))
    for one in (engine, resumed):
        train(one, num_steps=2, first=2)
    assert_close(dense_state(resumed), dense_state(engine))


def pytorchs_muon(rank: Rank) -> None:
    """Of all matrices but the embedding, while the rest is frozen. It rounds what it orthogonalizes to bf16, so that a
    difference in the last bit may become 2**-8; gradients of two ranks are added up without one."""
    for stage in (0, 1, 2):
        model = llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("proj" in name)
        dense = deepcopy(model)
        chosen = [p for name, p in model.named_parameters() if "proj" in name]
        settings = {key: value for key, value in settings_of(stage).items() if key != "optimizer"}
        engine = engine_of(settings, model, optimizer=torch.optim.Muon(chosen, lr=0.02))
        reference = Reference(dense, engine.plan, only_projections, loss_of, engine.gradient_clipping())
        for step in itertools.islice(batches(rank.size, 1), 4):
            losses, _ = reference.step(step)
            assert abs(micro_step(engine, step[rank.rank][0]) - losses[rank.rank][0]) <= 1e-5
        assert_close(dense_state(engine), dict(dense.named_parameters()))


def only_projections(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for name, p in named.items() if "proj" in name], lr=0.02)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Weights of a few steps of 0.02: to 1e-4 of a step, and to some roundings (2**-24) of themselves."""
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 2e-6 + 4 * 2**-24 * value.abs().max(), name


def as_stock_deepspeed(rank: Rank) -> None:
    """At C = 1. Stock stages 1 and 2 clip what is orthogonalized, and report its norm; stage 0 clips gradients."""
    for stage, clip in ((0, 0.3), (1, 0.0), (2, 0.0)):
        settings = settings_of(stage, clip, holders=rank.size) | {"optimizer": JSON}
        ours, stock = engine_of(settings), engine_of(without_block(settings))
        assert type(stock).__name__ == "DeepSpeedEngine"
        for batch in next(batches(1, 4, seed=rank.rank))[0]:
            assert abs(micro_step(ours, batch) - micro_step(stock, batch)) <= 1e-5
        assert_close(dense_state(ours), dense_state(stock))


@dataclass(frozen=True)
class Resumes:
    """A run goes on bit for bit on its layout; on another it has the same dense weights, masters and moments."""

    optimizer: str
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, rank: Rank) -> None:
        block, folder = dict(self.options), str(rank.folder / self.optimizer)
        engine, again = (client(self.optimizer, settings_of(**block)) for _ in range(2))
        train(engine, num_steps=2)
        engine.save_checkpoint(folder, tag="a")
        again.load_checkpoint(folder, tag="a")
        for one in (engine, again):
            train(one, num_steps=2, first=2)
        assert_identical(dense_state(engine), dense_state(again))
        elsewhere = settings_of(0, holders=rank.size, **block) | {"bf16": {"enabled": True}}
        for tag, settings in (("b", elsewhere), ("c", settings_of(2, regime="backward", **block))):
            other = client(self.optimizer, settings)
            other.load_checkpoint(folder, tag="a")
            assert_identical(dense_state(other), {k: v.to(other.module.dtype) for k, v in weights(folder, "a").items()})
            self.check_writers(other)
            other.save_checkpoint(folder, tag=tag)
            assert_identical(moments(folder, tag), moments(folder, "a"))
            train(other, num_steps=1)

    def check_writers(self, engine: Any) -> None:
        """At stage 0 too, where several ranks have the same state, one of them writes it."""
        state = OptimizerState(engine.optimizer, engine.rank_chunks()).owned()
        whole = {info.name for info in engine.optimizer.model.tensors if info.is_whole}
        keys = [key for own in gathered(list(state)) for key in own if key.partition("/")[2] in whole]
        assert len(keys) == len(set(keys)) >= len(whole)


def weights(folder: str, tag: str) -> dict[str, torch.Tensor]:
    found = {key.partition("/"): value for key, value in dense_tensors(Path(folder) / tag).items()}
    return {name: value for (kind, _, name), value in found.items() if kind == WEIGHT}


def moments(folder: str, tag: str) -> dict[str, torch.Tensor]:
    found = dense_tensors(Path(folder) / tag)
    result = {key: value for key, value in found.items() if key.partition("/")[0] not in (WEIGHT, MASTER)}
    assert result
    return result


def owners_are_balanced(rank: Rank) -> None:
    """Of matrices as many elements as a rank can own, where two share each unit and three all the rest."""
    engine = client("Muon", settings_of(holders=2), llama(6))
    owned = [group.num_elements for group in engine.optimizer.groups]
    everywhere = gathered(owned)
    for group, sizes in enumerate(zip(*everywhere, strict=True)):
        assert max(sizes) * rank.size <= 1.15 * sum(sizes), (group, sizes)
    total = sum(p.numel() for p in llama(6).parameters())
    assert sum(map(sum, everywhere)) == total


def neuron_units_are_refused(rank: Rank) -> None:
    """By name, as no rank has a whole matrix; where everybody has all, nothing is cut."""
    for optimizer in ("Muon", "Lamb"):
        settings = settings_of(strategy="neuron")
        start = partial(client, optimizer, settings)
        refusal(ValueError, start, "whole tensors", "proj.weight", 'strategy "block"')
    train(client("Muon", settings_of(strategy="neuron", holders=rank.size)), num_steps=1)
    mixed = settings_of(strategy={"attention": "block", "mlp": "neuron"})
    model = llama()
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if "self_attn" in name]
    groups = [{"params": matrices, "use_muon": True}]
    groups.append({"params": [p for name, p in named.items() if "self_attn" not in name], "use_muon": False})
    del mixed["optimizer"]
    train(engine_of(mixed, model, optimizer=deepspeeds_muon()(groups)), num_steps=1)


class Muon(torch.optim.SGD):
    """Somebody else's, perhaps with collectives of its own."""


def what_cannot_work_is_refused(rank: Rank) -> None:
    settings = settings_of()
    del settings["optimizer"]
    cases: list[tuple[Callable[[list[nn.Parameter]], Any], tuple[str, ...]]] = [
        (lambda given: Muon(given, lr=0.1), ("'Muon' of tests", "allow_optimizer")),
        (lambda given: Lamb(given, max_grad_norm=1.0), ("max_grad_norm=1.0", "gradient_clipping")),
        (lambda given: deepspeeds_muon()([{"params": given, "use_muon": True}]), ("norm.weight", "matrices")),
    ]
    for make, words in cases:
        model = llama()
        start = partial(engine_of, settings, model, optimizer=make(list(model.parameters())))
        refusal(ValueError, start, *words)
    heads = settings_of() | {"optimizer": {"type": "Muon", "params": {"per_head_muon": True}}}
    refusal(ValueError, lambda: engine_of(heads), "optimizer.params.per_head_muon: got True")


def odd_state_is_refused_at_the_first_step(rank: Rank) -> None:
    """Of an optimizer that is said to step each element, and does not: not at the first checkpoint, hours later."""
    engine = client("Momentum8bit", settings_of(allow_optimizer=True))
    refusal(ValueError, lambda: train(engine, num_steps=1), "codes", "scales", '"whole_tensors"')


def divided_tensors_are_refused(rank: Rank) -> None:
    settings = settings_of(holders=1) | {"tensor_parallel": {"autotp_size": 2}}
    refusal(ValueError, lambda: client("Muon", settings), "tensor-parallel ranks")


# What differs per case beside stage, regime and holders: cut matrices, overlap, several param groups and sums.
CASES = (
    Case(3, 2, stage=0, optimizer="Muon"),
    Case(3, 2, stage=1, optimizer="Muon", buckets="many", overlap=True, clip=0.0),
    Case(3, 2, stage=2, optimizer="Muon+AdamW", accumulation=3, buckets="many", regime="backward"),
    Case(3, 2, stage=2, optimizer="Muon", model="gpt2", regime="backward", granularity="layer", overlap=True),
    Case(3, 2, stage=1, optimizer="Muon+AdamW", model="llama_tied", offload="cpu", accumulation=3, by_caller=True),
    Case(3, 2, stage=1, optimizer="Adafactor", buckets="many"),
    Case(3, 2, stage=0, optimizer="Adafactor", regime="backward", model="qwen2"),
    Case(3, 2, stage=1, optimizer="Transformers' Adafactor", regime="backward", buckets="many"),
    Case(3, 2, stage=2, optimizer="Lamb", model="gpt_neox", buckets="many"),
)
# Gradients of two ranks are added up without rounding, so that half precision and moments of 8 bits can be compared.
TWO_RANKS = (
    Case(2, 1, stage=1, optimizer="Muon", precision="bf16", buckets="many"),
    Case(2, 1, stage=2, optimizer="Muon", precision="bf16+fp32", accumulation=3, regime="backward"),
    Case(2, 2, stage=1, optimizer="Muon", precision="bf16", offload="cpu", overlap=True),
    Case(2, 1, stage=2, optimizer="Muon", precision="fp16"),
    Case(2, 1, stage=2, optimizer="Momentum8bit", buckets="many"),
)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for case in (case for case in CASES + TWO_RANKS if case.ranks == size):
        yield str(case), Eager(CaseCheck(case))
    if size == 3:
        yield "owners_are_balanced", Eager(owners_are_balanced)
        return
    for resumed in (
        Resumes("Muon"),
        Resumes("Muon+AdamW"),
        Resumes("Transformers' Adafactor"),
        Resumes("Momentum8bit", (("allow_optimizer", "whole_tensors"),)),
    ):
        yield f"resumes-{resumed.optimizer}", Eager(resumed)
    for check in (
        from_json,
        pytorchs_muon,
        fused_adam_beside_muon,
        as_stock_deepspeed,
        neuron_units_are_refused,
        what_cannot_work_is_refused,
        odd_state_is_refused_at_the_first_step,
        divided_tensors_are_refused,  # last: DeepSpeed never forgets a group of AutoTP's
    ):
        yield check.__name__, Eager(check)


@pytest.mark.checks((2, 3), _cases, slow=["*Momentum8bit*", "*Adafactor*", "*Lamb*", "*offload*", "2-*", "*-bf16-*"])
def test_whole_tensors(outcome: str | None) -> None:
    assert outcome is None, outcome
