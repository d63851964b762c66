"""What is written down under `Init` gives, run again, the bits of the model built for real, a tensor at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import sdp_deepspeed
from benchmarks.common.measured_step import watched_host_memory
from sdp_deepspeed.deferred_init.materialize import DeferredModel
from sdp_deepspeed.deferred_init.operation import Ref
from sdp_deepspeed.plan.tensors import named_tensors
from tests.helpers.deferred_models import BUILDERS, Holder, unbuilt, values_of
from tests.helpers.models import FAMILIES, family, llama
from tests.helpers.more_models import ALL_SPECIMENS

MODELS: dict[str, Callable[[], nn.Module]] = {
    **BUILDERS,
    **{f"family {name}": partial(family, name, seed=5) for name in FAMILIES},
    **{f"specimen {name}": specimen.build for name, specimen in ALL_SPECIMENS.items()},
}


def build_for_real(build: Callable[[], nn.Module]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(3)
    model = build()
    return {name: tensor.detach() for name, tensor in named_tensors(model).items()}, torch.get_rng_state()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_bits_and_random_stream_are_those_of_the_real_build(name: str) -> None:
    expected, state = build_for_real(MODELS[name])
    found = values_of(*unbuilt(MODELS[name], seed=3))
    assert torch.equal(torch.get_rng_state(), state)
    assert {n: (t.dtype, t.stride()) for n, t in found.items()} == {
        n: (t.dtype, t.stride()) for n, t in expected.items()
    }
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


def test_nothing_is_allocated_and_nothing_is_drawn() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with watched_host_memory() as memory, sdp_deepspeed.Init():
        model = family("llama", num_layers=4)
        draws = torch.get_rng_state()
    assert memory.peak < min(parameter.nbytes for parameter in model.parameters() if parameter.dim() > 1)
    assert torch.equal(draws, torch.manual_seed(0).get_state())
    assert torch.equal(before, draws)


def test_outside_everything_is_as_before() -> None:
    original = torch.nn.init._no_grad_trunc_normal_
    with pytest.raises(ZeroDivisionError), sdp_deepspeed.Init():
        raise ZeroDivisionError
    layer = nn.Linear(2, 2)
    assert layer.weight.device.type == "cpu"
    assert not layer.weight.is_meta
    assert not hasattr(layer.weight, "_sdp_program")
    assert torch.nn.init._no_grad_trunc_normal_ is original


def test_one_tensor_at_a_time() -> None:
    """Also where values are replaced later, and where one is the source of another."""

    def build() -> nn.Module:
        weights = nn.ParameterList([nn.Parameter(torch.empty(64, 64)) for _ in range(20)])
        for weight, following in itertools.pairwise(weights):
            nn.init.normal_(weight)
            following.data.copy_(weight.data)
        nn.init.normal_(weights[-1])
        return weights

    model, program = unbuilt(build, seed=0)
    size = 64 * 64 * 4
    with watched_host_memory() as memory:
        found = [address for address, data in program.run(Ref.of(p).storage for p in model.parameters())]
    assert len(found) == 20
    assert memory.peak <= 3 * size  # one that is handed over, its source, and one in the making


def test_what_nobody_wants_is_only_drawn() -> None:
    """Half of the tensors: the others' values are the same, and the rest of the stream too."""
    expected, state = build_for_real(partial(family, "gpt2"))
    model, program = unbuilt(partial(family, "gpt2"), seed=3)
    wanted = {name: Ref.of(tensor) for name, tensor in list(named_tensors(model).items())[1::2]}
    torch.set_rng_state(program.rng_state)
    storages = dict(program.run(ref.storage for ref in wanted.values()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(ref.view(storages[ref.storage]), expected[name]) for name, ref in wanted.items())


def test_a_program_runs_again() -> None:
    """Generators of the model's own are wound back too."""
    model, program = unbuilt(BUILDERS["own generator"], seed=0)
    first, second = values_of(model, program), values_of(model, program)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_constant_is_kept_as_it_was() -> None:
    def build() -> nn.Module:
        holder, source = Holder(), torch.arange(7.0)
        nn.init.zeros_(holder.weight)
        with torch.no_grad():
            holder.vector.copy_(source)
            source.add_(1)
        return holder

    assert values_of(*unbuilt(build, seed=0))["vector"].tolist() == list(range(7))


def test_without_initialization_random_values_are_zeros() -> None:
    torch.manual_seed(0)
    with sdp_deepspeed.Init(initialize=False) as program:
        model = family("llama")
    state = torch.get_rng_state()
    values = values_of(model, program)
    assert torch.equal(state, torch.get_rng_state())
    assert not values["model.embed_tokens.weight"].any()
    assert values["model.norm.weight"].eq(1).all()
    expected = family("llama").get_buffer("model.rotary_emb.inv_freq")
    assert torch.equal(values["model.rotary_emb.inv_freq"], expected)


def _by_value() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Linear(3, 3) if layer.weight.sum().item() > 0 else layer


@pytest.mark.parametrize(
    ("build", "kind", "words"),
    [
        (_by_value, RuntimeError, "built by the value of a tensor"),
        (lambda: nn.Linear(3, 3, device="cuda"), ValueError, "build the model without a device"),
        (lambda: sdp_deepspeed.Init().__enter__(), RuntimeError, "inside another Init"),
    ],
)
def test_what_cannot_be_written_down(build: Callable[[], nn.Module], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words), sdp_deepspeed.Init():
        build()


def _two_contexts() -> nn.Module:
    layers = []
    for _ in range(2):
        with sdp_deepspeed.Init():
            layers.append(nn.Linear(2, 2))
    return nn.Sequential(*layers)


def _on_meta(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def result() -> nn.Module:
        with torch.device("meta"):
            return build()

    return result


def _resized() -> nn.Module:
    model: Any = _on_meta(llama)()
    model.model.norm.weight = nn.Parameter(torch.empty(3, device="meta"))
    return model


def _changed(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def result() -> nn.Module:
        model = _on_meta(build)()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.ones_(module.weight)
        return model

    return result


def _loaded() -> nn.Module:
    model = _on_meta(llama)()
    with pytest.warns(UserWarning, match="no-op"):
        model.load_state_dict(llama().state_dict())
    return model


def _changed_by_its_constructor() -> nn.Module:
    layer = nn.Linear(3, 3)
    nn.init.ones_(layer.weight)
    return layer


def _uninitialized() -> nn.Module:
    with sdp_deepspeed.Init():
        return Holder()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_two_contexts, "several contexts"),
        (_uninitialized, "'weight' is on the meta device, and nothing initializes it.*Init"),
        (_on_meta(Holder), r"'weight', \+3 more is on the meta device, and nothing initializes it.*Init"),
        (_changed(llama), r"'model.layers.0.self_attn.q_proj.weight', \+14 more .* changed after it was built.*Init"),
        (_changed(lambda: nn.Linear(2, 2)), "'weight' .* changed after it was built.*Init"),
        (_loaded, r"'model.embed_tokens.weight', \+20 more .* changed after it was built.*Init"),
        (_on_meta(_changed_by_its_constructor), "'weight' .* changed after it was built.*Init"),
        (_resized, "'model.norm.weight' .* a fresh LlamaForCausalLM .* has no such tensor.*Init"),
    ],
)
def test_values_that_nothing_says(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeferredModel.of(build())


def test_real_models_are_none_of_ours() -> None:
    assert DeferredModel.of(llama()) is None
    with sdp_deepspeed.Init():
        constant = nn.ParameterList([nn.Parameter(torch.tensor([1.0]))])
    assert DeferredModel.of(constant) is None


def _plain_modules() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(3, 4), nn.Embedding(9, 4, padding_idx=2))


META_MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(family, name, seed=3) for name in FAMILIES},
    "tied": partial(llama, tied=True, seed=3),
    "plain modules": _plain_modules,
}


@pytest.mark.parametrize("name", META_MODELS)
def test_models_on_the_meta_device_get_a_program(name: str) -> None:
    """Seeded before `deepspeed.initialize`, they are the model that is built after the same seed; buffers too."""
    expected, _ = build_for_real(META_MODELS[name])
    model = _on_meta(META_MODELS[name])()
    torch.manual_seed(3)
    deferred = DeferredModel.of(model)
    assert deferred is not None
    source = f"a fresh {type(model).__name__} of its config" if hasattr(model, "config") else "reset_parameters"
    assert source in deferred.note
    torch.set_rng_state(deferred._program.rng_state)
    storages = dict(deferred._program.run({v.storage for v in deferred._values.values() if isinstance(v, Ref)}))
    found = {n: v.view(storages[v.storage]) if isinstance(v, Ref) else v for n, v in deferred._values.items()}
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []
