"""Fills in stretches, by threads, or passed over: the bits and the random stream are those of plain fills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.common.measured_step import watched_host_memory
from sdp_deepspeed.deferred_init import fills
from sdp_deepspeed.deferred_init.materialize import default_dtype
from sdp_deepspeed.deferred_init.operation import Ref
from sdp_deepspeed.plan.tensors import named_tensors
from tests.helpers.deferred_models import BUILDERS, small_fills, unbuilt, values_of
from tests.helpers.models import FAMILIES, family

MODELS: dict[str, Callable[[], nn.Module]] = {
    **BUILDERS,
    **{f"family {name}": partial(family, name, seed=5) for name in FAMILIES},
}
LARGE = fills.MIN_JUMP + 16
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def one_weight(size: tuple[int, ...], *inits: Callable[[torch.Tensor], object], dtype: torch.dtype) -> nn.Module:
    weights = nn.ParameterList([nn.Parameter(torch.empty(size, dtype=dtype)), nn.Parameter(torch.empty(3))])
    for init in inits:
        init(weights[0])
    nn.init.normal_(weights[1])
    return weights


def for_real(build: Callable[[], nn.Module]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(3)
    return {name: tensor.detach() for name, tensor in named_tensors(build()).items()}, torch.get_rng_state()


@pytest.fixture
def filled() -> Iterator[mock.Mock]:
    """Each fill of a stretch, as called."""
    with mock.patch.object(fills.Fills, "_fill", autospec=True, side_effect=fills.Fills._fill) as spy:
        yield spy


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_bits_and_random_stream(name: str, num_threads: int) -> None:
    expected, state = for_real(MODELS[name])
    with small_fills():
        found = values_of(*unbuilt(MODELS[name], seed=3), num_threads=num_threads)
        assert torch.equal(torch.get_rng_state(), state)
        _, program = unbuilt(MODELS[name], seed=3)
        torch.set_rng_state(program.rng_state)
        assert list(program.run([])) == []
        assert torch.equal(torch.get_rng_state(), state), "what nobody wants is passed over"
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("init", [nn.init.normal_, partial(nn.init.uniform_, a=-0.1, b=0.3), nn.init.kaiming_uniform_])
@pytest.mark.slow
def test_a_large_tensor(init: Callable[[torch.Tensor], object], dtype: torch.dtype, filled: mock.Mock) -> None:
    """As large as it must be to be divided; three stretches."""
    build = partial(one_weight, (LARGE // 16, 16), init, dtype=dtype)
    expected, state = for_real(build)
    with mock.patch.object(fills, "MAX_STRETCH", LARGE // 48 * 16):
        found = values_of(*unbuilt(build, seed=3), num_threads=2)
    assert filled.call_count == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("size", [(LARGE // 16, 16), (16, LARGE // 16)])
def test_what_is_replaced_is_passed_over(size: tuple[int, int], filled: mock.Mock) -> None:
    """The constructor's own numbers, before those of the model; and all of a tensor that is not wanted."""
    build = partial(one_weight, size, nn.init.kaiming_uniform_, nn.init.normal_, dtype=torch.float32)
    expected, state = for_real(build)
    model, program = unbuilt(build, seed=3)
    torch.set_rng_state(program.rng_state)
    vector = Ref.of(named_tensors(model)["1"])
    with watched_host_memory() as memory:
        ((_, storage),) = program.run([vector.storage])
    assert memory.peak < 10**6, "nothing of its size was made"
    assert not filled.called
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(vector.view(storage), expected["1"])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_only_the_rows_that_are_wanted(num_threads: int, filled: mock.Mock) -> None:
    build = partial(one_weight, (40, 24), nn.init.normal_, dtype=torch.float32)
    expected, state = for_real(build)
    model, program = unbuilt(build, seed=3)
    ref = Ref.of(named_tensors(model)["0"])
    torch.set_rng_state(program.rng_state)
    rows = [(3, 5), (7, 8), (20, 31)]
    with small_fills():
        parts = {ref: [(24 * start, 24 * stop) for start, stop in rows]}
        storages = dict(program.run([ref.storage], parts=parts, num_threads=num_threads))
    assert torch.equal(torch.get_rng_state(), state)
    for start, stop in rows:
        assert torch.equal(ref.view(storages[ref.storage])[start:stop], expected["0"][start:stop])
    stretches = [call.args[2].numel() for call in filled.call_args_list]
    assert stretches == [64, 32, 272]  # whole blocks of 16 elements


def test_rows_that_something_reads_are_made_whole(filled: mock.Mock) -> None:
    def build() -> nn.Module:
        weights = one_weight((40, 24), nn.init.normal_, dtype=torch.float32)
        with torch.no_grad():
            weights.get_parameter("1").add_(weights.get_parameter("0").sum())
        return weights

    expected, _ = for_real(build)
    model, program = unbuilt(build, seed=3)
    first, second = (Ref.of(tensor) for tensor in named_tensors(model).values())
    torch.set_rng_state(program.rng_state)
    with small_fills():
        storages = dict(program.run([first.storage, second.storage], parts={first: [(0, 24)]}))
    assert torch.equal(second.view(storages[second.storage]), expected["1"])


def test_a_pytorch_that_draws_otherwise(filled: mock.Mock) -> None:
    """Another generator, or another way to fill: all is drawn, as if nothing could be computed."""
    build = partial(one_weight, (40, 24), nn.init.uniform_, nn.init.normal_, dtype=torch.float32)
    expected, state = for_real(build)
    fills._is_as_expected.cache_clear()
    with small_fills(), mock.patch.object(fills, "advance", side_effect=lambda state, count: state):
        found = values_of(*unbuilt(build, seed=3), num_threads=3)
    fills._is_as_expected.cache_clear()
    assert not filled.called
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found["0"], expected["0"])


def test_default_device_and_dtype_of_the_user() -> None:
    """Set after the model was built, and other ones."""
    build = partial(one_weight, (40, 24), nn.init.uniform_, nn.init.normal_, dtype=torch.float32)
    expected, state = for_real(build)
    model, program = unbuilt(build, seed=3)
    fills._is_as_expected.cache_clear()
    with default_dtype(torch.float64), small_fills(), torch.device("meta"):
        found = values_of(model, program, num_threads=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found["0"], expected["0"])


def test_an_error_in_a_thread_is_raised() -> None:
    def fail(values: torch.Tensor, generator: torch.Generator) -> None:
        raise MemoryError("no room")

    model, program = unbuilt(partial(one_weight, (40, 24), nn.init.normal_, dtype=torch.float32), seed=3)
    program.operations[0] = replace(program.operations[0], call=fail, args=program.operations[0].args[:1])
    fails = mock.patch.object(
        fills, "num_numbers", side_effect=lambda operation: 960 if operation.call is fail else None
    )
    with small_fills(), fails, pytest.raises(MemoryError, match="no room"):
        list(program.run([Ref.of(p).storage for p in model.parameters()], num_threads=2))


def test_few_stretches_are_in_the_making() -> None:
    """What threads fill at once is bounded, however many tensors there are."""
    model, program = unbuilt(lambda: nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(40)]), seed=0)
    wanted, size = [Ref.of(p).storage for p in model.parameters()], 64 * 64 * 4
    with small_fills(), mock.patch.object(fills, "MAX_STRETCH", 64 * 64):
        list(program.run(wanted))  # tries what PyTorch does
        with watched_host_memory() as memory:
            for _, data in program.run(wanted, num_threads=2):
                del data
    assert memory.peak <= 8 * size
