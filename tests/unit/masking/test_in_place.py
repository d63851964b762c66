"""Where a model writes to the sum of a layer's input and a branch, it does not write to the input on a rank that lacks
the branch; elsewhere the sum is the input itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, locate_branches, registry, units_of_branches
from sdp_deepspeed.masking.in_place import may_write_in_place
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.masked_modules import infos
from tests.helpers.models import SPECIMENS
from tests.helpers.more_models import ALL_SPECIMENS
from tests.helpers.rank_models import mask_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2, self.norm3 = (nn.BatchNorm1d(4, track_running_stats=False) for _ in range(3))
        self.body, self.body2, self.body3 = (
            nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 4)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.body(self.norm(x))
        x = x + self.body2(self.norm2(x))
        return x + self.body3(self.norm3(x))


class Assigns(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(self.norm(x))
        h += x
        h2 = h + self.body2(self.norm2(h))
        h2 += self.body3(self.norm3(x))
        return h2 + h


class CallsAMethod(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rectified(x + self.body(self.norm(x)))
        x = self.rectified(x + self.body2(self.norm2(x)))
        return self.rectified(x + self.body3(self.norm3(x)))

    def rectified(self, x: torch.Tensor) -> torch.Tensor:
        return next(torch.relu_(y) for y in (x,))


class CallsAFunction(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(x + self.body(self.norm(x)), inplace=True)
        x = nn.functional.relu(x + self.body2(self.norm2(x)), inplace=True)
        return nn.functional.relu(x + self.body3(self.norm3(x)), inplace=True)


class SetsItems(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.body(self.norm(x))
        x[:, 0] = 0
        x = x + self.body2(self.norm2(x))
        x[1:2] = 0
        x = x + self.body3(self.norm3(x))
        x[:, 1] = 1
        return x


class CallsSuper(Assigns):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


class WritesToANorm(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, body in ((self.norm, self.body), (self.norm2, self.body2), (self.norm3, self.body3)):
            h = norm(x)
            h *= 2
            x = x + body(h)
        return x


class HasAModule(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(x + self.body(self.norm(x)))
        x = self.relu(x + self.body2(self.norm2(x)))
        return self.relu(x + self.body3(self.norm3(x)))


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x


class ModelThatAssigns(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        h *= 2
        return h + x


class ModelThatCallsAMethod(ModelThatAssigns):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


LAYERS = (Layer, Assigns, CallsAMethod, CallsAFunction, SetsItems, CallsSuper, WritesToANorm, HasAModule)
BRANCHES = tuple(Branch(f"part{n}", norm=f"norm{n}", body=f"body{n}") for n in ("", "2", "3"))


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    for layer in LAYERS:
        architectures.register(layer, *BRANCHES)


def build(model: type[Model] = Model, layer: type[Layer] = Layer) -> Any:
    torch.manual_seed(3)
    return model(layer())


def masked(model: Any, held: int) -> Any:
    """With one of the three branches."""
    units = units_of_branches(locate_branches(model), granularity="sublayer", shared=())
    plan = Plan("forward", "block", 2, 1, 0, tuple(units), tuple((int(n == held),) for n in range(3)), (0, 1))
    mask_of(model, locate_branches(model), infos(model), plan, 1)
    return model


@pytest.mark.parametrize("held", range(3))
@pytest.mark.parametrize(
    ("model", "layer"),
    [*((Model, layer) for layer in LAYERS[1:]), (ModelThatAssigns, Layer), (ModelThatCallsAMethod, Layer)],
)
def test_as_the_dense_model_with_branches_of_zeros(model: type[Model], layer: type[Layer], held: int) -> None:
    subnetwork, dense = masked(build(model, layer), held), build(model, layer)
    names = [branch.body for branch in BRANCHES]
    for name in {*names} - {names[held]}:
        for parameter in dense.layer.get_submodule(name)[2].parameters():
            nn.init.zeros_(parameter)
    results = []
    for each in (subnetwork, dense):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        given = x.sin()
        before = given.detach().clone()
        each(given).square().sum().backward()
        assert torch.equal(given, before)
        results.append([x.grad, *[p.grad for p in each.layer.get_submodule(names[held]).parameters()]])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(here, there)


def test_hosts_code_copies_nothing() -> None:
    """The sum of a Llama's hidden state and a lacking branch is that state."""
    model: Any = SPECIMENS["llama"].build()
    seen: list[torch.Tensor] = []
    units = units_of_branches(locate_branches(model), granularity="sublayer", shared=())
    holders = tuple((int(not unit.name.startswith("model.layers.0")),) for unit in units)
    plan = Plan("forward", "block", 2, 1, 0, tuple(units), holders, (0, 1))
    mask_of(model, locate_branches(model), infos(model), plan, 1)
    for layer in model.model.layers[:2]:
        layer.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    model(torch.tensor([[1, 2]]))
    assert seen[0] is seen[1]


@pytest.mark.parametrize("name", ALL_SPECIMENS)
def test_known_families_are_hosts_code(name: str) -> None:
    model = ALL_SPECIMENS[name].build()
    assert not may_write_in_place(model, locate_branches(model))


def test_layers_that_others_described_are_not_trusted() -> None:
    """Nobody has looked whether those write to the sum in place."""
    from transformers.models.helium.modeling_helium import HeliumConfig, HeliumForCausalLM

    attention = Branch("attention", norm="input_layernorm", body="self_attn", num_outputs=2)
    architectures.register("transformers.models.helium.modeling_helium.HeliumDecoderLayer", attention)
    sizes = {"vocab_size": 16, "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "pad_token_id": 0}
    model = HeliumForCausalLM(HeliumConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=4))
    assert may_write_in_place(model, locate_branches(model))


def test_what_counts_as_hosts_code() -> None:
    model: Any = SPECIMENS["llama"].build()
    branches = locate_branches(model)
    inside: Any = model.get_submodule(branches[0].root)
    inside.act_fn, inside.other = nn.ReLU(inplace=True), Layer()
    assert not may_write_in_place(model, branches)
    model.model.embed_tokens.__class__ = type("Own", (nn.Embedding,), {})
    assert may_write_in_place(model, branches)
    model.model.embed_tokens.__class__ = nn.Embedding
    model.model.relu = nn.ReLU(inplace=True)
    assert may_write_in_place(model, branches)
    model.model.relu.inplace = False
    assert not may_write_in_place(model, branches)
    model.lm_head.forward = lambda x: x
    assert may_write_in_place(model, branches)


def test_a_replaced_forward_is_no_hosts_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SPECIMENS["llama"].build()
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x)
    assert may_write_in_place(model, locate_branches(model))
