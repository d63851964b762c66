"""A rank that fails or dies while `engine.replan` goes on: all end with its name, none waits for it, and the last
checkpoint is whole."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState
from sdp_deepspeed.distributed import last_acts, monitored_barrier
from sdp_deepspeed.engine import replan_calls
from sdp_deepspeed.replan.transfer import Transfer
from tests.helpers.ranks import Rank, run_ranks
from tests.helpers.replanned_runs import Phase, Sequence_, assert_same_run
from tests.helpers.training import assert_identical, dense_state, refusal
from tests.ranks.engine.test_out_of_step import QUICK

pytestmark = pytest.mark.slow

# Buckets so small that values travel in many rounds.
RUN = Sequence_(3, [Phase({}, 1)], "bf16", config={"zero_optimization": {"stage": 1, "reduce_bucket_size": 1024}})
NEW: dict[str, Any] = {"holders": 2, "strategy": "neuron"}
FAILING = 1  # the rank
ENDING_SECONDS = 3.0
NAMED = f"MemoryError: on purpose [on rank {FAILING}]"

Check = Callable[[Rank], None]


def raising(*_: Any, **__: Any) -> NoReturn:
    raise MemoryError("on purpose")


def dying(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process is dead")


def in_the_second_round(end: Callable[..., NoReturn]) -> Any:
    """In the place of a round of the transfer."""
    rounds, original = iter(range(10**6)), Transfer._round

    def go(self: Transfer, *messages: Any) -> None:
        end() if next(rounds) == 1 else original(self, *messages)

    return mock.patch.object(Transfer, "_round", go)


# Where the new state is allocated, once the module is taken apart, and where it is handed to the wrapped optimizer.
PLACES: dict[str, Callable[[Callable[..., NoReturn]], Any]] = {
    "weights": lambda end: mock.patch.object(replan_calls, "give_storage", end),
    "moments": lambda end: mock.patch.object(replan_calls, "make_targets", end),
    "arrived": lambda end: mock.patch.object(OptimizerState, "restore_in_place", end),
}


@contextmanager
def quick() -> Iterator[None]:
    """Ranks look often whether those for which they wait still come, and are not hasty on a busy machine."""
    acts: dict[str, Any] = QUICK | {"SETTLED_SECONDS": 60.0}
    barrier: dict[str, Any] = {"LOOK_SECONDS": 0.1, "_ENDING_SECONDS": ENDING_SECONDS}
    with mock.patch.multiple(last_acts, **acts), mock.patch.multiple(monitored_barrier, **barrier):
        yield


def on_one(rank: Rank, patch: Any) -> Any:
    return patch if rank.rank == FAILING else nullcontext()


def before_anything_changed(rank: Rank) -> None:
    """The run goes on as if nobody had asked."""
    engine, other = (RUN.engine(Phase({}), 1) for _ in range(2))
    for each in (engine, other):
        RUN.train(each, 1)
    for name in ("_choose", "_all_chunks"):
        with on_one(rank, mock.patch.object(engine, name, raising)):
            refusal(RuntimeError, lambda: engine.replan(NEW), NAMED)
    assert RUN.train(engine, 1) == RUN.train(other, 1)
    assert_same_run(engine, other)
    engine.replan(NEW)


def once_something_changed(rank: Rank) -> None:
    """Nobody uses what is left. What was saved before loads in another engine, and that one goes on."""
    engine = RUN.engine(Phase({}), 1)
    RUN.train(engine, 1)
    engine.save_checkpoint(str(rank.folder))
    saved = dense_state(engine)
    for patch in PLACES.values():
        engine = RUN.engine(Phase({}), 1)
        engine.load_checkpoint(str(rank.folder))
        with on_one(rank, patch(raising)):
            refusal(RuntimeError, lambda: engine.replan(NEW), NAMED)  # noqa: B023
        is_refused(engine)
    again = RUN.engine(Phase(NEW), 1)
    again.load_checkpoint(str(rank.folder))
    assert_identical(dense_state(again), saved)
    RUN.train(again, 1)


def is_refused(engine: Any) -> None:
    """By every call, at once: no rank waits for others."""

    def dense() -> None:
        with engine.dense():
            pass

    calls: list[Callable[[], Any]] = [
        lambda: RUN.train(engine, 1),
        lambda: engine(torch.zeros(1, 4, dtype=torch.long)),
        lambda: engine.module(torch.zeros(1, 4, dtype=torch.long)),
        lambda: engine.module.state_dict(),
        lambda: engine.backward(torch.zeros(())),
        engine.step,
        lambda: engine.replan({"holders": 1}),
        lambda: engine.save_checkpoint("never"),
        lambda: engine.load_checkpoint("never"),
        lambda: engine.load_pretrained("never"),
        lambda: engine.save_pretrained("never"),
        lambda: engine.save_16bit_model("never"),
        dense,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"ended half-way in an error.* last checkpoint"):
            call()


def while_values_travel(rank: Rank) -> None:
    """Others wait in a collective, which will not come about. Last: it never ends in their process group."""
    with quick():
        engine = RUN.engine(Phase({}), 1)
        RUN.train(engine, 1)
        with on_one(rank, in_the_second_round(raising)), pytest.raises((RuntimeError, MemoryError)) as caught:
            engine.replan(NEW)
        is_refused(engine)
    said = str(caught.value)
    words = [
        f"rank {rank.rank} waited (began to re-plan) for",
        "rank 1, which began to re-plan: MemoryError: on purpose",
    ]
    assert rank.rank == FAILING or all(word in said for word in words), said


def killed(place: str, folder: Path, rank: Rank) -> None:
    """Goes on from what an earlier start has left, saves, and is killed in a re-plan."""
    with quick():
        engine = RUN.engine(Phase({}), 1)
        path, _ = engine.load_checkpoint(str(folder / "checkpoints"))
        if path is not None:
            assert_identical(dense_state(engine), torch.load(folder / "dense.pt"))
        RUN.train(engine, 1)
        engine.save_checkpoint(str(folder / "checkpoints"))
        state = dense_state(engine)
        if rank.rank == 0:
            torch.save(state, folder / "dense.pt")
        patch = in_the_second_round(dying) if place == "round" else PLACES[place](dying)
        try:
            with on_one(rank, patch):
                engine.replan(NEW)
        except RuntimeError as error:
            is_refused(engine)
            (folder / f"{place}_{rank.rank}").write_text(str(error))
            raise


def test_a_killed_rank_is_named_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    # A survivor that has ended by then is named, too.
    places = {
        "round": r"^engine\.replan: rank (0, )?1(, 2)? ended during the re-plan",
        "weights": r"waited for rank 1, which",
    }
    outcomes = run_ranks(3, [(place, partial(killed, place, tmp_path)) for place in places])
    for place, how in places.items():
        assert f"rank {FAILING} died without a word: {-signal.SIGKILL}" in str(outcomes[place]), outcomes
        for survivor in (0, 2):
            said = (tmp_path / f"{place}_{survivor}").read_text()
            assert re.search(how, said), said
    assert len([path for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]) == len(places)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Check]]:
    for check in (before_anything_changed, once_something_changed, while_values_travel):
        yield check.__name__, check


@pytest.mark.checks(3, _cases)
def test_errors_of_one_rank(outcome: str | None) -> None:
    assert outcome is None, outcome
