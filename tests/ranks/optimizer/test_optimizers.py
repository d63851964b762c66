"""Optimizers from JSON and from the client, in whatever way; what is frozen, unused or absent; which are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.ops.adam import fused_adam
from deepspeed.utils import safe_get_full_optimizer_state
from torch import nn

from tests.helpers.models import SPECIMENS, batches, config, llama, loss_of, muon, two_groups, without_block
from tests.helpers.ranks import Rank
from tests.helpers.training import (
    assert_identical,
    dense_state,
    engine_of,
    gathered,
    micro_step,
    own_batches,
    refusal,
    sgd,
    train,
)
from tests.reference.virtual_workers import Reference

pytestmark = pytest.mark.world(2)

Named = dict[str, nn.Parameter]


def against_reference(
    rank: Rank, engine: Any, dense: nn.Module, make: Callable[[Named], torch.optim.Optimizer], drift: float = 1e-5
) -> None:
    """Four steps of both; losses to 1e-5, and parameters to `drift` of the way with one rounding (2**-24) a step."""
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
        tolerance = drift * moved + 4 * 2**-24 * expected.norm()
        assert (ours[name] - expected).norm() <= tolerance, (name, (ours[name] - expected).norm(), moved)


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


def test_client_param_groups(rank: Rank) -> None:
    for stage in (0, 1, 2):
        model = llama()
        dense = deepcopy(model)
        optimizer = three_groups(dict(model.named_parameters()))
        engine = engine_of(without_optimizer(stage), model, optimizer=optimizer)
        against_reference(rank, engine, dense, three_groups)
        assert engine.get_lr() == [1e-2, 1e-2, 0.3]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    refusal(RuntimeError, engine.step, "4 param groups, but had 3")


@contextmanager
def not_compiled() -> Iterator[None]:
    """Optimizers that are built inside run the kernel below; all else of the class is DeepSpeed's."""
    builder = mock.Mock(**{"return_value.load.return_value": SimpleNamespace(multi_tensor_adam=_adamw)})
    with mock.patch.object(fused_adam, "FusedAdamBuilder", builder):
        yield


def _adamw(
    chunk_size: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], lr: float, *more: Any
) -> None:  # arguments as the kernel's
    beta1, beta2, eps, step, is_adamw, has_bias_correction, decay = more
    assert (is_adamw, has_bias_correction) == (1, 1)
    for gradient, weight, average, square in zip(*lists, strict=True):
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(eps)
        weight.mul_(1 - lr * decay).addcdiv_(average, root, value=-lr / (1 - beta1**step))


def test_deepspeeds_fused_adam(rank: Rank) -> None:
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


def test_others_are_allowed(rank: Rank) -> None:
    """By DeepSpeed's key, or by ours; a callable, or an object."""
    for block in ({}, {"allow_optimizer": True}):
        model = llama()
        dense, settings = deepcopy(model), without_optimizer(**block)
        settings["zero_allow_untested_optimizer"] = not block
        optimizer: Any = Unknown(model.parameters(), lr=1e-3) if block else lambda own: Unknown(own, lr=1e-3)
        engine = engine_of(settings, model, optimizer=optimizer)
        against_reference(rank, engine, dense, lambda named: Unknown(named.values(), lr=1e-3))


def test_clipped_muon(rank: Rank) -> None:
    """At C = 1 it is plain DeepSpeed's: ZeRO stages 1 and 2 clip orthogonalized matrices; stage 0, and stage 1 in bf16
    with fp32 sums, gradients. It iterates in fp32 here, so that its update is about as exact as the gradient. In bf16
    only norms are compared; the two kinds differ by a factor of more than ten."""
    muon = {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "torch_adam": True}}
    in_fp32 = mock.patch("deepspeed.runtime.zero.muon.original_muon.ns_compute_dtype", return_value=torch.float32)
    for stage, is_half in ((0, False), (1, False), (2, False), (1, True)):
        settings = sgd(2, stage=stage, holders=2, clip=1.0) | {"optimizer": muon}
        if is_half:
            settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        settings["zero_optimization"]["reduce_scatter"] = False
        states, norms = [], []
        with torch.compiler.set_stance("force_eager"), in_fp32:
            for each in (settings, without_block(settings)):
                model = llama()
                for name, parameter in model.named_parameters():
                    vars(parameter)["use_muon"] = parameter.dim() == 2 and "layers" in name
                engine = engine_of(each, model)
                train(engine, num_steps=3, accumulation=2)
                states.append(dense_state(engine))
                norms.append(engine.get_global_grad_norm())
        if stage > 0:  # plain DeepSpeed reports none at stage 0
            assert float(norms[0]) == pytest.approx(float(norms[1]), rel=0.1 if is_half else 1e-4)
        if not is_half:
            torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


