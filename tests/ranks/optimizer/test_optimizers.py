"""Optimizers from JSON and from the client, what is frozen, unused or lacking, and which optimizers are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.reference.virtual_workers import Reference
from tests.helpers.fused_adam import not_compiled
from tests.helpers.models import batches, config, llama, loss_of, two_groups
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, micro_step, refusal, sgd, train

Named = dict[str, nn.Parameter]


class Lion(torch.optim.Optimizer):
    """The client's own, elementwise and with a known name."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter.sub_((0.9 * average + 0.1 * parameter.grad).sign(), alpha=group["lr"])
                average.mul_(0.99).add_(parameter.grad, alpha=0.01)


def against_reference(
    rank: Rank, engine: Any, dense: nn.Module, make: Callable[[Named], torch.optim.Optimizer]
) -> None:
    """Four steps of both; losses to 1e-5, and parameters to 1e-5 of the way with one rounding (2**-24) a step."""
    reference = Reference(dense, engine.plan, make, loss_of, engine.gradient_clipping())
    start = {name: parameter.detach().clone() for name, parameter in dense.named_parameters()}
    for step in itertools.islice(batches(rank.size, 1), 4):
        losses, norm = reference.step(step)
        loss = micro_step(engine, step[rank.rank][0])
        assert abs(loss - losses[rank.rank][0]) <= 1e-5, (loss, losses)
        assert abs(engine.get_global_grad_norm() - norm) <= 1e-5 * norm
    ours = dense_state(engine)
    for name, expected in dense.named_parameters():
        moved = (expected - start[name]).norm()
        tolerance = 1e-5 * moved + 4 * 2**-24 * expected.norm()
        assert (ours[name] - expected).norm() <= tolerance, (name, (ours[name] - expected).norm(), moved)


@dataclass(frozen=True)
class FromJson:
    """An optimizer that DeepSpeed builds from JSON, at one stage."""

    kind: str
    stage: int
    options: tuple[tuple[str, Any], ...]

    def __call__(self, rank: Rank) -> None:
        settings = config(holders=1, check_agreement=True)
        options = dict(self.options)
        settings |= {"optimizer": {"type": self.kind, "params": options}, "zero_optimization": {"stage": self.stage}}
        model = llama()
        dense = deepcopy(model)
        plain = {key: value for key, value in options.items() if key not in ("torch_adam", "adam_w_mode")}
        against_reference(
            rank,
            engine_of(settings, model),
            dense,
            lambda named: getattr(torch.optim, self.kind)(named.values(), **plain),
        )


def without_optimizer(stage: int = 1, **block: Any) -> dict[str, Any]:
    settings = config(**({"holders": 1} | block))
    del settings["optimizer"]
    return settings | {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}


def three_groups(named: Named) -> torch.optim.Optimizer:
    """Every group has its own options, and the last has parameters of one unit only: some ranks hold nothing of it."""
    special = [p for name, p in named.items() if "layers.1.mlp" in name]
    rest = {name: p for name, p in named.items() if "layers.1.mlp" not in name}
    groups = [*two_groups(rest), {"params": special, "lr": 0.3, "betas": (0.5, 0.6)}]
    return torch.optim.Adam(groups, lr=1e-2)


def client_param_groups(rank: Rank) -> None:
    for stage in (0, 1, 2):
        model = llama()
        dense = deepcopy(model)
        optimizer = three_groups(dict(model.named_parameters()))
        engine = engine_of(without_optimizer(stage), model, optimizer=optimizer)
        against_reference(rank, engine, dense, three_groups)
        assert engine.get_lr() == [1e-2, 1e-2, 0.3]


def client_callable(rank: Rank) -> None:
    model = llama()
    dense = deepcopy(model)
    engine = engine_of(without_optimizer(), model, optimizer=lambda parameters: Lion(parameters, lr=1e-3))
    against_reference(rank, engine, dense, lambda named: Lion(named.values(), lr=1e-3))


