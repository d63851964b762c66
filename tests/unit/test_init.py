"""Models that are built under `Init`: initialized as without it, and equally on every rank, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.measured_step import LiveTensors
from sdp_deepspeed.config import MODES
from sdp_deepspeed.init import DeferredWeights, Init
from sdp_deepspeed.plan.tensors import named_tensors
from sdp_deepspeed.units import Regime
from tests.helpers import core_masks, mixtures
from tests.helpers.models import llama
from tests.helpers.more_models import ALL_SPECIMENS

CPU = torch.device("cpu")
NUM_BUILDS = 4


class Own(nn.Module):
    """A constructor that does all kinds of things itself; two blocks with layers that a mask can cut."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.real = nn.Parameter(torch.linspace(0, 1, 5, device="cpu"))
        self.register_buffer("table", torch.arange(40) * torch.linspace(0, 1, 30)[:, None], persistent=False)
        self.register_buffer("causal", torch.full((4, 4), -torch.inf).triu(1))
        self.plain = torch.arange(7) * 3
        self.parts, self.rows, self.product = (nn.Parameter(torch.empty(30, 40)) for _ in range(3))
        with torch.no_grad():
            self.parts[:17].normal_()
            self.parts[13:].copy_(self.parts[:17] + 1)
            nn.init.uniform_(self.rows)[3].zero_()
            self.rows[torch.tensor([0, 5])] = 2.0
            self.product.data = torch.randn(40, 30).t()
            self.product.mul_(self.product.abs()).add_(self.table)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(64, 64), std=0.02, a=-0.03, b=0.03))
        self.tails = nn.Parameter(nn.init.trunc_normal_(torch.empty(64, 64), a=1.0, b=1.1))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(48, 32), gain=2.0))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(50, 30), 0.3))
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(6, 6, 3)))
        self.embedding = nn.Embedding(200, 8, padding_idx=1).to(torch.bfloat16)
        self.conv = nn.Conv2d(3, 8, 3)
        to: Any = self.to  # whose type PyTorch 2.13 tells wrongly
        to(memory_format=torch.channels_last)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out")
        self.norm = nn.BatchNorm2d(8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2), 2)
        self.recurrent = nn.LSTM(4, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))


def _without_own_seed(build: Callable[[], nn.Module]) -> nn.Module:
    with mock.patch.object(torch, "manual_seed"):
        return build()


def _mixture(name: str) -> nn.Module:
    model, config, options = mixtures.MIXTURES[name]
    return model(config(**options))


SPECIMENS: dict[str, Callable[[], nn.Module]] = {
    **{name: specimen.build for name, specimen in ALL_SPECIMENS.items()},
    **{name: partial(_mixture, name) for name in mixtures.MIXTURES},
}
MODELS: dict[str, Callable[[], nn.Module]] = {"own": Own, "tied": partial(llama, tied=True), **SPECIMENS}


def deferred(build: Callable[[], nn.Module], seed: int = 3) -> tuple[nn.Module, DeferredWeights]:
    torch.manual_seed(seed)
    with Init():
        model = _without_own_seed(build)
    weights = DeferredWeights(model)
    return model, weights


