"""All modes in the engine: scaled branches, export, generation, state dicts."""

from __future__ import annotations

import itertools
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.config import MODES
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.virtual_workers import Reference
from tests.helpers.dense_views import assert_refused_in_use, batch_of
from tests.helpers.models import MIXED, batches, loss_of
from tests.helpers.more_models import ALL_SPECIMENS
from tests.helpers.ranks import Check, Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, sgd, train

OUTPUTS = ("o_proj", "down_proj", "c_proj", "attention.dense", "dense_4h_to_h")


def start(name: str, **block: Any) -> tuple[Any, Any]:
    """An engine, and a copy of the model that it was given."""
    model = ALL_SPECIMENS[name].build()
    dense = deepcopy(model)
    return engine_of(sgd(**block), model), dense


@torch.no_grad()
def logits(model: Any, batch: torch.Tensor) -> torch.Tensor:
    model.eval()
    return model(input_ids=batch).logits


def scaled(dense: nn.Module, plan: Plan) -> nn.Module:
    """The dense model with the output projections of each unit multiplied by its coverage, by their names."""
    result = deepcopy(dense)
    tensors = dict(result.named_parameters())
    with torch.no_grad():
        for unit, holders in zip(plan.units, plan.holders, strict=True):
            for piece in unit.pieces:
                if any(piece.parameter.rpartition(".")[0].endswith(name) for name in OUTPUTS):
                    piece.narrow(tensors[piece.parameter]).mul_(len(holders) / plan.num_subnetworks)
    return result


