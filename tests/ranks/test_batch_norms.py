"""Running statistics of batch norms: means over the ranks that run a norm, at evaluation, in dense(), when saved; and
those of the dense model, estimated anew, beside one process that has all ranks' batches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import update_bn

import sdp_deepspeed
from sdp_deepspeed.architectures import Branch, Cut, InnerLayers, register
from sdp_deepspeed.checkpoint.random_state import random_state, restore_random_state
from sdp_deepspeed.fsdp import CheckpointManager, full_state_dict, param_groups, reestimate_batch_norm
from tests.helpers.models import config, llama
from tests.helpers.ranks import Rank
from tests.helpers.sharded import gathered_state, sharded
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, refusal

SIZE, NUM = 3, 3
pytestmark = pytest.mark.world(SIZE)
ROUNDING = 2.0**-23  # fp64 sums in another order, rounded to fp32

Batch = tuple[torch.Tensor, torch.Tensor]
WIDTH, NUM_LAYERS, NUM_CLASSES = 6, 4, 5


class Layer(nn.Module):
    """A residual layer whose norms are inside of its branch."""

    def __init__(self, width: int = WIDTH, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        norms = [nn.BatchNorm2d(width, momentum=momentum) for _ in range(2)]
        convolutions = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        self.body = nn.Sequential(convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


_CUTS = (Cut("0", 0), Cut("1", 0), Cut("3", 1, is_output=True))
register(Layer, Branch("residual", body="body", inner=InnerLayers(_CUTS, tail=("4",))))


class Net(nn.Module):
    """Images and classes in, a loss out; logits without classes."""

    def __init__(self, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH, momentum=momentum)
        self.layers = nn.ModuleList(Layer(momentum=momentum) for _ in range(NUM_LAYERS))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: torch.Tensor, classes: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(self.stem(images))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.dropout(x.mean((2, 3))))
        return logits if classes is None else nn.functional.cross_entropy(logits, classes)


def batches(rank: int, num: int, seed: int = 0) -> list[Batch]:
    """Others on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [
        (
            torch.randn(4, 3, 5, 5, generator=generator) * (1 + rank) + rank,
            torch.randint(NUM_CLASSES, (4,), generator=generator),
        )
        for _ in range(num)
    ]


def settings(accumulation: int = 1, **block: Any) -> dict[str, Any]:
    """Of a DeepSpeed run."""
    return config(**block) | {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation}


def train(engine: Any, rank: int, *, num_steps: int) -> None:
    for images, classes in batches(rank, num_steps):
        engine.backward(engine(images, classes))
        engine.step()


def statistics_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all running statistics that this rank stores."""
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    buffers = {name.replace("_checkpoint_wrapped_module.", ""): buffer for name, buffer in module.named_buffers()}
    found = {name: buffer.detach().clone() for name, buffer in buffers.items() if name.endswith(kinds)}
    return {name: value for name, value in found.items() if value.numel()}


def means(by_rank: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Over the ranks that have each; of counts the largest."""
    names = dict.fromkeys(itertools.chain.from_iterable(by_rank))
    of_ranks = {name: torch.stack([found[name] for found in by_rank if name in found]) for name in names}
    return {
        name: values.double().mean(0).to(values.dtype) if values.is_floating_point() else values.amax(0)
        for name, values in of_ranks.items()
    }


