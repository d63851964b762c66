"""What a mask leaves as it was, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures, check_description
from sdp_deepspeed.architectures import Branch, Cut, InnerLayers
from sdp_deepspeed.batch_norm import average_running_statistics
from sdp_deepspeed.config import MODES
from sdp_deepspeed.masking.scale import describe_scale
from sdp_deepspeed.parallel.groups import RankGroup
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Regime
from tests.helpers import models
from tests.helpers.core_masks import (
    assert_close,
    assert_gradients,
    assert_masked,
    build,
    expected_of,
    fetch,
    mask_of,
    masked,
    plan_of,
    run,
    strategy_of,
    tokens,
)
from tests.helpers.hand_written import Adds

pytestmark = pytest.mark.usefixtures("own_descriptions")
modes = pytest.mark.parametrize(("regime", "strategy"), MODES)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def facts(model: nn.Module) -> dict[str, Any]:
    """What masking may change: attributes of modules, and of tensors all but their values."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "forward"}
        found[name] = {k: v for k, v in own.items() if isinstance(v, int | float | str | None)}
        found[f"{name} own"] = sorted(vars(module))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, type(tensor))
    return found


@modes
@pytest.mark.parametrize("name", ["t5", "resnet", "gpt_oss", "convnext"])
def test_undo_gives_the_dense_model_back(name: str, regime: Regime, strategy: str) -> None:
    dense = build(name).to(memory_format=torch.channels_last) if name == "convnext" else build(name)
    next(iter(dense.parameters())).requires_grad_(False)  # a user's
    plan = plan_of(dense, regime, strategy_of(name, strategy))
    model = deepcopy(dense)
    objects = dict(model.named_parameters())
    mask = mask_of(model, plan, 0, is_scaled=True)
    mask.apply()
    assert [*model.state_dict()] == [*dense.state_dict()]
    assert all(p is objects[n] for n, p in model.named_parameters())
    for module in (module for module in model.modules() if "forward" in vars(module)):
        module.forward = partial(module.forward)  # by a profiler, say
    mask.undo()
    assert facts(model) == facts(dense)
    zeroed = expected_of(dense, plan, 0).state_dict()
    assert all(torch.equal(value, zeroed[key]) for key, value in model.state_dict().items())
    fetch(mask, dense)
    assert all(torch.equal(value, dense.state_dict()[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(models.loss_of(model, tokens()), models.loss_of(deepcopy(dense), tokens()))
    mask.apply()
    again, expected = run(model), run(masked(dense, plan, 0, is_scaled=True)[0])
    assert torch.equal(again[0], expected[0])
    assert all(torch.equal(again[2][key], expected[2][key]) for key in expected[2])


@modes
def test_a_loss_that_is_kept_does_not_break_the_next_backward(regime: Regime, strategy: str) -> None:
    """At apply, undo and apply again: its graph knows the shapes from before."""
    model = build("llama")
    mask = mask_of(model, plan_of(model, regime, strategy), 0)
    losses = [models.loss_of(model, tokens())]
    losses[-1].backward()
    for change in (mask.apply, mask.undo, mask.apply):
        change()
        model.zero_grad()
        losses.append(models.loss_of(model, tokens()))
        losses[-1].backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.shape == parameter.shape, name
    assert torch.equal(losses[1], losses[3])


@pytest.mark.parametrize("reentrant", [True, False])
@modes
def test_activation_checkpointing_recomputes_and_changes_nothing(
    regime: Regime, strategy: str, reentrant: bool
) -> None:
    """The oracle's axis compares values; it does not see that activations are kept."""
    dense = build("llama")
    plan = plan_of(dense, regime, strategy)
    expected, (model, mask) = run(masked(dense, plan, 0)[0]), masked(dense, plan, 0)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ran: list[int] = []
    model.get_submodule(mask.branches[0].bodies[0]).register_forward_pre_hook(lambda *_: ran.append(1))
    found = run(model)
    assert len(ran) == 2, "layers run again in backward"
    assert torch.equal(found[0], expected[0])
    assert found[2].keys() == expected[2].keys()
    assert all(torch.equal(found[2][key], gradient) for key, gradient in expected[2].items())


@pytest.mark.parametrize(
    ("name", "regime", "strategy"),
    [
        *(("llama_one_layer", *mode) for mode in MODES),
        ("resnet", "backward", "neuron"),
        slow("t5", "forward", "neuron"),
        slow("mixtral", "forward", "block"),
        slow("mixtral", "backward", "neuron"),
        slow("falcon_grouped", "forward", "block"),
        slow("swin", "forward", "neuron"),
        slow("convnext", "backward", "neuron"),
    ],
)
def test_compilers_follow(name: str, regime: Regime, strategy: str) -> None:
    dense = build(name)
    plan = plan_of(dense, regime, strategy)
    expected = run(masked(dense, plan, 0)[0])
    torch.compiler.reset()
    found = run(torch.compile(masked(dense, plan, 0)[0], backend="eager", fullgraph=True))
    assert_close(found[0], expected[0])
    assert found[2].keys() == expected[2].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[2].values())
    for key, gradient in expected[2].items():
        assert_close(found[2][key], gradient, largest)


def test_ranks_of_the_backward_regime_generate() -> None:
    dense, settings = build("llama").eval(), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    for strategy in ("block", "neuron"):
        model = masked(dense, plan_of(dense, "backward", strategy), 0)[0].train()
        assert torch.equal(model.generate(tokens(), **settings), dense.generate(tokens(), **settings))


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("gpt2", dict.fromkeys(("resid_pdrop", "attn_pdrop"), 0.5)),
        ("starcoder2", {"residual_dropout": 0.5}),
        ("swin", {"drop_path_rate": 0.6}),
    ],
)
def test_the_backward_regime_draws_what_the_dense_model_draws(name: str, rates: dict[str, float]) -> None:
    """Dropout in and after bodies, of whole branches: with the same random numbers it has the same loss."""
    dense = build(name, **rates)
    expected = run(deepcopy(dense))
    assert not torch.isclose(expected[0], models.loss_of(deepcopy(dense), tokens()))
    for strategy in ("block", "neuron"):
        model, mask = masked(dense, plan_of(dense, "backward", strategy), 0)
        found = run(model)
        assert_close(found[0], expected[0])
        assert_gradients(mask, found[2], expected[2])