def values_of(build: Callable[[], nn.Module], seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Of a build without and with Init."""
    torch.manual_seed(seed)
    stock = {name: tensor.detach() for name, tensor in named_tensors(_without_own_seed(build)).items()}
    model, weights = deferred(build, seed)
    assert named_tensors(model).keys() == stock.keys(), "tied are the same"
    return stock, {name: weights.value(name, weights.seed) for name in stock}


def assert_initialized_alike(build: Callable[[], nn.Module]) -> None:
    """What is not drawn has the same bits, what is drawn the same deviation, and zeros in the same places."""
    builds = [values_of(build, seed) for seed in range(NUM_BUILDS)]
    for name, first in builds[0][0].items():
        stock, found = ([values[which][name] for values in builds] for which in (0, 1))
        assert [(t.dtype, t.shape, t.stride()) for t in found] == [(t.dtype, t.shape, t.stride()) for t in stock], name
        if all(torch.equal(first, other) for other in stock):
            assert torch.equal(found[0], first), name
            continue
        assert not torch.equal(found[0], found[1]), f"{name} does not depend on the seed"
        constant = torch.stack([value == first for value in stock]).all(0)
        if constant.sum() > 1 and name != "sparse":  # one may be chance
            assert torch.equal(found[0][constant], first[constant]), name
        drawn, expected = (torch.stack([v[~constant].double() for v in values]) for values in (found, stock))
        deviations = float(drawn.std()), float(expected.std())
        error = 4 * max(deviations) / expected.numel() ** 0.5  # four of a normal distribution's means
        assert abs(deviations[0] - deviations[1]) <= max(0.02 * deviations[1], error), name
        assert abs(float(drawn.mean() - expected.mean())) <= 2**0.5 * error, name


@pytest.mark.parametrize("name", core_masks.families(MODELS))
def test_distribution_and_tables(name: str) -> None:
    assert_initialized_alike(MODELS[name])


@pytest.mark.parametrize("name", core_masks.families(core_masks.NAMES, ("gpt2", "t5", "gpt_oss", "resnet")))
def test_ranks_have_pieces_of_one_dense_model(name: str) -> None:
    """In every mode; and the masked module computes what one that was built without Init does."""
    build = SPECIMENS[name]
    dense, weights = deferred(build)
    whole = core_masks.mask_of(dense, core_masks.plan_of(dense, "forward", "block"), 0)
    weights.materialize(whole, CPU, 3)
    dense.train()
    values = named_tensors(dense)
    for regime, strategy in MODES:
        for rank in range(2):
            model, weights = deferred(build)
            plan = core_masks.plan_of(model, regime, core_masks.strategy_of(name, strategy))
            mask = core_masks.mask_of(model.train(), plan, rank)
            mask.apply()
            weights.materialize(mask, CPU, 3)
            assert not [t for t in mask.tensors() if t.is_meta]
            for of_tensor in (*mask.pieces.values(), *mask.buffer_pieces.values()):
                for piece, holders in of_tensor:
                    assert mask.is_stored(piece) or rank not in holders
                    if mask.is_stored(piece):
                        assert torch.equal(mask.view(piece), piece.narrow(values[piece.parameter]))
            expected_model, expected_mask = core_masks.masked(dense, plan, rank)
            assert [t.shape for t in mask.tensors()] == [t.shape for t in expected_mask.tensors()]
            expected, found = core_masks.run(expected_model), core_masks.run(model)
            assert torch.equal(found[1], expected[1])
            assert found[2].keys() == expected[2].keys()


def wide() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=32, **sizes))


@pytest.mark.parametrize(("regime", "strategy"), MODES)
def test_no_rank_has_the_dense_model(regime: Regime, strategy: str) -> None:
    """At no time more than what it stores, and a tensor. Proofs, which need a layer's memory for a while, are over."""
    core_masks.plan_of(deferred(wide)[0], regime, strategy)
    memory = LiveTensors()
    with memory:
        model, weights = deferred(wide)
        mask = core_masks.mask_of(model, core_masks.plan_of(model, regime, strategy), 0)
        mask.apply()
        at_most = sum(t.untyped_storage().nbytes() for t in mask.tensors())
        weights.materialize(mask, CPU, 3)
        held = memory.current()
        for tensor in mask.tensors():  # as hosts do, which have values in flat buffers
            tensor.data = torch.empty(0)
        left = memory.current()
    largest = max(shape.numel() for shape in mask.shapes.values()) * 4
    assert held <= at_most * 1.05
    assert left <= 0.05 * at_most
    assert memory.peak() <= at_most * 1.05 + 2 * largest
    dense = sum(shape.numel() for shape in mask.shapes.values()) * 4
    assert regime == "backward" or at_most < 0.6 * dense


def _inside(build: Callable[[], nn.Module], change: Callable[[Any], object] = lambda model: None) -> nn.Module:
    with Init():
        model = build()
    change(model)
    return model


def materialized(build: Callable[[], nn.Module], change: Callable[[Any], object] = lambda model: None) -> Any:
    torch.manual_seed(3)
    model = _inside(build, change)
    weights = DeferredWeights(model)
    plan = core_masks.plan_of(model, "forward", "block")
    weights.materialize(core_masks.mask_of(model, plan, 0), CPU, weights.seed)
    return model


def test_casts_flags_and_optimizers_stay() -> None:
    expected = materialized(llama)
    kept: dict[str, Any] = {}

    def change(model: Any) -> None:
        model.model.norm.weight.requires_grad_(False)
        model.lm_head.weight.note = "mine"
        kept["optimizer"] = torch.optim.AdamW(model.parameters())
        model.bfloat16()

    model = materialized(llama, change)
    assert [id(p) for p in kept["optimizer"].param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert model.lm_head.weight.note == "mine"
    assert not model.model.norm.weight.requires_grad
    for name, tensor in named_tensors(expected).items():
        found = named_tensors(model)[name]
        assert type(found) is type(tensor)
        assert torch.equal(found, tensor.bfloat16())


def test_plain_attributes_and_tied_weights() -> None:
    class Tied(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.steps = torch.arange(3.0) / 7

    model = materialized(lambda: Tied(llama(tied=True).config))
    assert torch.equal(model.steps, torch.arange(3.0) / 7)
    assert model.lm_head.weight is model.model.embed_tokens.weight


# ---- refusals -------------------------------------------------------------------------------------------------------


class Uninitialized(nn.Module):
    def __init__(self, known: int = 0) -> None:
        super().__init__()
        self.whole, self.part = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.empty(4))
        if known:
            nn.init.ones_(self.part[:known])


def _by_value() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Linear(3, 3) if layer.weight.sum() > 0 else layer


def _nested() -> nn.Module:
    with Init():
        return nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_by_value, "meta tensor"),
        (_nested, "cannot be nested"),
        (lambda: LlamaForCausalLM.from_pretrained("nowhere"), "call engine.load_pretrained"),
    ],
)
def test_refused_inside(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match=words) as caught, Init():
        build()
    assert build is not _by_value or "build this model without Init" in caught.value.__notes__[0]
    assert nn.Linear(2, 2).weight.device == CPU