def assert_means(model: Any, before: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What ranks have is the mean over those that had it before, and the same bits on all that have it."""
    by_rank, expected = gathered(statistics_of(model)), means(before)
    for found in by_rank:
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=ROUNDING, atol=0)
            assert all(torch.equal(value, other.get(name, value)) for other in by_rank), name
    shared = [found["norm.running_mean"] for found in before]
    assert not torch.equal(shared[0], shared[1]), "each rank has batches of its own"
    return means(by_rank)


@pytest.mark.parametrize(("regime", "momentum"), [("forward", 0.1), ("forward", None), ("backward", 0.1)])
def test_in_an_evaluation_between_steps(rank: Rank, regime: str, momentum: float | None) -> None:
    """Also where micro-steps have come since the last step: the dense model is one, and training goes on with it. In
    the backward regime all ranks run all norms."""
    engine = engine_of(settings(holders=2, accumulation=2, regime=regime), Net(momentum=momentum))
    train(engine, rank.rank, num_steps=3)
    before = gathered(statistics_of(engine.module))
    images = batches(7, 1)[0][0]
    engine.eval()
    with torch.no_grad():
        found = [engine(images) for _ in range(2)]
    dense = Net(momentum=momentum).eval()
    dense.load_state_dict(dense_state(engine))
    with torch.no_grad():
        assert all(torch.equal(logits, dense(images)) for logits in found)
    assert_identical(*itertools.islice(gathered(dense.state_dict()), 2))
    engine.train()
    assert_means(engine.module, before)
    train(engine, rank.rank, num_steps=1)


def test_in_checkpoints(rank: Rank) -> None:
    """Of what all ranks share there is one value, in the middle of a step too, which other layouts resume."""
    engine = engine_of(settings(holders=2, accumulation=2), Net())
    train(engine, rank.rank, num_steps=3)
    before = gathered(statistics_of(engine.module))
    engine.save_checkpoint(rank.folder)
    expected = assert_means(engine.module, before)
    for block in ({"holders": 2, "regime": "backward"}, {"holders": 1}):
        other = engine_of(settings(**block), Net())
        other.load_checkpoint(rank.folder)
        found = {name: value for name, value in dense_state(other).items() if name in expected}
        assert_identical(found, expected)


# ---- estimated anew -------------------------------------------------------------------------------------------------

# Of convolutions over three times the rows: fp32 sums in other orders.
similar = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def oracle(state: dict[str, torch.Tensor], **net: Any) -> dict[str, torch.Tensor]:
    """Statistics of the dense model with these weights, by PyTorch's own function over the batches of all ranks.
    It counts the batches of all ranks, we those of one."""
    dense = Net(**net)
    dense.load_state_dict(state)
    dense.eval()
    for module in dense.modules():  # as update_bn would, but for dropout
        module.train(isinstance(module, nn.BatchNorm2d))
    with mock.patch.object(Net, "train", lambda self, mode=True: self):
        update_bn([images for rank in range(SIZE) for images, _ in batches(rank, NUM, seed=9)], dense)
    found = statistics_of(dense)
    return {name: torch.tensor(NUM) if name.endswith("tracked") else value for name, value in found.items()}


def compare(engine: Any, expected: dict[str, torch.Tensor]) -> None:
    found = {name: value for name, value in dense_state(engine).items() if name in expected}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        similar(value, expected[name])
    first, *others = gathered(found)
    for other in others:
        assert_identical(first, other)


def test_wherever_the_dense_model_is(rank: Rank) -> None:
    """Outside of it and inside, in training and in evaluation mode, of tensors, tuples, lists and dicts of arguments:
    the same bits. Modes, also of single modules, and random numbers stay as they were."""
    engine = engine_of(settings(holders=2), Net(momentum=None))
    train(engine, rank.rank, num_steps=2)
    state = dense_state(engine)
    kinds = (lambda x, y: x, lambda x, y: (x, y), lambda x, y: [x, y], lambda x, y: {"images": x, "classes": y})
    found = []
    for kind, (context, mode) in zip(kinds, itertools.product((nullcontext, engine.dense), (True, False)), strict=True):
        own = [kind(*batch) for batch in batches(rank.rank, NUM, seed=9)]
        entered: AbstractContextManager[None] = context()
        engine.train(mode)
        engine.module.layers[1].eval()
        modes, numbers = modes_of(engine.module), random_state()
        with entered:
            engine.module.norm.running_mean.fill_(1e3)
            engine.reestimate_batch_norm(drawing(own), num_batches=NUM)
        assert modes_of(engine.module) == modes
        drawn = random_numbers()
        restore_random_state(numbers)
        assert drawn == random_numbers()
        found.append(statistics_of(engine.module))
        assert_identical(found[-1], found[0])
    compare(engine, oracle(state, momentum=None))


def test_is_that_of_the_dense_model(rank: Rank) -> None:
    """In both regimes; vectors that are cut are written to each piece's holders. A mistake changes nothing, weights
    stay, and training goes on."""
    own = [images for images, _ in batches(rank.rank, NUM, seed=9)]
    blocks: list[dict[str, Any]] = [{"strategy": "neuron"}, {"regime": "backward"}]
    for block in blocks:
        engine = engine_of(settings(holders=2, check_agreement=True, **block), Net())
        train(engine, rank.rank, num_steps=2)
        state = dense_state(engine)
        call = partial(sdp_deepspeed.reestimate_batch_norm, engine, own)
        refusal(ValueError, partial(call, num_batches=NUM + 1), "num_batches: got 4, but found 3")
        assert_identical(dense_state(engine), state)
        assert call(num_batches=NUM) == 2 * NUM_LAYERS + 1
        expected = oracle(state)
        compare(engine, expected)
        after = dense_state(engine)
        assert_identical(*({n: v for n, v in each.items() if n not in expected} for each in (state, after)))
        train(engine, rank.rank, num_steps=1)


def modes_of(model: nn.Module) -> dict[str, Any]:
    return {name: (module.training, getattr(module, "momentum", "")) for name, module in model.named_modules()}


def drawing(own: list[Any]) -> Iterator[Any]:
    """These, of a user who draws random numbers."""
    for batch in own:
        torch.rand(1), np.random.rand(), random.random()
        yield batch


def random_numbers() -> list[float]:
    return [torch.rand(1).item(), float(np.random.rand()), random.random()]


def test_where_there_is_nothing_to_do(rank: Rank) -> None:
    """Asks nobody; other models are refused."""
    engine = engine_of(settings(holders=2), llama())
    with mock.patch("sdp_deepspeed.engine.dense_view.DenseView.make_resident", side_effect=AssertionError):
        assert engine.reestimate_batch_norm([], num_batches=1) == 0
    with pytest.raises(ValueError, match=r"got Net, expected the engine .*fully_shard"):
        sdp_deepspeed.reestimate_batch_norm(Net(), [], num_batches=1)


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------


def trained(rank: Rank, holders: int) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(Net(), {"holders": holders})
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)
    steps(model, optimizer, rank, 2)
    return model, optimizer


def steps(model: Any, optimizer: torch.optim.Optimizer, rank: Rank, num_steps: int) -> None:
    for images, classes in batches(rank.rank, num_steps):
        model(images, classes).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_under_fsdp2(rank: Rank) -> None:
    """The full state dict has means over holders; a checkpoint makes them so, and an evaluation, also with a layer that
    was wrapped afterwards. All this also where all ranks hold everything."""
    images = batches(7, 1)[0][0]
    for holders in (2, 3):
        model, optimizer = trained(rank, holders)
        before = gathered(statistics_of(model))
        state = full_state_dict(model)
        expected = assert_means(model, before)
        if rank.rank == 0:
            assert_identical({name: state[name] for name in expected}, expected)
        steps(model, optimizer, rank, 1)
        before = gathered(statistics_of(model))
        CheckpointManager(model, optimizer).save_checkpoint(rank.folder / str(holders))
        assert_means(model, before)
        steps(model, optimizer, rank, 1)
        model.layers[1] = checkpoint_wrapper(model.layers[1])
        for _ in range(2):
            before = gathered(statistics_of(model))
            model.eval()
            with torch.no_grad():
                found = [model(images) for _ in range(2)]
            expected = assert_means(model, before)
            plain = Net().eval()
            plain.load_state_dict(gathered_state(model))
            assert_identical(statistics_of(plain), expected)
            with torch.no_grad():
                assert all(torch.equal(logits, found[0]) for logits in found)
                torch.testing.assert_close(found[0], plain(images), rtol=1e-6, atol=1e-6)
            steps(model.train(), optimizer, rank, 1)


@pytest.mark.slow
def test_re_estimation_under_fsdp2(rank: Rank) -> None:
    """Inside and outside of the dense view, by both names; and what is wrong with it, on all ranks."""
    own = [images for images, _ in batches(rank.rank, NUM, seed=9)]
    for holders in (2, 3):
        model, optimizer = trained(rank, holders)
        state = gathered_state(model)
        assert reestimate_batch_norm(model, own, num_batches=NUM) == 9
        assert model.training
        first = statistics_of(model)
        model.norm.running_mean.fill_(1e3)
        assert sdp_deepspeed.reestimate_batch_norm(model, own, num_batches=NUM) == 9
        assert_identical(statistics_of(model), first)
        expected = oracle(state)
        for name, value in means(gathered(first)).items():
            similar(value, expected[name])
        words = ("num_batches: got 4, but found 3",)
        refusal(ValueError, lambda: reestimate_batch_norm(model, own, num_batches=4), *words)  # noqa: B023
        assert_identical(statistics_of(model), first)
        steps(model, optimizer, rank, 1)