def deepspeeds_fused_adam(rank: Rank) -> None:
    """What "AdamW" without `torch_adam` is. It counts the steps of many tensors in their last one, and a resumed run
    goes on from that; to rounding, as its powers of betas are running products."""
    settings = config(holders=1) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    for name, more in {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}.items():
        with not_compiled():
            engine, resumed = (engine_of(settings | more) for _ in range(2))
        assert type(engine.optimizer.optimizer).__name__ == "FusedAdam"
        train(engine, num_steps=2)
        engine.save_checkpoint(str(rank.folder / name))
        resumed.load_checkpoint(str(rank.folder / name))
        for one in (engine, resumed):
            train(one, num_steps=1, first=2)
        found, wanted = dense_state(resumed), dense_state(engine)
        spacing = 2**-8 if name == "bf16" else 1e-6
        assert all(torch.allclose(found[key], wanted[key], rtol=spacing, atol=1e-6) for key in wanted)


class Unknown(torch.optim.RMSprop):
    """One that nobody knows by name."""


def others_are_refused(rank: Rank) -> None:
    model = llama()
    settings = without_optimizer() | {"zero_allow_untested_optimizer": False}
    given = Unknown(model.parameters(), lr=1e-3)
    refusal(ValueError, lambda: engine_of(settings, model, optimizer=given), "Unknown", "allow_optimizer")
    refusal(ValueError, lambda: engine_of(settings, llama(), optimizer=Unknown), "Unknown")
    whole = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    refusal(ValueError, lambda: engine_of(settings, model, optimizer=whole), "Adafactor")


def others_are_allowed(rank: Rank) -> None:
    model = llama()
    dense = deepcopy(model)
    settings = without_optimizer(allow_optimizer=True)
    engine = engine_of(settings, model, optimizer=Unknown(model.parameters(), lr=1e-3))
    against_reference(rank, engine, dense, lambda named: Unknown(named.values(), lr=1e-3))


def a_stepped_optimizer_is_refused(rank: Rank) -> None:
    model = llama()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    refusal(ValueError, lambda: engine_of(without_optimizer(), model, optimizer=optimizer), "already holds state")


def a_foreign_parameter_is_refused(rank: Rank) -> None:
    optimizer = torch.optim.Adam(llama().parameters())
    refusal(ValueError, lambda: engine_of(without_optimizer(), llama(), optimizer=optimizer), "does not have")


def frozen_parameters(rank: Rank) -> None:
    """Frozen: the embedding (shared), a norm in a unit, a whole unit. Given to the optimizer or not, they stay."""
    for stage, given in ((0, False), (0, True), (1, False), (1, True), (2, False)):
        model = llama()
        frozen = [
            n for n, _ in model.named_parameters() if "embed" in n or "layers.0.mlp" in n or "1.input_layern" in n
        ]
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        dense = deepcopy(model)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        trained = [p for p in model.parameters() if given or p.requires_grad]
        engine = engine_of(without_optimizer(stage), model, optimizer=torch.optim.AdamW(trained, lr=1e-2))

        def make(named: Named, frozen: list[str] = frozen) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for name, p in named.items() if name not in frozen], lr=1e-2)

        against_reference(rank, engine, dense, make)
        after = dense_state(engine)
        assert_identical({name: start[name] for name in frozen}, {name: after[name] for name in frozen})


def trainable_but_not_optimized(rank: Rank) -> None:
    """A parameter that no group has keeps its value, and is not in the norm."""
    for stage in (1, 2):
        model = llama()
        dense = deepcopy(model)
        start = model.get_parameter("lm_head.weight").detach().clone()
        chosen = [p for name, p in model.named_parameters() if name != "lm_head.weight"]
        engine = engine_of(without_optimizer(stage), model, optimizer=torch.optim.SGD(chosen, lr=0.1))
        dense.get_parameter("lm_head.weight").requires_grad_(False)  # the reference has no other way to leave it out
        against_reference(rank, engine, dense, lambda named: torch.optim.SGD(named.values(), lr=0.1))
        assert torch.equal(dense_state(engine)["lm_head.weight"], start)


