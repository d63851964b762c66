"""Workers that start without the dense model are those that start with it, bit for bit, in less memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import sdp_deepspeed
from benchmarks.common.measured_step import watched_host_memory
from sdp_deepspeed.config import MODES
from sdp_deepspeed.deferred_init import materialize
from sdp_deepspeed.engine import apply_plan, consistency
from tests.helpers.deferred_models import small_fills
from tests.helpers.live_tensors import stored_bytes
from tests.helpers.models import FAMILIES, VOCABULARY, config, family, llama, two_groups
from tests.helpers.ranks import Check, Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, refusal, train

# They take a MiB for a moment, whatever the model; of a small one that is as much as the model.
NO_DIGESTS = mock.patch.object(consistency, "digests", side_effect=lambda tensors: [b"" for _ in tensors])
BF16 = {"bf16": {"enabled": True}}
WAYS: dict[str, Callable[[], Any]] = {"Init": sdp_deepspeed.Init, "meta": lambda: torch.device("meta")}


def unbuilt(build: Callable[[], nn.Module], way: str, seed: int = 7) -> nn.Module:
    """A model without storage; a meta model is initialized from the seed before `deepspeed.initialize`."""
    torch.manual_seed(seed)
    with WAYS[way]():
        model = build()
    if way == "meta":
        torch.manual_seed(seed)
    return model


def built(build: Callable[[], nn.Module], seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def layouts(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for name, t in tensors.items()}


def assert_same(one: Any, other: Any) -> None:
    """Two engines: what they store, where, and the dense model."""
    assert one.plan.hash == other.plan.hash
    assert layouts(one.held_tensors()) == layouts(other.held_tensors())
    assert_identical(one.held_tensors(), other.held_tensors())
    assert_identical(dict(one.module.named_buffers()), dict(other.module.named_buffers()))
    assert_identical(dense_state(one), dense_state(other))


def compare(build: Callable[[], nn.Module], way: str, settings: dict[str, Any], *, steps: int = 1) -> None:
    model = unbuilt(build, way)
    parameters = dict(model.named_parameters())
    with small_fills(), mock.patch.object(materialize, "num_threads", return_value=3):
        engine = engine_of(settings, model)
    found = dict(engine.module.named_parameters())
    assert all(found[name] is parameter for name, parameter in parameters.items())
    assert found.keys() == parameters.keys()
    other = engine_of(settings, built(build))
    assert_same(engine, other)
    assert train(engine, num_steps=steps) == train(other, num_steps=steps)
    assert_same(engine, other)
    for one in (engine, other):
        one.destroy()


def is_the_dense_start(rank: Rank, *, number: int) -> None:
    """Every family, and every mode, in turn; how a model lost its storage does not matter to them."""
    builders = [partial(family, name) for name in FAMILIES] + [partial(llama, tied=True)]
    build = partial(_without_own_seed, builders[number])
    for offset in (0, 3) if number in (0, 4) else (0,):
        regime, strategy = MODES[(number + offset) % 4]
        way = tuple(WAYS)[(number // 4 + offset) % 2]
        compare(build, way, config(coverage=0.5, regime=regime, strategy=strategy) | (BF16 if offset else {}))


def _without_own_seed(build: Callable[..., nn.Module]) -> nn.Module:
    with mock.patch.object(torch, "manual_seed"):
        return build()


def stages_and_replicas(rank: Rank) -> None:
    build = partial(_without_own_seed, partial(family, "qwen3"))
    blocks: tuple[dict[str, Any], ...] = ({"holders": 1}, {"subnetworks": 1, "coverage": 1.0})
    for stage, block in itertools.product((0, 2), blocks):
        compare(build, "Init", config(**block) | {"zero_optimization": {"stage": stage}}, steps=2)
    compare(build, "Init", config(coverage=0.5, dense_branch_scale="coverage"))


def client_optimizer(rank: Rank) -> None:
    """Made of parameters without storage, in two groups."""
    settings = config(coverage=0.5, strategy="neuron")
    del settings["optimizer"]
    engines = []
    for make in (partial(unbuilt, way="Init"), built):
        model = make(partial(_without_own_seed, llama))
        optimizer = torch.optim.AdamW(two_groups(dict(model.named_parameters())), lr=1e-2)
        engines.append(engine_of(settings, model, optimizer=optimizer, model_parameters=None))
        train(engines[-1], num_steps=2)
    assert_same(*engines)


def attributes_and_flags_stay(rank: Rank) -> None:
    model = unbuilt(partial(_without_own_seed, llama), "Init")
    weight, frozen = model.get_parameter("lm_head.weight"), model.get_parameter("model.norm.weight")
    weight.note = "mine"  # type: ignore[attr-defined]
    frozen.requires_grad_(False)
    engine = engine_of(config(coverage=0.5), model, model_parameters=[p for p in model.parameters() if p.requires_grad])
    assert engine.module.lm_head.weight.note == "mine"
    assert not engine.module.model.norm.weight.requires_grad
    assert not hasattr(weight, "_sdp_program")  # whose constants would live on
    train(engine, num_steps=1)


def wide_llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))


def no_rank_has_the_dense_model(rank: Rank) -> None:
    """At no time more than what is stored at the end, and a tensor that is on its way."""
    dense = built(wide_llama)
    largest = max(parameter.nbytes for parameter in dense.parameters())
    random_states = 6 * torch.get_rng_state().nbytes
    for number, (regime, strategy) in enumerate(MODES):
        way = tuple(WAYS)[number % 2]
        settings = config(coverage=0.5, regime=regime, strategy=strategy)
        with watched_host_memory() as memory, NO_DIGESTS:
            engine = engine_of(settings, unbuilt(wide_llama, way))
        own = stored_bytes(dense, engine.plan, rank.rank)
        assert memory.at_end <= own + random_states, (regime, strategy, way, memory, own)
        assert memory.peak <= own + largest + random_states, (regime, strategy, way, memory, own)
        with (
            watched_host_memory() as memory,
            NO_DIGESTS,
        ):  # masters of what is held in half precision, shared by two ranks
            engine_of(settings | BF16, unbuilt(wide_llama, way))
        assert memory.peak <= memory.at_end + largest + random_states, (regime, strategy, way, memory, own)


def random_stream(rank: Rank) -> None:
    """As after the dense build, unless somebody used or set it since: seeds for dropout, say."""
    build = partial(_without_own_seed, llama)
    built(build)
    after = torch.get_rng_state()
    for way in WAYS:
        engine_of(config(coverage=0.5), unbuilt(build, way))
        assert torch.equal(torch.get_rng_state(), after), way
    model = unbuilt(build, "Init")
    torch.manual_seed(rank.rank)
    own = torch.get_rng_state()
    engine_of(config(coverage=0.5), model)
    assert torch.equal(torch.get_rng_state(), own)


def ranks_with_other_seeds_start_from_rank_0(rank: Rank) -> None:
    """As DeepSpeed's broadcast has it."""
    build = partial(_without_own_seed, llama)
    engine = engine_of(config(coverage=0.5), unbuilt(build, "Init", seed=7 + rank.rank))
    other = engine_of(config(coverage=0.5), built(build))
    assert_identical(dense_state(engine), dense_state(other))