MATRIX = "layers.0.mlp.up_proj"


def test_muon_of_blocks(rank: Rank) -> None:
    """One holder steps the whole of a matrix, and shares are about equal; at stage 0, which clips gradients. Muon's
    iteration, in fp32 here, multiplies rounding of gradients by up to a hundred. What no rank has as a whole matrix is
    refused."""
    in_fp32 = mock.patch("deepspeed.runtime.zero.muon.original_muon.ns_compute_dtype", return_value=torch.float32)
    make = partial(muon, is_matrix=lambda name, parameter: "layers" in name and parameter.dim() == 2)
    for regime in ("forward", "backward"):
        model = llama(3)
        dense, client = deepcopy(model), make(dict(model.named_parameters()))
        with torch.compiler.set_stance("force_eager"), in_fp32:
            engine = engine_of(without_optimizer(0, regime=regime), model, optimizer=client)
            against_reference(rank, engine, dense, make, drift=1e-3)
        matrix, norm = (engine.module.get_parameter(f"model.{name}.weight") for name in (MATRIX, "norm"))
        assert safe_get_full_optimizer_state(norm, "exp_avg").any()
        assert safe_get_full_optimizer_state(matrix, "momentum_buffer").shape == (24, 16)
        refusal(ValueError, partial(safe_get_full_optimizer_state, matrix, "exp_avg"), MATRIX, "momentum_buffer")
        sizes = gathered(sum(parameter.numel() for parameter in engine.optimizer.param_groups[0]["params"]))
        matrices = [p.numel() for name, p in dense.named_parameters() if "layers" in name and p.dim() == 2]
        assert sum(sizes) == sum(matrices)
        assert max(sizes) <= sum(matrices) / rank.size + max(matrices)
        before = safe_get_full_optimizer_state(matrix, "momentum_buffer")
        refusal(ValueError, partial(engine.replan, {"strategy": "neuron"}), "is cut into neurons or heads")
        assert torch.equal(safe_get_full_optimizer_state(matrix, "momentum_buffer"), before), "as it was"
    with_vectors = partial(muon, is_matrix=lambda name, _: "layers" in name)
    later = {"schedule": [{"until_step": 1}, {"strategy": "neuron"}]}
    for block, wrong, words in (
        ({}, with_vectors, "is not a matrix"),
        ({"strategy": "neuron"}, make, "is cut into neurons or heads"),
        (later, make, "schedule[1]"),
    ):
        model = llama()
        client = wrong(dict(model.named_parameters()))
        settings = without_optimizer(**block)
        refusal(ValueError, partial(engine_of, settings, model, optimizer=client), words)