def test_a_masked_model_is_not_masked_again() -> None:
    dense = build("llama")
    plan = plan_of(dense, "backward", "block")
    model, mask = masked(dense, plan, 0)
    with pytest.raises(RuntimeError, match="masked already"):
        mask_of(model, plan, 0)
    mask.undo()
    mask_of(model, plan, 1).apply()


def test_cut_ends_are_pointed_out() -> None:
    dense = build("llama", num_hidden_layers=3)
    for cut, is_hinted in ((r"\.0\.", True), (r"\.1\.", False)):
        plan = plan_of(dense, "forward", "block", shared=(rf"^(?!.*{cut})",))
        mask = mask_of(dense, plan, 0, is_scaled=True)
        assert mask.scaled
        assert ("whole_ends" in describe_scale(mask.model, mask.branches, mask.scaled, by_init=True)) is is_hinted


def with_pieces(plan: Plan, change: Callable[[Piece], Piece | None], *, units: Sequence[int] = (0,)) -> Plan:
    """Other pieces in some units; None for one that is left out."""
    changed = list(plan.units)
    for index in units:
        pieces = [piece for piece in map(change, changed[index].pieces) if piece is not None]
        assert pieces != [*changed[index].pieces]
        changed[index] = replace(changed[index], pieces=tuple(pieces))
    return replace(plan, units=tuple(changed))


def without(name: str, start: int | None = None) -> Callable[[Piece], Piece | None]:
    return lambda piece: None if name in piece.parameter and start in (None, piece.start) else piece


def shorter(piece: Piece) -> Piece:
    """Queries that end in the middle of a head."""
    return replace(piece, length=piece.length - 1) if "q_proj" in piece.parameter else piece


def of_another_head(piece: Piece) -> Piece:
    return replace(piece, start=piece.start + piece.length) if "q_proj" in piece.parameter else piece


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", without("o_proj")),
        ("gpt2", without("c_attn.weight", 0)),
        ("llama", shorter),
        ("llama", of_another_head),
    ],
)
def test_units_that_are_not_whole_heads_are_refused(name: str, change: Callable[[Piece], Piece | None]) -> None:
    dense = build(name)
    with pytest.raises(ValueError, match=r"attention\.head_0' takes other neurons or heads"):
        mask_of(dense, with_pieces(plan_of(dense, "forward", "neuron"), change), 0)


def test_plans_that_are_no_plan_of_the_model_are_refused() -> None:
    dense = build("llama")
    plan, blocks = plan_of(dense, "forward", "neuron"), plan_of(dense, "forward", "block")
    with pytest.raises(ValueError, match=r"neither whole branches.*left over"):
        mask_of(dense, with_pieces(blocks, without("o_proj")), 0)
    first, *others = plan.units
    other = next(unit for unit in others if "layers.1.attention" in unit.name)
    others.remove(other)
    both = replace(first, pieces=first.pieces + other.pieces)
    with pytest.raises(ValueError, match=r"takes other neurons or heads of .*layers\.1"):
        mask_of(dense, replace(plan, units=(both, *others), holders=plan.holders[: len(others) + 1]), 0)
    holders = tuple((0,) if "0.mlp" in unit.name else (0, 1) for unit in plan.units)
    with pytest.raises(ValueError, match=r"subnetwork 1 has no unit of 'model\.layers\.0\.mlp'"):
        mask_of(dense, replace(plan, holders=holders), 0)


