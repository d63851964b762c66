"""Branches derived from a traced pass, without descriptions: which they are, and that a wrong one is not taken."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import sdp_deepspeed
from sdp_deepspeed.architectures import derivation
from sdp_deepspeed.architectures.likeness import likeness
from sdp_deepspeed.masking import replayed_layer
from sdp_deepspeed.masking.proof import proven_branches, replicated_layers
from tests.helpers.core_masks import expected_of, mask_of, masked, plan_of
from tests.helpers.hand_written import HAND_WRITTEN, TOKENS, WIDTH, Layer, Stack, traced
from tests.helpers.oracle_grid import MODELS

REFUSED = [name for name, model in HAND_WRITTEN.items() if not model.branches]
pytestmark = pytest.mark.usefixtures("nothing_is_known")


@pytest.mark.parametrize("name", [name for name in HAND_WRITTEN if name not in REFUSED])
def test_branches_of_a_model_by_hand(name: str) -> None:
    model, written = HAND_WRITTEN[name].traced(), HAND_WRITTEN[name]
    found: dict[str, list[set[str]]] = {}
    for branch in (branch for branch in proven_branches(model) if branch.is_bypassed):
        found.setdefault(branch.layer, []).append({piece.parameter for piece in branch.pieces})
    expected = {
        layer: [set(tensors_of(model, layer, names)) for names in branches]
        for layer, branches in written.branches.items()
    }
    assert found == expected


def tensors_of(model: nn.Module, layer: str, names: Iterable[str]) -> list[str]:
    inside = tuple(f"{layer}.{name}." for name in names)
    tensors = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    return [tensor for tensor in tensors if f"{tensor}.".startswith(inside)]


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_add_nothing_to_a_stream_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="has no residual branch that can be left out"):
        proven_branches(HAND_WRITTEN[name].traced())


class EncoderAndDecoder(nn.Module):
    """PyTorch's own, whose attention has one matrix for queries, keys and values, and transposes its arguments."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"nhead": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 20}
        self.both = nn.Transformer(WIDTH, **sizes, batch_first=True)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> Any:
        return self.both(x, x)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(TOKENS, TOKENS, 3, padding=1), nn.BatchNorm1d(TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class AddsProduct(Layer):
    """Adds a branch and multiplies it in one operation."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return torch.addcmul(x, torch.full_like(x, 0.5), self.mlp(self.ln_2(x)))


@pytest.mark.parametrize(
    ("build", "types"),
    [
        (
            lambda: traced(stack=EncoderAndDecoder),
            ["attention", "mlp"] * 2 + ["attention", "cross_attention", "mlp"] * 2,
        ),
        # Over a sequence, no attention.
        (lambda: traced(Convolution(), Convolution(), stack=nn.Sequential), ["convolution"] * 2),
        (lambda: traced(AddsProduct(), AddsProduct()), ["attention", "mlp"] * 2),
    ],
)
def test_types_of_branches(build: Any, types: list[str]) -> None:
    assert [branch.description.name for branch in proven_branches(build())] == types


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("nano_gpt", lambda model: model),
        ("nano_gpt", torch.compile),
        ("layer_scale", lambda model: model.bfloat16()),  # the example is cast
    ],
)
def test_a_model_that_does_not_know_its_inputs_needs_an_example(name: str, given: Any) -> None:
    model = HAND_WRITTEN[name].build()
    with pytest.raises(ValueError, match=r"sdp_deepspeed\.trace\(model, \*args, \*\*kwargs\)"):
        proven_branches(model)
    sdp_deepspeed.trace(given(model), *HAND_WRITTEN[name].example())
    assert len(proven_branches(model)) == 6


def test_an_example_that_does_not_fit_is_an_error() -> None:
    model = HAND_WRITTEN["nano_gpt"].build()
    sdp_deepspeed.trace(model, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="could not be traced"):
        proven_branches(model)


class Shifted(nn.Linear):
    """Without weights it still returns something, unless the shift is 0: the same modules and shapes."""

    def __init__(self, shift: float = 1.0) -> None:
        super().__init__(WIDTH, WIDTH)
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift


class OnlyMlp(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mlp(self.ln_2(x))


def test_a_model_without_a_proven_branch_is_refused() -> None:
    model = traced(OnlyMlp(mlp=Shifted()), OnlyMlp(mlp=Shifted()))
    with pytest.raises(ValueError, match=r"no residual branch can be left out: 'h\.0\.mlp': without mlp it differs"):
        proven_branches(model)


class ActivatedAfter(Layer):
    """Scaling such a branch would not multiply what it adds."""

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.attn(self.ln_1(x))) + self.mlp(self.ln_2(x))


class LeftOut(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return x if self.training else super().forward(x)


class Blends(Layer):
    """Its MLP has a skip connection of its own."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        h = self.ln_2(x)
        return x + (self.mlp(h) + h)


class Squared(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        added = self.mlp(self.ln_2(x))
        return x + self.attn(self.ln_1(x)) + added * added


class AddsBias(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.attn(self.ln_1(x)) + (self.mlp(self.ln_2(x)) + self.bias)


class ActivatedInTraining(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        added = self.mlp(self.ln_2(x))
        return x + self.attn(self.ln_1(x)) + (torch.tanh(added) if self.training else added)


class Calls(Stack):
    """Calls its layers twice, in different modes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for is_second in (False, True):
            for layer in self.h:
                x = layer(x, is_second)
        return self.head(x)


class Called(Layer):
    def forward(self, x: torch.Tensor, is_second: bool) -> Any:  # type: ignore[override]  # on purpose
        added = self.mlp(self.ln_2(x))
        return self.ln_1(x + torch.cos(added)) if is_second else x + added


class WithLoss(Stack):
    """Its training loss reads what branches compute."""

    def forward(self, x: torch.Tensor) -> Any:
        x, loss = super().forward(x), torch.zeros(())
        for layer in self.h if self.training else ():
            loss = loss + layer.mlp.added.square().mean()  # type: ignore[union-attr, operator]
        return x, loss


class Remembers(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.added = super().forward(x)
        return self.added


class HandsOn(Layer):
    """Gives what its attention computed to the next layer."""

    def forward(self, x: Any) -> Any:
        x, before = x if isinstance(x, tuple) else (x, None)
        found = self.attn(self.ln_1(x))
        x = x + found
        return x + self.mlp(self.ln_2(x)), found if before is None else before


class StackThatHandsOn(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return self.head(self.ln_f(x[0]))


class WithWeights(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x.softmax(-1)


class NeedsOneOfTwo(Layer):
    """What its branches return beside their outputs is used by nobody, but one of them has to return something."""

    def forward(self, x: torch.Tensor) -> Any:
        first, of_first = self.attn(self.ln_1(x))
        second, of_second = self.mlp(self.ln_2(x))
        self.mean = (of_second if of_first is None else of_first).mean()
        return x + first + second


ALL_BUT_ONE = ["h.0.attention", "h.0.mlp", "h.1.attention"]
UNFIT = {
    "not_zero": (
        lambda: traced(Layer(), Layer(mlp=Shifted())),
        "'h.1.mlp': without mlp it differs from the layer with zero parameters there",
        ALL_BUT_ONE,
    ),
    "activated_after": (lambda: traced(ActivatedAfter(), ActivatedAfter()), "tanh", ["h.0.mlp", "h.1.mlp"]),
    "handed_on": (
        lambda: traced(HandsOn(), HandsOn(), stack=StackThatHandsOn),
        "'h.1' uses a result of 'h.0.attn.c_proj'",
        ["h.0.mlp", "h.1.attention", "h.1.mlp"],
    ),
    "one_of_two": (
        lambda: traced(NeedsOneOfTwo(WithWeights(WIDTH, WIDTH), WithWeights(WIDTH, WIDTH)), Layer()),
        "without mlp, mlp_2 it could not be run",
        ["h.1.attention", "h.1.mlp"],
    ),
    "left_out": (lambda: traced(Layer(), LeftOut()), "computes the same on the example", ALL_BUT_ONE[:2]),
    "blend": (lambda: traced(Layer(), Blends()), "what 'h.1.mlp.c_fc' computes is not only added", ALL_BUT_ONE),
    "squared": (lambda: traced(Layer(), Squared()), "what mlp adds is not multiplied", ALL_BUT_ONE),
    "bias": (lambda: traced(Layer(), AddsBias()), "add in 'h.1'", ALL_BUT_ONE),
    "activated": (lambda: traced(Layer(), ActivatedInTraining()), "in training mode: tanh", ALL_BUT_ONE),
    "constant": (
        lambda: traced(Layer(mlp=Shifted(0.0)), Layer(mlp=Shifted())),
        "differs from the layer with zero parameters",
        ALL_BUT_ONE,
    ),
    "loss": (
        lambda: traced(*(Layer(mlp=Remembers(WIDTH, WIDTH)) for _ in range(2)), stack=WithLoss),
        "in training mode: ",
        ["h.0.attention", "h.1.attention"],
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_branch_that_would_be_wrong_is_shared(name: str) -> None:
    """If it were absent, alone or with others, or scaled, in another layer of its class, or in training mode."""
    build, reason, expected = UNFIT[name]
    model = build()
    assert [branch.name for branch in proven_branches(model)] == expected
    assert reason in replicated_layers(model)[0]


def test_a_layer_that_is_called_in_several_ways_is_refused() -> None:
    model = traced(Called(), Called(), stack=Calls)
    with pytest.raises(ValueError, match="its calls in one pass differ"):
        proven_branches(model)


class MultipliesSum(Layer):
    """A sum of branches is multiplied (Granite's mixtures of experts)."""

    def forward(self, x: torch.Tensor) -> Any:
        return x + 0.5 * (self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x)))


class ReadsMemory(nn.Module):
    """Its first tensor is not what it maps to the stream, and its first argument no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.queries = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, mask: None, memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        keys = self.keys(memory)
        return (self.queries(x) @ keys.mT).softmax(-1) @ keys


class Reads(Layer):
    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> Any:  # type: ignore[override]
        x = x + self.attn(None, memory, self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class StackThatReads(Stack):
    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for layer in self.h:
            x = layer(x, memory)
        return self.head(x)


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda: Stack(MultipliesSum(), MultipliesSum()), [(3, 4, WIDTH)]),
        (lambda: StackThatReads(Reads(ReadsMemory()), Reads(ReadsMemory())), [(3, 1, WIDTH), (3, 6, WIDTH)]),
    ],
)
def test_subnetworks_on_other_shapes_than_the_example(build: Any, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model = build()
    sdp_deepspeed.trace(model, *(torch.randn(2, 5, WIDTH) for _ in shapes))
    plan, batch = plan_of(model, "forward", "block"), [torch.randn(shape) for shape in shapes]
    for rank in (0, 1):
        subnetwork, _ = masked(model, plan, rank)
        torch.testing.assert_close(subnetwork(*batch), expected_of(model, plan, rank)(*batch))


def test_large_matrices_are_proven_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their elements overlap in memory."""
    monkeypatch.setattr(replayed_layer, "_LARGE", 100)
    assert len(proven_branches(HAND_WRITTEN["nano_gpt"].traced())) == 6


def test_reentrant_checkpointing_is_no_obstacle() -> None:
    model: Any = MODELS["gpt2"].build()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert len(proven_branches(model)) == 4


class Keeps(Convolution):
    """Draws random numbers, and keeps its input."""

    kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x + 0 * torch.rand(1)
        return super().forward(self.kept)


def test_the_model_and_the_random_state_are_unchanged() -> None:
    model = traced(Keeps(), Keeps(), stack=nn.Sequential)
    model[0].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, of_python = torch.get_rng_state(), random.getstate()
    assert len(proven_branches(model)) == 2
    assert [module.training for module in model] == [False, True]
    assert model[0].kept is model[1].kept is None
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == of_python
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class ReturnsSizes(nn.Linear):
    def forward(self, x: torch.Tensor, sizes: list[int]) -> Any:  # type: ignore[override]
        return super().forward(x), sizes


class ReturnsNone(nn.Linear):
    def forward(self, x: torch.Tensor, sizes: list[int]) -> Any:  # type: ignore[override]
        return super().forward(x), None


class PassesSizes(Layer):
    """Its attention returns a list of sizes, which the next layer unpacks; a second module of the branch does not."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.second = ReturnsSizes(WIDTH, WIDTH), ReturnsNone(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        found, sizes = self.attn(self.ln_1(x), [*x.shape[:2]])
        found, nothing = self.second(found, sizes)
        assert nothing is None
        rows, length = sizes
        x = x + found.view(rows, length, -1)
        return x + self.mlp(self.ln_2(x))


def test_sizes_beside_an_output_are_passed_on() -> None:
    model = traced(PassesSizes(), PassesSizes())
    branches = proven_branches(model)
    assert [branch.description.name for branch in branches] == ["mlp", "mlp_2"] * 2
    assert branches[0].description.extra_outputs == (1,)


def test_models_that_are_alike_are_derived_once() -> None:
    first, other = (HAND_WRITTEN["nano_gpt"].traced() for _ in range(2))
    known = derivation.derivation_of(first)
    assert derivation.derivation_of(copy.deepcopy(first)) is known
    assert derivation.derivation_of(other) is known


def _adds(number: float) -> Any:
    return lambda x: x + number


# By a number.
DIFFERENCES: dict[str, Callable[[Any, float], object]] = {
    "attribute": lambda model, number: setattr(model.h[1], "scale", number),
    "closure": lambda model, number: setattr(model.h[1].mlp, "forward", _adds(number)),
    "module": lambda model, number: setattr(model.h[1], "mlp", nn.Sequential(*[model.h[1].mlp] * int(number))),
    "hook": lambda model, number: [model.h[1].register_forward_hook(print) for _ in range(int(number))],
    "buffer": lambda model, number: model.h[1].register_buffer("mask", torch.ones(int(number))),
    "attribute of numbers": lambda model, number: setattr(model.h[1], "added", torch.full((2,), number)),
    "dtype": lambda model, number: model.to((None, torch.float32, torch.bfloat16)[int(number)]),
}


def test_a_class_that_has_another_forward_since(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [traced(Layer(mlp=Shifted(0.0)), Layer(mlp=Shifted(0.0))) for _ in range(2)]
    assert len(proven_branches(models[0])) == 4
    monkeypatch.setattr(Shifted, "forward", lambda module, x: nn.Linear.forward(module, x) + 1)
    for model in models:
        assert [branch.name for branch in proven_branches(model)] == ["h.0.attention", "h.1.attention"]


def test_a_module_that_has_another_forward_since() -> None:
    """Other than that of a mask, which is no other model."""
    model = traced(Layer(), Layer())
    known = derivation.derivation_of(model)
    mask = mask_of(model, plan_of(model, "forward", "block"), 0)
    mask.apply()
    assert derivation.derivation_of(model) is known
    mask.undo()
    mlp: Any = model.h[1].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x) + 1
    assert [branch.name for branch in proven_branches(model)] == ALL_BUT_ONE


@pytest.mark.parametrize("name", DIFFERENCES)
def test_models_that_differ_are_not_alike(name: str) -> None:
    models = [traced(Layer(), Layer()) for _ in range(2)]
    assert likeness(models[0]) == likeness(models[1])
    for number, model in enumerate(models, start=1):
        DIFFERENCES[name](model, float(number))
    assert likeness(models[0]) != likeness(models[1])