CHANGES: dict[str, Callable[[Any], object]] = {
    "data": lambda model: model.apply(lambda m: hasattr(m, "weight") and m.weight.data.normal_()),
    "trunc_normal_": lambda model: nn.init.trunc_normal_(model.lm_head.weight),
    "part": lambda model: model.lm_head.weight.detach()[2].view(-1).fill_(1),
    "buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
    "orthogonal_": lambda model: nn.init.orthogonal_(model.lm_head.weight),
    "deepcopy": deepcopy,
    "load_state_dict": lambda model: model.load_state_dict(llama().state_dict()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_cannot_be_changed_in_between(name: str) -> None:
    model = _inside(llama)
    with pytest.raises(RuntimeError, match=r"between sdp_deepspeed\.Init and"):
        CHANGES[name](model)


UNINITIALIZED = "'part': its constructor does not initialize all of it"


def _replaced(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return llama()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: _inside(llama, lambda model: model.load_state_dict(llama().state_dict(), assign=True)),
            "'model.embed_tokens.weight'.* replaced or added after",
        ),
        (lambda: _inside(llama, _replaced), "'lm_head.weight' was replaced or added after"),
        (
            lambda: _inside(llama, lambda model: model.add_module("adapter", nn.Linear(3, 3))),
            r"'adapter.weight', \+1 more was replaced or added after",
        ),
        (_on_meta, "'model.embed_tokens.weight'.* is on the meta device without"),
        (lambda: nn.Sequential(_inside(llama), _inside(llama)), "several"),
        (lambda: _inside(Uninitialized), UNINITIALIZED),
    ],
)
def test_refused_afterwards(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeferredWeights(build())


def test_half_initialized() -> None:
    _, weights = deferred(partial(Uninitialized, 2))
    with pytest.raises(ValueError, match=UNINITIALIZED):
        weights.value("part", 3)