# ---- layers of users ------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A linear layer with a correction of rank 2, as LoRA wraps it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("strategy", ["block", "neuron", {"attention": "block", "mlp": "neuron"}])
def test_layers_with_adapters(strategy: Any) -> None:
    torch.manual_seed(0)
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
    for regime in ("forward", "backward"):
        assert_masked(model, plan_of(model, regime, strategy), 1)


class Body(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 9), norm, nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)).relu())


class Layer(nn.Module):
    """Writes to what its body returns."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.body = Body(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        out += x
        return out


class Model(nn.Module):
    def __init__(self, norm: Any = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, 5)
        self.layers = nn.ModuleList(Layer(norm()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


def describe(*cuts: Cut) -> None:
    inner = InnerLayers((Cut("up", 0), *cuts, Cut("down", 1, is_output=True)))
    architectures.register(Layer, Branch("mlp", body="body", inner=inner))


def batch() -> torch.Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(1))


def test_a_layer_that_writes_to_a_branchs_output_in_all_modes() -> None:
    describe()
    assert check_description(Model(), batch()) == [f"{regime} x {strategy}" for regime, strategy in MODES]


def test_layers_with_a_second_name() -> None:
    describe()
    model: Any = Model()
    expected = masked(Model(), plan := plan_of(model, "forward", "block"), 0)[0](batch())
    model.first, model.blocks = model.layers[0], model.layers
    assert torch.equal(masked(model, plan, 0)[0](batch()), expected)
    assert len(check_description(model, batch())) == 4


class WithLoss(nn.Module):
    """Returns logits and loss, in the way of `give`."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.inner, self.give = Model(), give

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.inner(x)
        return self.give(logits, logits.square().mean())


@pytest.mark.parametrize(
    ("give", "got"),
    [
        (lambda logits, loss: (logits, loss), ""),
        (lambda logits, loss: (loss, logits, None), ""),
        (lambda logits, loss: {"logits": logits, "loss": loss, "aux_loss": loss}, ""),
        (lambda logits, loss: SimpleNamespace(logits=logits, loss=loss), ""),
        (lambda logits, _: (logits, None), "a tuple"),
        (lambda logits, _: (logits, logits), "a tuple"),
        (lambda logits, loss: SimpleNamespace(logits=logits, loss=loss.detach()), r"a tensor of shape \[\]"),
    ],
)
def test_a_description_of_a_model_without_a_loss_needs_loss_of(give: Any, got: str) -> None:
    """`got`: what is returned in place of a loss."""
    describe()
    if not got:
        assert len(check_description(WithLoss(give), batch())) == 4
        return
    with pytest.raises(ValueError, match=rf"pass labels in the batch, or `loss_of\(model, batch\)`; got {got}"):
        check_description(WithLoss(give), batch())
    loss_of = lambda model, x: model.get_submodule("inner")(x).sum()  # noqa: E731
    assert len(check_description(WithLoss(give), batch(), loss_of=loss_of)) == 4


class Heads(nn.Module):
    """Attention whose forward takes its sizes from attributes: 4 heads of 3, in a stream of 5."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(5, 36), nn.Linear(12, 5)
        self.config, self.width = SimpleNamespace(n_head=4), 12

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).split(self.width, -1)
        q, k, v = (part.view(len(x), self.config.n_head, -1).transpose(0, 1) for part in parts)
        return self.proj(((q @ k.mT).softmax(-1) @ v).transpose(0, 1).flatten(1))


def test_numbers_of_heads_and_other_sizes_are_scaled() -> None:
    """A number of heads that is not would give as many, each of fewer columns; with another width it does not run."""
    cuts = (Cut("qkv", 0, blocks=3), Cut("proj", 1, is_output=True))
    for scaled in (("width",), ()):
        inner = InnerLayers(cuts, heads="config.n_head", scaled=scaled)
        architectures.register(Layer, Branch("attention", body="body", inner=inner))
        model: Any = Model()
        for layer in model.layers:
            layer.body = Heads()
        if scaled:
            assert len(check_description(model, batch())) == 4
    with pytest.raises(AssertionError, match=r"forward x neuron: subnetwork 0 does not run, unlike the dense model: "):
        check_description(model, batch())


class NormedStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(5), Body(nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + self.body(x)


def test_a_description_that_is_not_true_is_found() -> None:
    """The norm is on the stream, and not the branch's."""
    model = Model()
    model.layers = nn.ModuleList(NormedStream() for _ in range(2))
    architectures.register(NormedStream, Branch("mlp", body="body"))
    assert check_description(model, batch()) == ["forward x block", "backward x block"]
    architectures.register(NormedStream, Branch("mlp", norm="norm", body="body"))
    with pytest.raises(AssertionError, match="forward x block: the loss of subnetwork 0"):
        check_description(model, batch())


