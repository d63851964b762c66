"""A rank is killed at each moment of a save: the other ends with an error, and a whole checkpoint is there."""

from __future__ import annotations

import itertools
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checkpointed_runs import settings_of
from tests.helpers.kills import kill_at
from tests.helpers.ranks import forkserver_context
from tests.helpers.training import assert_identical, dense_state, engine_of, train

pytestmark = pytest.mark.slow

SIZE = 2
PATIENCE = timedelta(seconds=120)  # of ranks that wait for one that does not come


def run_rank(rank: int, folder: Path, start: int, death: tuple[int, int] | None) -> None:
    """Resume from a state that was saved, train a step, and save.

    Args:
        start: number of this start of the run.
        death: rank that dies in the save, and at which change of a file.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    rendezvous = f"file://{folder}/rendezvous_{start}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=SIZE, timeout=PATIENCE)
    engine, checkpoints = engine_of(settings_of(2, strategy="neuron", checkpoint={"keep_last": 2})), folder / "saved"
    engine.load_checkpoint(str(checkpoints))
    step = engine.global_steps
    if step > 0:
        assert_identical(dense_state(engine), torch.load(folder / f"dense_{step}.pt"))
    train(engine, num_steps=1, first=step)
    dense = dense_state(engine)
    if rank == 0:
        torch.save(dense, folder / f"dense_{step + 1}.pt")
        (folder / f"loaded_{start}").write_text(str(step))
    dist.barrier()
    if death is not None and death[0] == rank:
        kill_at(death[1])
    engine.save_checkpoint(str(checkpoints))


def exit_codes(folder: Path, start: int, death: tuple[int, int] | None) -> list[int | None]:
    context = forkserver_context()
    ranks = [context.Process(target=run_rank, args=(rank, folder, start, death)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]


@pytest.mark.parametrize("killed", range(SIZE))
def test_a_rank_is_killed(killed: int, tmp_path: Path) -> None:
    starts = itertools.count()
    saved = [0]  # steps of which one must be loaded
    for number in itertools.count(1):
        start = next(starts)
        codes = exit_codes(tmp_path, start, (killed, number))
        loaded = int((tmp_path / f"loaded_{start}").read_text())
        assert loaded in saved
        if codes == [0] * SIZE:
            break
        assert codes[killed] == -signal.SIGKILL
        assert codes[1 - killed] == 1, "an error"
        saved = [loaded, loaded + 1]
    assert number > 2, "a save changes files"
    assert exit_codes(tmp_path, next(starts), None) == [0] * SIZE