class Averaging(torch.optim.SGD):
    """Its weights for evaluation are the mean of those for training; both change places."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group |= {"is_training": True, "num_steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            assert group["is_training"]
            group["num_steps"] += 1
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.add_(p - mean, alpha=1 / group["num_steps"])

    @torch.no_grad()
    def _change(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["is_training"] != is_training else ():
                weights = p.clone()
                p.copy_(self.state[p]["mean"])
                self.state[p]["mean"].copy_(weights)
            group["is_training"] = is_training

    def train(self) -> None:
        self._change(is_training=True)

    def eval(self) -> None:
        self._change(is_training=False)


def test_modes_of_optimizers(rank: Rank) -> None:
    """The dense model is that of the optimizer's mode, on all ranks, also in a checkpoint; training continues as if
    there were no others, also between the backward pass and the step. `destroy`, and a second engine of
    the model, restore the optimizer's methods."""
    cases = [("forward", "block", 1), ("forward", "neuron", 2), ("backward", "neuron", 1), ("backward", "block", 1)]
    cases.append(("forward", "neuron", 1))  # at stage 1 weights of cut tensors may take the memory of gradients
    (batch,) = own_batches(rank, 1)
    for stage, (regime, strategy, holders) in enumerate(cases):
        is_half = stage == 3
        settings = without_optimizer(stage % 3, regime=regime, strategy=strategy, holders=holders)
        settings |= {"bf16": {"enabled": is_half}}
        engines = [engine_of(settings, optimizer=Averaging) for _ in range(3)]
        folder, sums = str(rank.folder / f"{stage}"), dict[str, Any]()
        for step in range(3):
            for engine in engines[:2]:
                train(engine, num_steps=1, first=step)
            trained = dense_state(engines[1])
            sums = {name: value.float() + sums.get(name, 0) for name, value in trained.items()}
            given = engines[0].optimizer.optimizer if step == 1 else engines[0].optimizer
            given.eval()
            given.eval()
            spacing: dict[str, Any] = {"rtol": 2**-7, "atol": 1e-3} if is_half else {"rtol": 1e-5, "atol": 1e-6}
            means = {name: value / (step + 1) for name, value in sums.items()}
            torch.testing.assert_close(dense_state(engines[0]), means, check_dtype=False, **spacing)
            if step == 1:
                engines[0].save_checkpoint(folder)
            given.train()
            assert_identical(dense_state(engines[0]), trained)
        engines[2].load_checkpoint(folder)
        engines[2].optimizer.train()
        train(engines[2], num_steps=1, first=2)
        assert_identical(dense_state(engines[2]), dense_state(engines[0]))
        engines[0].backward(loss_of(engines[0], batch))
        given.eval()
        given.train()
        engines[0].step()
        micro_step(engines[2], batch)
        assert_identical(dense_state(engines[0]), dense_state(engines[2]))  # gradients were kept
    with engines[0].dense():
        refusal(RuntimeError, engines[0].optimizer.eval, "optimizer.eval inside engine.dense()")
    clients = [engine.optimizer.optimizer for engine in engines]
    engines[0].destroy()
    other = engine_of(sgd(), engines[1].module)
    for client, mode in itertools.product(clients[:2], ("train", "eval")):
        assert getattr(client, mode) == MethodType(getattr(Averaging, mode), client)
    assert not hasattr(other.optimizer, "eval")


def test_from_json(rank: Rank) -> None:
    """One that makes its state at once."""
    options: dict[str, Any] = {"lr": 0.05, "initial_accumulator_value": 0.1}
    settings = config(holders=1, check_agreement=True) | {"optimizer": {"type": "Adagrad", "params": options}}
    model = llama()
    dense = deepcopy(model)
    make = lambda named: torch.optim.Adagrad(named.values(), **options)  # noqa: E731
    against_reference(rank, engine_of(settings, model), dense, make)


def test_frozen_parameters(rank: Rank) -> None:
    """Frozen: the embedding (shared), a norm in a unit, a whole unit. Given to the optimizer or not, they stay."""
    for stage, given in ((0, True), (1, False), (2, True)):
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


def test_trainable_but_not_optimized(rank: Rank) -> None:
    """A parameter that no group has keeps its value, and is not in the norm."""
    model = llama()
    dense = deepcopy(model)
    start = model.get_parameter("lm_head.weight").detach().clone()
    chosen = [p for name, p in model.named_parameters() if name != "lm_head.weight"]
    engine = engine_of(without_optimizer(), model, optimizer=torch.optim.SGD(chosen, lr=0.1))
    dense.get_parameter("lm_head.weight").requires_grad_(False)  # the reference has no other way to leave it out
    against_reference(rank, engine, dense, lambda named: torch.optim.SGD(named.values(), lr=0.1))
    assert torch.equal(dense_state(engine)["lm_head.weight"], start)