class ScaledLayer(Layer):
    def __init__(self, scale: float | None) -> None:
        super().__init__(nn.Identity())
        self.scale = None if scale is None else nn.Parameter(torch.full((5,), scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.body(x)
        return x + (added if self.scale is None else self.scale * added)


def test_a_parameter_of_the_layer_itself_that_some_layers_do_not_have() -> None:
    model = Model()
    model.layers = nn.ModuleList(ScaledLayer(scale) for scale in (None, 0.5))
    architectures.register(ScaledLayer, Branch("mlp", body="body", parameters=("scale",)))
    assert check_description(model, batch()) == ["forward x block", "backward x block"]
    plan = plan_of(model, "forward", "block")
    assert len(plan.units[1].pieces) - len(plan.units[0].pieces) == 1
    lacking = next(rank for rank in plan.all_ranks if rank not in plan.ranks_of(1))
    absent = masked(model, plan, lacking)[0].get_parameter("layers.1.scale")
    assert (absent.untyped_storage().nbytes(), absent.requires_grad) == (4, False)


class WithWeights(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class UnpacksBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.gate = nn.LayerNorm(5), WithWeights(5, 5), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added, _ = self.body(self.norm(x))
        return x + self.gate(added)


def test_a_tuple_that_is_described_as_a_tensor_is_found() -> None:
    """Zeros of two samples unpack, too."""
    model = nn.Sequential(UnpacksBody(), UnpacksBody())
    architectures.register(UnpacksBody, Branch("mlp", norm="norm", body="body"))
    with pytest.raises(AssertionError, match=r"'0\.body' returns a tuple of 2, expected a tensor; set num_outputs=2"):
        check_description(model, torch.randn(2, 7, 5))
    architectures.register(UnpacksBody, Branch("mlp", norm="norm", body="body", num_outputs=2))
    assert check_description(model, torch.randn(2, 7, 5)) == ["forward x block", "backward x block"]
    architectures.register(UnpacksBody, Branch("mlp", norm="norm", body="gate", num_outputs=2))
    with pytest.raises(AssertionError, match=r"returns a tensor of shape \[2, 7, 5\].*set num_outputs=1"):
        check_description(model, torch.randn(2, 7, 5))


def test_synchronized_batch_norms_of_units_are_refused() -> None:
    describe(Cut("norm", 0))
    model = Model(lambda: nn.SyncBatchNorm(9))
    for strategy in ("block", "neuron"):
        with pytest.raises(ValueError, match=r"SyncBatchNorm in the unit.*use BatchNorm"):
            mask_of(model, plan_of(model, "forward", strategy), 0)


@modes
def test_a_batch_norm_that_a_user_froze_stays(regime: Regime, strategy: str) -> None:
    """By `eval()`; the oracle has the statistics of those that run."""
    describe(Cut("norm", 0))
    dense = Model(lambda: nn.BatchNorm1d(9))
    model, _ = masked(dense, plan_of(dense, regime, strategy), 0)
    before = deepcopy(model)
    for norm in (module for module in model.train().modules() if isinstance(module, nn.BatchNorm1d)):
        norm.eval()
    model(batch()).square().mean().backward()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before.buffers(), strict=True))


def test_statistics_of_one_rank_are_not_exchanged() -> None:
    """Nor with its tensor-parallel ranks, the default group's others."""
    describe(Cut("norm", 0))
    dense = Model(lambda: nn.BatchNorm1d(9))
    plan = plan_of(dense, "forward", "block")
    plan = replace(plan, num_subnetworks=1, holders=((0,),) * len(plan.units), subnetwork_of_rank=(0,))
    model, mask = masked(dense, plan, 0)
    model(batch())
    before = deepcopy(model)
    average_running_statistics(mask, RankGroup((0,), None, 0), torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before.buffers(), strict=True))


@pytest.mark.parametrize("is_named", [True, False])
def test_a_norm_between_body_and_addition_must_be_named(is_named: bool) -> None:
    inner = InnerLayers((Cut("up", 0), Cut("down", 1, is_output=True)), tail=("norm",) if is_named else ())
    after = ("norm",) if is_named else ()
    architectures.register(Adds, Branch("mlp", body=("up", "relu", "down"), after=after, inner=inner))
    layer = Adds(up=nn.Linear(8, 12), relu=nn.ReLU(), down=nn.Linear(12, 8, bias=False), norm=nn.RMSNorm(8, eps=1e-6))
    model = nn.Sequential(layer, deepcopy(layer))
    if is_named:
        assert len(check_description(model, torch.randn(2, 5, 8))) == 4
        return
    with pytest.raises(AssertionError, match="branch_scale, forward x block"):
        check_description(model, torch.randn(2, 5, 8))
