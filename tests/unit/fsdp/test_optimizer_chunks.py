"""State of torch optimizers over shards, dealt otherwise and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from sdp_deepspeed.fsdp.local_chunks import LocalChunks
from sdp_deepspeed.fsdp.optimizer_chunks import ShardedOptimizerChunks
from sdp_deepspeed.fsdp.pieces import HeldTensor
from tests.helpers.held_tensors import Dense, assembled, chunks_of, cut, fill_from, parameters_of, whole

Make = Callable[[LocalChunks], torch.optim.Optimizer]
ROWS, OTHERS = (((0, 1), (4, 1), (7, 1)), (0, 1)), (((1, 3), (5, 2)), (1, 2))
LAYOUT = [whole("shared", 0, 1, 2), *cut("rows", 0, [ROWS, OTHERS]), *cut("columns", 1, [ROWS, OTHERS])]
OTHER = [whole("shared", 2), whole("rows", 0, 1), whole("columns", 0, 1, 2)]
SHAPES = {"shared": (5, 3), "rows": (8, 3), "columns": (3, 8)}


def dense(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def adam(chunks: LocalChunks) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters_of(chunks), lr=0.1, weight_decay=0.1)


class Run:
    """Ranks of one layout."""

    def __init__(
        self, layout: Sequence[HeldTensor], values: Dense, make: Make = adam, *, frozen: Sequence[str] = ()
    ) -> None:
        self.layout = layout
        self.chunks = [chunks_of(rank, layout, values, frozen) for rank in range(3)]
        self.optimizers = [make(chunks) for chunks in self.chunks]

    @property
    def states(self) -> list[ShardedOptimizerChunks]:
        pairs = zip(self.optimizers, self.chunks, strict=True)
        return [ShardedOptimizerChunks(optimizer, chunks) for optimizer, chunks in pairs]

    def step(self, seed: int) -> None:
        """With the same dense gradient whatever the layout."""
        gradient = dense(seed)
        for rank, (chunks, optimizer) in enumerate(zip(self.chunks, self.optimizers, strict=True)):
            own = chunks_of(rank, self.layout, gradient)
            for local, values in zip(chunks.local_tensors, own.local_tensors, strict=True):
                if local.tensor.requires_grad:
                    local.tensor.grad = values.tensor.detach()
            optimizer.step()

    def saved(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        counts = [state.counts() for state in self.states]
        (metadata, *others) = [state.metadata(counts) for state in self.states]
        assert all(repr(other) == repr(metadata) for other in others)
        return assembled([state.written(exclude_frozen=False) for state in self.states]), metadata

    def load(self, stored: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
        described = {
            key: TensorStorageMetadata(TensorProperties(dtype=values.dtype), values.shape, [])
            for key, values in stored.items()
        }
        for chunks, state in zip(self.chunks, self.states, strict=True):
            targets, of_optimizer = state.new_moments(described, metadata)
            fill_from(stored, targets)
            fill_from(stored, chunks.written_weights(exclude_frozen=False))
            state.restore(of_optimizer, metadata)


def assert_same(one: Dense, other: Dense) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


MAKERS: dict[str, Make] = {
    "adam": adam,
    "sgd": lambda chunks: torch.optim.SGD(parameters_of(chunks), lr=0.1, momentum=0.9),
    "plain_sgd": lambda chunks: torch.optim.SGD(parameters_of(chunks), lr=0.1),
    "amsgrad": lambda chunks: torch.optim.Adam(parameters_of(chunks), lr=0.1, amsgrad=True),
    "nadam": lambda chunks: torch.optim.NAdam(parameters_of(chunks), lr=0.1),
    "adagrad": lambda chunks: torch.optim.Adagrad(parameters_of(chunks), lr=0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_another_layout_goes_on_bit_for_bit(name: str) -> None:
    run, resumed = Run(LAYOUT, dense(0), MAKERS[name]), Run(OTHER, dense(1), MAKERS[name])
    for seed in (2, 3):
        run.step(seed)
    resumed.step(9)
    stored, metadata = run.saved()
    resumed.load(stored, metadata)
    again, metadata_again = resumed.saved()
    assert_same(again, stored)
    assert metadata_again == metadata
    for each in (run, resumed):
        each.step(4)
    assert_same(resumed.saved()[0], run.saved()[0])


def test_what_is_said_of_the_optimizer() -> None:
    run = Run(LAYOUT, dense(0))
    run.optimizers[1].param_groups[0]["foreach"] = False  # how a rank steps makes no group of its own
    run.step(1)
    stored, metadata = run.saved()
    kinds = {key.partition("/")[0] for key in stored}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq"}  # the weights are the masters
    assert metadata["kind"] == "Adam"
    assert metadata["counts"] == [{"step": 1.0}]
    assert metadata["groups"] == dict.fromkeys(SHAPES, 0)
    (options,) = metadata["options"]
    assert options["lr"] == 0.1
    assert "params" not in options


def two_groups(decay: float = 0.1, *, lr: float = 0.1) -> Make:
    """Rows without weight decay, and all else; as `param_groups` a group of its own for each tensor where `apart`."""

    def make(chunks: LocalChunks) -> torch.optim.Optimizer:
        groups: dict[float, list[Any]] = {decay: [], 0.0: []}
        for local in chunks.local_tensors:
            groups[0.0 if local.name == "rows" else decay].append(local.tensor)
        given: list[dict[str, Any]] = [{"params": own, "weight_decay": decay} for decay, own in groups.items()]
        return torch.optim.AdamW(given, lr=lr)

    return make


def divided(lr: float) -> Make:
    """As `two_groups`, with a group for each tensor."""

    def make(chunks: LocalChunks) -> torch.optim.Optimizer:
        given: list[Any] = [
            {"params": [local.tensor], "weight_decay": 0.0 if local.name == "rows" else 0.1}
            for local in chunks.local_tensors
        ]
        return torch.optim.AdamW(given, lr=lr)

    return make


def test_groups_that_are_divided_by_mesh_are_one_again() -> None:
    run, reference = Run(LAYOUT, dense(0), divided(0.1)), Run(LAYOUT, dense(0), two_groups())
    for each in (run, reference):
        each.step(1)
    stored, metadata = run.saved()
    expected, as_given = reference.saved()
    assert_same(stored, expected)
    assert metadata == as_given
    assert [options["weight_decay"] for options in metadata["options"]] == [0.1, 0.0]
    assert metadata["groups"] == {"shared": 0, "rows": 1, "columns": 0}


def test_options_are_those_of_the_checkpoint_by_name() -> None:
    """Whichever groups hold the names here; how a step is computed is this run's own."""
    run, resumed = Run(LAYOUT, dense(0), two_groups()), Run(OTHER, dense(0), divided(0.7))
    for each in (run, resumed):
        each.step(1)
    for group in (group for optimizer in resumed.optimizers for group in optimizer.param_groups):
        group |= {"weight_decay": 0.5, "foreach": False}
    resumed.load(*run.saved())
    for optimizer, chunks in zip(resumed.optimizers, resumed.chunks, strict=True):
        for group, local in zip(optimizer.param_groups, chunks.local_tensors, strict=True):
            expected = 0.0 if local.name == "rows" else 0.1
            assert (group["lr"], group["weight_decay"], group["foreach"]) == (0.1, expected, False)