def other_models_on_other_ranks(rank: Rank) -> None:
    build = partial(llama, seed=rank.rank)  # a seed inside is part of the model
    work = partial(engine_of, config(coverage=1.0), unbuilt(build, "Init"))
    refusal(ValueError, work, "did not initialize the model alike", "model.embed_tokens.weight", "same config and seed")


def errors_of_one_rank(rank: Rank) -> None:
    """A rank whose values cannot be made says so on all."""
    model = unbuilt(partial(_without_own_seed, llama), "Init")
    finish = "sdp_deepspeed.deferred_init.materializer.Materializer.finish"
    fails = mock.patch(finish, side_effect=MemoryError("no room"))
    with fails if rank.rank == 1 else nullcontext():
        refusal(RuntimeError, partial(engine_of, config(coverage=0.5), model), "no room", "[on rank 1]")


def tensor_parallelism(rank: Rank) -> None:
    for way in WAYS:
        settings = config(coverage=1.0) | {"tensor_parallel": {"autotp_size": 2}}
        work = partial(engine_of, settings, unbuilt(partial(_without_own_seed, llama), way))
        refusal(ValueError, work, "tensor parallelism", "sdp_deepspeed.Init", "build it on the CPU")


def without_initialization(rank: Rank) -> None:
    with sdp_deepspeed.Init(initialize=False):
        model = llama()
    state = dense_state(engine_of(config(coverage=0.5), model))
    assert not state["model.embed_tokens.weight"].any()
    assert state["model.norm.weight"].eq(1).all()
    assert len(set(map(str, gathered({name: value.sum().item() for name, value in state.items()})))) == 1


