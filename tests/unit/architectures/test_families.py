"""Every described family: a masked module computes what the dense model with zeroed pieces computes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, locate_branches, registry, unit_costs, units_of_branches
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.virtual_workers import zero_lacking
from tests.helpers import models
from tests.helpers.masked_modules import infos
from tests.helpers.rank_models import mask_of

NUM_LAYERS = 3


def plan_of(model: nn.Module, *, granularity: str = "sublayer", shared: tuple[str, ...] = ()) -> Plan:
    """Two workers, each unit held by one of them in turn."""
    units = units_of_branches(locate_branches(model), granularity=granularity, shared=shared)
    holders = tuple((unit % 2,) for unit in range(len(units)))
    return Plan("forward", "block", 2, 1, 0, tuple(units), holders, (0, 1))


def masked(model: nn.Module, plan: Plan, rank: int) -> nn.Module:
    result = deepcopy(model)
    mask_of(result, locate_branches(result), infos(result), plan, rank)
    return result


def lacking_names(plan: Plan, rank: int) -> set[str]:
    units = [unit for index, unit in enumerate(plan.units) if not plan.holds_rank(index, rank)]
    return {piece.parameter for unit in units for piece in unit.pieces}


def loss_and_gradients(model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = models.loss_of(model, batch) if hasattr(model, "config") else model(batch).square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_as_zeroed(model: nn.Module, plan: Plan, batch: Any) -> None:
    for rank in (0, 1):
        zeroed = deepcopy(model)
        zero_lacking(zeroed, plan, rank)
        expected_loss, expected = loss_and_gradients(zeroed, batch)
        loss, gradients = loss_and_gradients(masked(model, plan, rank), batch)
        # Adding zeros is exact; only the parallel residual adds in another order.
        torch.testing.assert_close(loss, expected_loss, rtol=2**-22, atol=0)
        lacking = lacking_names(plan, rank)
        assert lacking
        assert gradients.keys() == expected.keys() - lacking
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=2**-18, atol=2**-24)


def tokens(seed: int = 3) -> torch.Tensor:
    return next(models.batches(1, 1, seed))[0][0]


@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_masked_is_zeroed(family: str, granularity: str) -> None:
    model = models.scrambled(models.family(family, NUM_LAYERS))
    plan = plan_of(model, granularity=granularity)
    assert len(plan.units) == (2 * NUM_LAYERS if granularity == "sublayer" else NUM_LAYERS)
    assert_same_as_zeroed(model, plan, tokens())


@pytest.mark.parametrize("family", models.FAMILIES)
def test_lacking_units_are_all_of_the_branches_and_have_no_storage(family: str) -> None:
    model = models.family(family, NUM_LAYERS)
    inside = {piece.parameter for branch in locate_branches(model) for piece in branch.pieces}
    layers = {name for name, _ in model.named_parameters() if any(part.isdigit() for part in name.split("."))}
    assert inside == layers
    plan = plan_of(model)
    for rank in (0, 1):
        lacking = lacking_names(plan, rank)
        for name, parameter in masked(model, plan, rank).named_parameters():
            assert (parameter.untyped_storage().nbytes() == 0) == (name in lacking), name
            assert parameter.requires_grad == (name not in lacking), name


class Calls:
    """How often each module ran."""

    def __init__(self, *modules: nn.Module) -> None:
        self.count = 0
        for module in modules:
            module.register_forward_pre_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_gradient_checkpointing_recomputes_and_changes_nothing(family: str, granularity: str, reentrant: bool) -> None:
    model = models.family(family, NUM_LAYERS)
    plan = plan_of(model, granularity=granularity)
    for rank in (0, 1):
        expected_loss, expected = loss_and_gradients(masked(model, plan, rank), tokens())
        checkpointed: Any = masked(model, plan, rank)
        checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        lacking = lacking_names(plan, rank)
        held = [branch.bodies[0] for branch in locate_branches(model) if branch.pieces[0].parameter not in lacking]
        calls = Calls(*[checkpointed.get_submodule(name) for name in held])
        loss, gradients = loss_and_gradients(checkpointed.train(), tokens())
        assert held
        assert calls.count == 2 * len(held)
        assert torch.equal(loss, expected_loss)
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


class OwnBranch(nn.Module):
    scale: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class OwnLayer(nn.Module):
    """`x + drop(body(norm(x)))`, twice, with words of its own."""

    ff: OwnBranch

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.mix, self.drop = nn.LayerNorm(width), OwnBranch(width), nn.Dropout(0.0)
        self.then, self.ff = nn.LayerNorm(width), OwnBranch(width)
        self.gain = nn.Parameter(torch.ones(width))  # in no branch: shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.mix(self.before(x)))
        return self.gain * (x + self.ff(self.then(x)))


class OwnModel(nn.Module):
    layers: Any

    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(OwnLayer(5) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def own_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    architectures.register(
        OwnLayer, Branch("mixer", norm="before", body="mix", after=("drop",)), Branch("mlp", norm="then", body="ff")
    )


@pytest.mark.usefixtures("own_description")
@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
def test_a_users_model(granularity: str) -> None:
    model = OwnModel()
    plan = plan_of(model, granularity=granularity)
    assert_same_as_zeroed(model, plan, torch.randn(2, 5))
    kinds = {piece.kind for unit in plan.units for piece in unit.pieces}
    assert kinds == {"parameter", "buffer"}
    for rank in (0, 1):
        for name, buffer in masked(model, plan, rank).named_buffers():
            assert (buffer.untyped_storage().nbytes() == 0) == (name in lacking_names(plan, rank)), name


@pytest.mark.usefixtures("own_description")
def test_what_cannot_be_described_is_refused() -> None:
    model = OwnModel()
    model.layers[1].ff.linear.weight = model.layers[0].ff.linear.weight
    with pytest.raises(ValueError, match=r"layers\.1\.ff\.linear\.weight.*same tensor.*layers\.0\.mlp.*untie"):
        locate_branches(model)
    model = OwnModel()
    for layer in model.layers:
        layer.ff.register_buffer("scale", model.layers[0].ff.scale)
    with pytest.raises(ValueError, match=r"layers\.1\.ff\.scale.*same tensor"):
        locate_branches(model)
    architectures.register(OwnLayer, Branch("mlp", norm="then", body="feed_forward"))
    with pytest.raises(ValueError, match=r"no submodule 'feed_forward'.*'mlp'.*'ff'"):
        locate_branches(OwnModel())
    with pytest.raises(ValueError, match="different names"):
        architectures.register(OwnLayer, Branch("mlp", "then", "ff"), Branch("mlp", "before", "mix"))
    with pytest.raises(ValueError, match="one or more branches"):
        architectures.register(OwnLayer)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"(?s)OwnModel has no layer.*\.architectures import .*LlamaDecoderLayer"):
        locate_branches(OwnModel())


def test_a_subclass_of_a_described_layer_is_described() -> None:
    class Mine(LlamaDecoderLayer):
        pass

    assert architectures.branches_of(Mine) == architectures.branches_of(LlamaDecoderLayer)
    assert architectures.branches_of(nn.Linear) is None


def test_shared_patterns() -> None:
    model = models.llama(NUM_LAYERS)
    units = plan_of(model, shared=(r"layers\.0\.", r"layers\.2\.(mlp|post_attention)")).units
    assert [unit.name for unit in units] == [
        "model.layers.1.attention",
        "model.layers.1.mlp",
        "model.layers.2.attention",
    ]
    with pytest.raises(ValueError, match=r"shared: .*layers.* matches no parameter of any unit"):
        plan_of(model, shared=(r"layers\.9",))
    with pytest.raises(ValueError, match=r"'q_proj' matches only a part of 'model\.layers\.0\.attention'"):
        plan_of(model, shared=("q_proj",))


def test_costs_of_a_llama() -> None:
    model = models.llama()
    units = units_of_branches(locate_branches(model), granularity="sublayer", shared=())
    attention, mlp, *_ = unit_costs(model, units)
    # hidden 16, 4 heads and 2 key/value heads of 4, inner width 24; a norm has 16 weights and counts no FLOPs
    assert (attention.num_parameters, attention.flops) == (16 * (16 + 8 + 8 + 16) + 16, 2 * 16 * (16 + 8 + 8 + 16))
    assert (mlp.num_parameters, mlp.flops) == (3 * 16 * 24 + 16, 2 * 3 * 16 * 24)
    assert attention.num_bytes == 4 * attention.num_parameters