def test_a_learning_rate_may_be_a_tensor() -> None:
    def make(chunks: LocalChunks) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters_of(chunks), lr=torch.tensor(0.25))

    run, resumed = Run(LAYOUT, dense(0), make), Run(OTHER, dense(0))
    run.step(1)
    stored, metadata = run.saved()
    (options,) = metadata["options"]
    assert float(options["lr"]) == 0.25
    resumed.load(stored, metadata)
    assert [float(optimizer.param_groups[0]["lr"]) for optimizer in resumed.optimizers] == [0.25] * 3


def test_options_stay_where_a_group_mixes_what_the_checkpoint_has_apart() -> None:
    run, resumed = Run(LAYOUT, dense(0), two_groups()), Run(LAYOUT, dense(0), lambda c: torch.optim.AdamW(
        parameters_of(c), lr=0.7, weight_decay=0.3
    ))  # fmt: skip
    run.step(1)
    resumed.load(*run.saved())
    assert [o.param_groups[0]["weight_decay"] for o in resumed.optimizers] == [0.3] * 3


def test_frozen_parameters_have_no_group_and_no_state() -> None:
    run = Run(LAYOUT, dense(0), frozen=["shared"])
    run.step(1)
    stored, metadata = run.saved()
    assert "shared" not in metadata["groups"]
    assert "exp_avg/shared" not in stored
    resumed = Run(OTHER, dense(1), frozen=["shared"])
    resumed.load(stored, metadata)
    assert_same(resumed.saved()[0], stored)


