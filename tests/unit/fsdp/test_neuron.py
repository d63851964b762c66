"""A body as a sum over sets of holders: exactly the dense branch where a rank holds all pieces, and what the dense
model with zeroed pieces computes where it lacks some."""

from __future__ import annotations

import gc
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import registry
from sdp_deepspeed.fsdp.neuron import SplitBranch
from sdp_deepspeed.reference.virtual_workers import zero_lacking
from tests.helpers import mixtures, models, more_models, own_layers
from tests.helpers.live_tensors import Watch
from tests.helpers.masked_modules import (
    NAMES,
    NUM_TOKENS,
    Products,
    assert_close,
    build,
    cut_names,
    held_pieces,
    linear_weights,
    loss_and_gradients,
    tokens,
)
from tests.helpers.split_models import dense_values, held_tensors, overlapping_plan, part_of, split

RANKS = (0, 1, 2)
SEVERAL_BODIES = ("bert", "camembert", "convnext", "electra", "opt", "opt_post_norm", "roberta", "xlm_roberta")
CONVOLUTIONAL = ("resnet", "resnet_bottleneck")
MORE = [name for name in more_models.SPECIMENS if name not in (*SEVERAL_BODIES, *CONVOLUTIONAL, *more_models.TWINS)]
# Norms that are cut; interleaved heads; fused projections of unequal blocks; dropout of a rate; heads in arguments.
SAMPLE = ("cohere", "falcon_grouped", "phi3", "starcoder2", "t5")


@cache
def _another(name: str) -> nn.Module:
    return models.scrambled(more_models.SPECIMENS[name].build())


def built(name: str) -> tuple[Any, Any]:
    """A model, and the strategy that cuts all that can be cut in it."""
    if name in NAMES:
        return build(name), "neuron"
    return deepcopy(_another(name)), {"mlp": "neuron"} if name in more_models.UNCUT else "neuron"


def assert_same_gradients(module: Any, branches: list[SplitBranch], expected: dict[str, torch.Tensor]) -> None:
    """Of what is held, part by part; and of all that is shared, under its dense name."""
    floor = max(float(gradient.abs().max()) for gradient in expected.values()) / 64  # keys' biases cancel
    tensors, found = held_tensors(branches), dict(module.named_parameters())
    for tensor in tensors:
        dense, gradient = expected[tensor.dense_name], found.pop(tensor.name).grad
        assert gradient is not None
        assert_close(gradient, part_of(dense, tensor), largest=max(floor, float(dense.abs().max())))
    for name, parameter in found.items():
        if name in expected and parameter.grad is not None:
            assert_close(parameter.grad, expected[name], largest=max(floor, float(expected[name].abs().max())))
        else:
            assert name not in expected or not expected[name].any(), name


@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_a_split_model_is_the_dense_one_with_zeroed_pieces(name: str, pytestconfig: pytest.Config) -> None:
    if name not in (*NAMES, *SAMPLE) and not pytestconfig.getoption("--full"):
        pytest.skip("one of many families: with --full")
    dense, strategy = built(name)
    plan = overlapping_plan(dense, strategy)
    for rank in RANKS:
        expected_model = deepcopy(dense)
        zero_lacking(expected_model, plan, rank)  # of rank 0 nothing
        expected_loss, expected = loss_and_gradients(expected_model, tokens())
        module, branches = split(dense, plan, rank)
        loss, _ = loss_and_gradients(module, tokens())
        assert_close(loss, expected_loss)
        assert_same_gradients(module, branches, expected)
        if rank == 0:
            assert all(len(branch.held) > 1 for branch in branches)


class Spread(nn.Module):
    """An MLP whose layers are in a container, with a parameter and a norm of its own that nobody cuts."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.ff = nn.LayerNorm(6), Spread()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.ff(self.norm(x))

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.before = nn.LayerNorm(6)
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(self.before(x) * self.scale)
        return out


def test_layers_in_containers_and_tensors_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    cuts = (architectures.Cut("net.0", 0), architectures.Cut("net.2", 1, is_output=True))
    inner = architectures.InnerLayers(cuts, tail=("net.3",))
    architectures.register(Spread.Layer, architectures.Branch("mlp", norm="norm", body="ff", inner=inner))
    torch.manual_seed(0)
    dense = nn.Sequential(Spread.Layer(), Spread.Layer())
    batch, plan = torch.randn(3, 6), overlapping_plan(dense)
    for rank in RANKS:
        expected = deepcopy(dense)
        zero_lacking(expected, plan, rank)
        module, branches = split(dense, plan, rank)
        outputs = [model(batch) for model in (module, expected)]
        assert_close(*outputs)
        for output in outputs:
            output.square().sum().backward()
        assert_same_gradients(
            module, branches, {name: p.grad for name, p in expected.named_parameters() if p.grad is not None}
        )
    shared = {name for name, _ in module.named_parameters() if ".pieces." not in name}
    assert shared == {name for name, _ in dense.named_parameters()} - cut_names(plan)


class Alternating(own_layers.GatedMLP):
    """Gates and ups alternate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.up(x)
        out: torch.Tensor = self.down(nn.functional.silu(both[..., ::2]) * both[..., 1::2])
        return out