def unused_parameters(rank: Rank) -> None:
    """No loss reaches them: their gradient is zero on all ranks, so that only the decay moves them, as in ZeRO-1."""
    for stage in (0, 1, 2):
        model = llama()
        model.spare = nn.Parameter(torch.ones(5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.5)
        engine = engine_of(without_optimizer(stage, check_agreement=True), model, optimizer=optimizer)
        train(engine, num_steps=2)
        assert engine.module.spare.tolist() == [0.75**2] * 5


def others_may_replace_param_data(rank: Rank) -> None:
    """AutoTP's gathers and users' casts put new storage behind a parameter; the step must reach it."""
    states = []
    for replaced in (False, True):
        engine = engine_of(sgd(holders=1))
        for first in range(3):
            train(engine, num_steps=1, first=first)
            for parameter in engine.module.parameters() if replaced else ():
                parameter.data = parameter.data.clone()
        states.append(dense_state(engine))
    assert_identical(*states)


def lacking_parameters_are_empty(rank: Rank) -> None:
    engine = engine_of(sgd(holders=1))
    train(engine, num_steps=1)
    held = engine.held_tensors()
    lacking = {name: p for name, p in engine.module.named_parameters() if name not in held}
    assert lacking
    for name, parameter in lacking.items():
        assert parameter.numel() == 0, name
        assert not parameter.requires_grad, name
        assert parameter.grad is None, name


def weights_loaded_from_outside_are_kept(rank: Rank) -> None:
    """With a master copy (bf16) the step starts from the loaded weights once it was told of them."""
    engine = engine_of(sgd(holders=1) | {"bf16": {"enabled": True}})
    train(engine, num_steps=1)
    with engine.dense():
        engine.module.load_state_dict({name: torch.zeros_like(v) for name, v in engine.module.state_dict().items()})
    engine.optimizer.refresh_fp32_params()
    train(engine, num_steps=1)
    assert all(float(value.abs().max()) < 0.5 for value in dense_state(engine).values())  # norms were ones before


def save_16bit_model_is_dense(rank: Rank) -> None:
    engine = engine_of(sgd(holders=1))
    engine.save_16bit_model(str(rank.folder))
    saved = torch.load(rank.folder / "pytorch_model.bin", weights_only=True)
    assert_identical(saved, dense_state(engine))


def frozen_on_one_rank(rank: Rank) -> None:
    """Holders stay identical: what one of them trains is stepped on all."""
    engine = engine_of(sgd(stage=1, holders=rank.size, check_agreement=True))
    train(engine, num_steps=1)
    norm = engine.module.model.norm.weight
    norm.requires_grad_(rank.rank != 0)
    before = norm.detach().clone()
    train(engine, num_steps=2, first=1)
    assert not torch.equal(norm, before)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    adam = (("lr", 1e-2), ("torch_adam", True))
    yield "AdamW", FromJson("AdamW", 1, (*adam, ("weight_decay", 0.1)))
    yield "Adam", FromJson("Adam", 0, (*adam, ("adam_w_mode", False), ("weight_decay", 0.1)))
    yield "SGD", FromJson("SGD", 1, (("lr", 0.1), ("momentum", 0.9), ("nesterov", True)))
    yield "Adagrad-0", FromJson("Adagrad", 0, (("lr", 0.05), ("initial_accumulator_value", 0.1)))
    yield "Adagrad-1", FromJson("Adagrad", 1, (("lr", 0.05), ("initial_accumulator_value", 0.1)))
    for check in (
        client_param_groups,
        client_callable,
        deepspeeds_fused_adam,
        frozen_on_one_rank,
        others_may_replace_param_data,
        lacking_parameters_are_empty,
        weights_loaded_from_outside_are_kept,
        save_16bit_model_is_dense,
        others_are_refused,
        others_are_allowed,
        a_stepped_optimizer_is_refused,
        a_foreign_parameter_is_refused,
        frozen_parameters,
        trainable_but_not_optimized,
        unused_parameters,
    ):
        yield check.__name__, check


@pytest.mark.checks(2, _cases, slow=["2-Adagrad-1", "2-Adam"])
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