def loaded_from(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def branches_are_scaled(rank: Rank) -> None:
    """Evaluation and export have the factor, training never sees it; shared units have none."""
    by_rules = {"holders": [{"units": "mlp", "holders": 1}, {"units": r"0\.attention", "holders": 2}]}
    cases: list[tuple[str, dict[str, Any]]] = [
        (
            "llama_biases",
            {"strategy": "neuron", "neuron_groups": 4, "shared": [r"mlp\.group_1$", r"0\.attention\.head_2$"]},
        ),
        ("gpt2", {"strategy": "neuron", **by_rules}),
    ]
    for number, (name, choice) in enumerate(cases):
        block = {"holders": 1 + number % (rank.size - 1), **choice}
        plain, dense = start(name, **block)
        engine, _ = start(name, **block, dense_branch_scale="coverage")
        folder, batch = rank.folder / str(number), batch_of(rank)
        assert train(engine, num_steps=1) == train(plain, num_steps=1)
        dense.load_state_dict(dense_state(plain))
        expected = logits(scaled(dense, engine.plan), batch)
        assert not torch.allclose(expected, logits(dense, batch), atol=1e-3)
        assert torch.equal(logits(plain, batch), logits(dense, batch)), "off by default"
        before = copies(engine)
        assert torch.equal(logits(engine, batch), expected)
        with engine.dense():
            assert torch.equal(logits(engine.module, batch), expected)
        engine.save_pretrained(folder)
        assert torch.equal(logits(loaded_from(folder), batch), expected)
        plain.train()
        engine.train()
        assert_identical(copies(engine), before)
        assert train(engine, num_steps=1, first=1) == train(plain, num_steps=1, first=1)
        assert_identical(copies(engine), copies(plain))


def copies(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.held_tensors().items()}


def full_coverage_scales_nothing(rank: Rank) -> None:
    for name, strategy in (("llama", "block"), ("llama", "neuron"), ("gemma2", "neuron")):
        engine, dense = start(name, strategy=strategy, holders=rank.size, dense_branch_scale="coverage")
        assert torch.equal(logits(engine, batch_of(rank)), logits(dense, batch_of(rank)))


def scale_is_refused_in_the_backward_regime(rank: Rank) -> None:
    block = {"regime": "backward", "dense_branch_scale": "coverage"}
    refusal(ValueError, lambda: start("llama", **block), "dense_branch_scale", "coverage", "regime")


def exports_the_references_dense_model(rank: Rank) -> None:
    """Trained beside the oracle; both the Hugging Face folder and DeepSpeed's 16-bit file are whole."""
    cases = [("llama_odd", "forward", "neuron"), ("gpt2", "backward", "neuron"), ("qwen3", "backward", MIXED)]
    for name, regime, strategy in cases:
        engine, dense = start(name, regime=regime, strategy=strategy, neuron_groups=None)
        reference = Reference(dense, engine.plan, lambda named: torch.optim.SGD(named.values(), lr=0.1), loss_of, 0.0)
        for step in itertools.islice(batches(rank.size, 1), 2):
            reference.step(step)
        train(engine, num_steps=2)
        folder = rank.folder / f"{name}_{regime}"
        if regime == "forward":
            assert_refused_in_use(engine.module.state_dict(), r"partial.*engine\.dense\(\)")
        state = dense_state(engine)
        shapes = {key: value.shape for key, value in dense.state_dict().items()}
        assert {key: value.shape for key, value in state.items()} == shapes
        with engine.dense():
            assert all(tensor.is_contiguous() for tensor in engine.module.state_dict().values())
        engine.save_pretrained(folder)
        engine.save_16bit_model(str(folder))
        dist.barrier()
        found = loaded_from(folder)
        assert_identical(dict(found.state_dict()), state)
        assert_identical(torch.load(folder / "pytorch_model.bin", weights_only=True), state)
        torch.testing.assert_close(logits(found, batch_of(rank)), logits(dense, batch_of(rank)), rtol=1e-5, atol=1e-5)


def generates_in_all_modes(rank: Rank) -> None:
    """With a key/value cache; ranks need not do the same."""
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for (regime, strategy), name in zip(MODES, ("llama", "gpt2", "qwen3", "gpt_neox"), strict=True):
        engine, dense = start(name, regime=regime, strategy=strategy)
        prompt = batch_of(rank)
        engine.eval()
        with engine.dense():
            found = engine.module.generate(prompt[: 1 + rank.rank % 2], **options)
        assert torch.equal(found, dense.generate(prompt[: 1 + rank.rank % 2], **options))
        with torch.no_grad():
            assert torch.equal(engine.module.generate(prompt, **options), dense.generate(prompt, **options))
        engine.train()


def loads_a_state_dict(rank: Rank) -> None:
    """Inside dense() it reaches what each rank stores, so that training goes on from it."""
    for (regime, strategy), name in zip(MODES, ("llama_odd", "llama_odd", "llama_tied", "gpt2"), strict=True):
        engine, dense = start(name, regime=regime, strategy=strategy)
        train(engine, num_steps=1)
        with torch.no_grad():
            for index, parameter in enumerate(dense.parameters()):
                parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()) + index).view_as(parameter))
        with engine.dense():
            engine.module.load_state_dict(dense.state_dict())
        assert_identical(dense_state(engine), dense.state_dict())
        assert torch.equal(logits(engine, batch_of(rank)), logits(dense, batch_of(rank)))
        engine.train()
        dense.train()
        reference = Reference(dense, engine.plan, lambda named: torch.optim.SGD(named.values(), lr=0.1), loss_of, 0.0)
        losses, norm = reference.step(next(batches(rank.size, 1)))
        assert train(engine, num_steps=1) == pytest.approx(losses[rank.rank], rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
        for key, value in dense_state(engine).items():
            assert torch.allclose(value, dense.state_dict()[key], rtol=0, atol=1e-5), key


def what_is_loaded_is_what_the_dense_model_has(rank: Rank) -> None:
    """Also when its branches are scaled: stored are weights that the scale turns into what was loaded."""
    for strategy in ("block", "neuron"):
        engine, dense = start("llama_biases", strategy=strategy, dense_branch_scale="coverage")
        with engine.dense():
            engine.module.load_state_dict(dense.state_dict())
        state = dense_state(engine)
        for key, value in dense.state_dict().items():  # p / k is rounded, divided by and multiplied with
            assert torch.allclose(state[key], value, rtol=4 * 2**-24, atol=0), key


def evaluation_in_the_backward_regime(rank: Rank) -> None:
    """After training with a key/value cache handed in, with padding, in eager attention: the dense model's logits."""
    from transformers import DynamicCache

    for implementation, name in (("eager", "llama_biases"), ("sdpa", "gpt_neox_parallel")):
        engine, dense = start(name, regime="backward", strategy="neuron")
        for model in (engine.module, dense):
            model.set_attn_implementation(implementation)
        batch = batch_of(rank)
        dense.train()
        found = engine(input_ids=batch, labels=batch, past_key_values=DynamicCache(), use_cache=True)
        expected = dense(input_ids=batch, labels=batch)
        assert torch.allclose(
            found.logits, expected.logits, rtol=0, atol=1e-5 * float(expected.logits.detach().abs().max())
        )
        engine.backward(found.loss)
        engine.step()
        dense.load_state_dict(dense_state(engine))
        assert torch.equal(logits(engine, batch), logits(dense, batch))
        engine.train()
        train(engine, num_steps=1)


def the_dense_model_can_be_differentiated(rank: Rank) -> None:
    """Resident; the rank's own gradients stay as they were, and training goes on."""
    for regime, strategy in MODES:
        engine, dense = start("llama", regime=regime, strategy=strategy)
        batch = batch_of(rank)
        engine.backward(loss_of(engine, batch))
        own = {key: p.grad.clone() for key, p in engine.module.named_parameters() if p.grad is not None}
        shared = engine.module.lm_head.weight
        with engine.dense():
            loss = loss_of(engine.module, batch)
            assert loss.item() == loss_of(dense, batch).item()
            parameters = [engine.module.get_parameter(piece.parameter) for piece in engine.plan.units[0].pieces]
            wanted = [dense.get_parameter(piece.parameter) for piece in engine.plan.units[0].pieces]
            if all(parameter.requires_grad for parameter in parameters):
                expected = torch.autograd.grad(loss_of(dense, batch), wanted)
                assert all(map(torch.equal, torch.autograd.grad(loss, parameters), expected))
            del loss
        assert_identical({key: p.grad for key, p in engine.module.named_parameters() if p.grad is not None}, own)
        assert shared.grad is not None
        engine.step()
        train(engine, num_steps=1)


def frozen_weights_are_the_users_own(rank: Rank) -> None:
    """DeepSpeed's file without frozen weights lacks what the user froze, not what rank 0 lacks."""
    for regime, strategy in MODES:
        model = ALL_SPECIMENS["llama"].build()
        model.get_parameter("model.norm.weight").requires_grad_(False)
        engine = engine_of(sgd(regime=regime, strategy=strategy), model)
        folder = rank.folder / f"{regime}_{strategy}"
        engine.save_16bit_model(str(folder), exclude_frozen_parameters=True)
        dist.barrier()
        found = set(torch.load(folder / "pytorch_model.bin", weights_only=True))
        assert set(ALL_SPECIMENS["llama"].build().state_dict()) - found == {"model.norm.weight"}, (regime, strategy)


CHECKS: dict[int, list[Check]] = {
    2: [
        branches_are_scaled,
        full_coverage_scales_nothing,
        scale_is_refused_in_the_backward_regime,
        generates_in_all_modes,
        evaluation_in_the_backward_regime,
        the_dense_model_can_be_differentiated,
        frozen_weights_are_the_users_own,
    ],
    3: [
        branches_are_scaled,
        exports_the_references_dense_model,
        loads_a_state_dict,
        what_is_loaded_is_what_the_dense_model_has,
    ],
}


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return [(check.__name__, check) for check in CHECKS[size]]


@pytest.mark.checks((2, 3), _checks, slow=["2-*", "3-branches_are_scaled"])
def test_modes(outcome: str | None) -> None:
    assert outcome is None, outcome