@pytest.mark.parametrize("interleaved", [True, False])
def test_described_layers(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused projections of queries, keys and values, and of gates and ups; a buffer, dropout and biases."""
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    branches = (own_layers.attention_of(scaled=("n_head", "n_embd")), own_layers.mlp_of(interleaved=interleaved))
    architectures.register(own_layers.ScaledBlock, *branches)
    dense: Any = models.scrambled(own_layers.GPT(own_layers.ScaledBlock)).eval()
    for block in dense.h if interleaved else ():
        block.mlp.__class__ = Alternating
    plan = overlapping_plan(dense)
    for rank in RANKS:
        expected = deepcopy(dense)
        zero_lacking(expected, plan, rank)
        module, _ = split(dense, plan, rank)
        assert_close(module(tokens(), tokens()), expected(tokens(), tokens()))


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_attention_of_mixtures(name: str) -> None:
    """A parameter of the body itself is cut (a sink for each head); projections are shared by all heads (latent)."""
    dense = mixtures.mixture(name)
    plan = overlapping_plan(dense, {"attention": "neuron"})
    zeroed = deepcopy(dense)
    zero_lacking(zeroed, plan, 1)
    loss, gradients = loss_and_gradients(zeroed, tokens())
    module, branches = split(dense, plan, 1)
    assert_close(loss_and_gradients(module, tokens())[0], loss)
    assert_same_gradients(module, branches, gradients)


@pytest.mark.parametrize("name", ["llama_biases", "gpt2"])
def test_a_rank_has_what_it_holds_and_computes_with_it(name: str) -> None:
    """No storage of the dense tensors is left; one product for each layer of each piece."""
    dense = build(name, num_layers=2)
    plan = overlapping_plan(dense)
    for rank in RANKS[:2]:
        pieces = held_pieces(dense, plan, rank)
        held = sum(piece.num_elements(p.shape) for key, p in dense.named_parameters() for piece in pieces[key])
        buffers = sum(buffer.untyped_storage().nbytes() for buffer in dense.buffers())
        with Watch() as watch:
            module, branches = split(dense, plan, rank)
            gc.collect()
            assert watch.num_bytes() == 4 * held + buffers
        assert sum(p.numel() for p in module.parameters()) == held
        with Products() as products:
            module(input_ids=tokens())
        assert products.flops == 2 * NUM_TOKENS * linear_weights(dense, pieces)
        for branch in branches:
            assert branch.held == [number for number, ranks in branch.table.sets.items() if rank in ranks]
            assert all(len([*branch.pieces[number].parameters()]) > 1 for number in branch.held)


@pytest.mark.parametrize("name", ["llama_biases", "qwen3", "gpt2"])
def test_names_say_where_a_piece_is_of(name: str) -> None:
    """In front of "pieces" and behind the number of the set they are those of the dense model."""
    dense = build(name)
    module, branches = split(dense, overlapping_plan(dense), 1)
    tensors = held_tensors(branches)
    for tensor in tensors:
        body, _, inside = tensor.name.partition(".pieces.")
        number, _, path = inside.partition(".")
        assert f"{body}.{path}" == tensor.dense_name
        (sets,) = (part.table.sets for part in branches if part.table.name_of(7) == f"{body}.pieces.7")
        assert tensor.holders == sets[int(number)]
    names = {key for key, _ in module.named_parameters()}
    cut = cut_names(overlapping_plan(dense))
    assert names == {tensor.name for tensor in tensors} | ({key for key, _ in dense.named_parameters()} - cut)
    digests = {f"{branch.name_of(0).partition('.pieces.')[0]}._extra_state" for branch in (b.table for b in branches)}
    assert module.state_dict().keys() == names | digests | dense.state_dict().keys() - cut


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama_biases", "qwen3", "gpt2", "gpt_neox", "phi3", "t5", "starcoder2"])
def test_it_becomes_the_dense_model_and_goes_back(name: str) -> None:
    dense, _ = built(name)
    module, branches = split(dense, overlapping_plan(dense), 1)
    expected, names = models.loss_of(module, tokens()), list(module.state_dict())
    for branch in branches:
        branch.show(dense_values(branch, dense))
    assert torch.equal(models.loss_of(module, tokens()), models.loss_of(dense, tokens()))
    in_dense = [key for key in module.state_dict() if not key.endswith("._extra_state")]
    assert in_dense == list(dense.state_dict())
    assert [type(m) for m in module.modules() if isinstance(m, nn.Linear)] == [
        type(m) for m in dense.modules() if isinstance(m, nn.Linear)
    ]
    module.train()
    for branch in branches:
        branch.release()
    assert list(module.state_dict()) == names
    assert torch.equal(models.loss_of(module, tokens()), expected)
    assert all(piece.training for branch in branches for piece in branch.pieces.values())