def test_unused_parameters(rank: Rank) -> None:
    """Where no loss reaches them their gradient is zero; if none does on any rank, only the decay moves them, as in
    ZeRO-1."""
    for stage in (0, 1, 2):
        model = llama()
        model.spare, model.of_one = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))
        model.empty = nn.Parameter(torch.ones(0))
        groups = [[p for p in model.parameters() if p.numel()], [model.empty]]  # and buckets
        optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.5, weight_decay=0.5)
        settings = without_optimizer(stage, check_agreement=True) | {"gradient_clipping": 0.0}
        engine = engine_of(settings, model, optimizer=optimizer)
        for _ in range(2):
            loss = loss_of(engine, own_batches(rank, 1)[0])
            engine.backward(loss + engine.module.of_one.sum() if rank.rank == 1 else loss)
            engine.step()
        assert engine.module.spare.tolist() == [0.75**2] * 5
        assert engine.module.of_one.tolist() == [0.75 * 0.5 - 0.25] * 3  # half of the gradient of rank 1


def test_frozen_on_one_rank(rank: Rank) -> None:
    """Holders stay identical: what one of them trains is stepped on all."""
    engine = engine_of(sgd(stage=1, holders=rank.size, check_agreement=True))
    train(engine, num_steps=1)
    norm = engine.module.model.norm.weight
    norm.requires_grad_(rank.rank != 0)
    before = norm.detach().clone()
    train(engine, num_steps=2, first=1)
    assert not torch.equal(norm, before)


ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    """The idiom: read only when somebody asks for the next one."""
    return filter(lambda parameter: parameter.requires_grad, model.parameters())


def groups(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Lazy outside and inside."""
    for is_matrix in (True, False):
        chosen: Any = filter(lambda p, side=is_matrix: p.requires_grad and (p.dim() >= 2) == side, model.parameters())  # type: ignore[arg-type]
        yield {"params": chosen, "weight_decay": 0.1 if is_matrix else 0.0}


def by_function(parameters: Any) -> torch.optim.Optimizer:
    """Filters and sorts by itself."""
    kept = [parameter for parameter in parameters if parameter.requires_grad]
    decayed = {"params": [p for p in kept if p.dim() >= 2], "weight_decay": 0.1}
    return torch.optim.AdamW([decayed, {"params": [p for p in kept if p.dim() < 2], "weight_decay": 0.0}], lr=1e-2)


Idiom = Callable[[nn.Module], dict[str, Any]]
# Each with what must train the same: the parameters in lists that were made before.
FLAT: tuple[Idiom, ...] = (
    lambda model: {"model_parameters": trainable(model)},
    lambda model: {"model_parameters": None},
)
GROUPED: tuple[Idiom, ...] = (
    lambda model: {"model_parameters": groups(model)},
    lambda model: {"model_parameters": None, "optimizer": by_function},
    lambda model: {"model_parameters": trainable(model), "optimizer": by_function},
)


def trained(idiom: Idiom) -> dict[str, torch.Tensor]:
    model = SPECIMENS["gpt2"].build()  # biases: some parameters are no matrices
    model.get_parameter("transformer.wpe.weight").requires_grad_(False)
    settings = config(holders=1)
    settings["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}
    engine = engine_of(settings, model, **idiom(model))
    train(engine, num_steps=2)
    return dense_state(engine)


def test_idioms_train_what_lists_do(rank: Rank) -> None:
    flat = trained(lambda model: {"model_parameters": list(trainable(model))})
    grouped = trained(
        lambda model: {"model_parameters": [{**own, "params": list(own["params"])} for own in groups(model)]}
    )
    assert not torch.equal(grouped["transformer.ln_f.weight"], flat["transformer.ln_f.weight"])  # decay shows
    for idioms, expected in ((FLAT, flat), (GROUPED, grouped)):
        for idiom in idioms:
            assert_identical(trained(idiom), expected)


def test_a_function_that_fails_on_one_rank(rank: Rank) -> None:
    def fails(parameters: Any) -> torch.optim.Optimizer:
        if rank.rank == 1:
            raise ValueError("no such learning rate")
        return by_function(parameters)

    refusal(ValueError, lambda: engine_of(config(holders=1), optimizer=fails), "no such learning rate", "[on rank 1]")