def test_before_the_first_step_there_is_nothing_but_weights() -> None:
    run, resumed = Run(LAYOUT, dense(0)), Run(OTHER, dense(1))
    resumed.step(1)
    stored, metadata = run.saved()
    assert stored.keys() == {f"weight/{name}" for name in SHAPES}
    resumed.load(stored, metadata)
    assert all(not any(optimizer.state.values()) for optimizer in resumed.optimizers)


def test_what_a_lacking_unit_has_left_may_be_in_the_optimizer() -> None:
    chunks = chunks_of(0, LAYOUT, dense(0))
    nothing = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    optimizer = torch.optim.AdamW([nothing, *parameters_of(chunks)])
    state = ShardedOptimizerChunks(optimizer, chunks)
    state.restore(state.new_moments({}, state.metadata([state.counts()]))[1], {})
    assert len(optimizer.param_groups[0]["params"]) == 1 + len(chunks.local_tensors)


def test_parameters_of_another_model_are_refused() -> None:
    other = chunks_of(0, LAYOUT, dense(0))
    with pytest.raises(
        ValueError, match=r"3 parameters that are not the sharded model's \(the first of shape \[2, 3\]"
    ):
        ShardedOptimizerChunks(adam(other), chunks_of(0, LAYOUT, dense(0)))


def test_parts_of_a_tensor_that_were_stepped_differently_are_refused() -> None:
    run = Run(LAYOUT, dense(0))
    run.step(1)
    run.optimizers[2].step()  # its part of `rows` is ahead
    counts = [state.counts() for state in run.states]
    with pytest.raises(ValueError, match=r"parts of 'shared' are stepped differently.*'step', 1.0.*'step', 2.0"):
        run.states[0].metadata(counts)


def test_other_options_on_another_rank_are_refused() -> None:
    run = Run(LAYOUT, dense(0))
    run.optimizers[1].param_groups[0]["lr"] = 0.3
    counts = [state.counts() for state in run.states]
    with pytest.raises(ValueError, match=r"'shared' are in param groups with other options .*\('lr', '0.1'\).*'0.3'"):
        run.states[0].metadata(counts)


def test_state_of_whole_tensors_is_refused_by_name() -> None:
    run = Run(LAYOUT, dense(0), lambda chunks: torch.optim.Adafactor(parameters_of(chunks)))
    run.step(1)
    with pytest.raises(ValueError, match=r"'Adafactor' keeps 'row_var' of shape \[2, 1\].* for 'shared'.*use an opt"):
        run.states[0].written(exclude_frozen=False)
    with pytest.raises(ValueError, match="'Adafactor' keeps 'row_var'"):
        run.states[0].check()
    stored, metadata = Run(LAYOUT, dense(0)).saved()
    loaded = {**stored, "row_var/rows": torch.zeros(8, 1)}
    with pytest.raises(ValueError, match=r"'row_var' of 'rows' in shape \[8, 1\], which is state of a whole tensor"):
        Run(OTHER, dense(0)).load(loaded, metadata)


def test_what_is_no_number_is_refused_by_name() -> None:
    run = Run(LAYOUT, dense(0))
    run.step(1)
    parameter = run.optimizers[0].param_groups[0]["params"][0]
    run.optimizers[0].state[parameter]["history"] = []
    with pytest.raises(ValueError, match=r"'AdamW' keeps what is neither a tensor nor a number \('history'\)"):
        run.states[0].counts()
    with pytest.raises(ValueError, match="neither a tensor nor a number"):
        run.states[0].check()
    run.states[1].check()


def test_another_optimizer_is_refused() -> None:
    run = Run(LAYOUT, dense(0))
    run.step(1)
    with pytest.raises(ValueError, match="is of Adam, and the optimizer here is SGD"):
        Run(OTHER, dense(0), MAKERS["sgd"]).load(*run.saved())