def changed_before_the_start(rank: Rank) -> None:
    """Initialized once more, loaded and replaced after `Init`; a replacement that differs by rank is an error."""

    def change(model: Any) -> Any:
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.weight.data.normal_(0, 0.1)
            model.model.norm.weight.copy_(torch.arange(16.0))
        model.lm_head.weight = nn.Parameter(torch.full((VOCABULARY, 16), 0.25))
        layer = model.model.layers[1].mlp
        layer.load_state_dict({name: torch.ones(v.shape) for name, v in layer.state_dict().items()}, assign=True)
        return model

    build = partial(_without_own_seed, llama)
    for regime, strategy in MODES:
        settings = config(coverage=0.5, regime=regime, strategy=strategy)
        engine, other = (engine_of(settings, change(make(build))) for make in (partial(unbuilt, way="Init"), built))
        assert_same(engine, other)
        train(engine, num_steps=1)
        assert not torch.equal(engine.module.lm_head.weight, torch.full((VOCABULARY, 16), 0.25)), "it is trained"
    model: Any = unbuilt(build, "Init")
    model.lm_head.weight = nn.Parameter(torch.full((VOCABULARY, 16), float(rank.rank)))
    refusal(ValueError, partial(engine_of, config(coverage=0.5), model), "alike", "lm_head.weight")
    model = unbuilt(build, "Init")
    if rank.rank == 0:  # as if it had read a checkpoint for all
        model.load_state_dict(llama().state_dict(), assign=True)
    words = ("on ranks 1 the model has no weights yet", "load weights on all of them")
    refusal(ValueError, partial(engine_of, config(coverage=0.5), model), *words)


def where_weights_of_a_meta_model_come_from_is_said(rank: Rank) -> None:
    """A change through `.data` leaves no trace that could be refused."""
    told: dict[str, list[str]] = {way: [] for way in WAYS}
    log_dist = apply_plan.log_dist
    for way, lines in told.items():
        vars(apply_plan)["log_dist"] = lambda text, lines=lines, **_: lines.append(text)
        try:
            engine_of(config(coverage=0.5), unbuilt(llama, way))
        finally:
            vars(apply_plan)["log_dist"] = log_dist
    found = {way: ["a fresh LlamaForCausalLM of its config" in line for line in lines] for way, lines in told.items()}
    assert [sum(found["Init"]), sum(found["meta"])] == [0, 1], told


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Check]]:
    for number, name in enumerate((*FAMILIES, "tied")):
        yield f"{is_the_dense_start.__name__}/{name}", partial(is_the_dense_start, number=number)
    for check in (
        stages_and_replicas,
        client_optimizer,
        attributes_and_flags_stay,
        no_rank_has_the_dense_model,
        random_stream,
        ranks_with_other_seeds_start_from_rank_0,
        other_models_on_other_ranks,
        errors_of_one_rank,
        without_initialization,
        changed_before_the_start,
        where_weights_of_a_meta_model_come_from_is_said,
        tensor_parallelism,
    ):
        yield check.__name__, check


@pytest.mark.checks(2, _cases, slow=["*/llama", "*/qwen*", "*/gpt_neox*", "*/mistral"])
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
