"""A rank is killed in a synchronization: the others end with an error that names it."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from sdp_deepspeed.parallel import consistency
from tests.helpers.models import config
from tests.helpers.ports import free_port
from tests.helpers.ranks import forkserver_context
from tests.helpers.training import engine_of, train

pytestmark = pytest.mark.slow

PATIENCE = timedelta(seconds=60)  # of ranks that wait for one that does not come


def run_rank(rank: int, size: int, port: int, folder: Path, killed: int, moment: str) -> None:
    """Take two steps and synchronize, but for the killed rank; write the error.

    Args:
        moment: where the rank is killed.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    store = dist.TCPStore("localhost", port, size, is_master=rank == 0, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    consistency.PATIENCE = 1.0  # seconds, until they wait in a collective, where it fails
    engine = engine_of(config(holders=size, local_steps={"every": 2}))
    local = engine.optimizer.sharded.local
    if rank == killed:

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        where, method = {
            "before it": (engine._barrier, "wait"),
            "before the first collective": (local, "check_finite"),
            "before the first difference": (local, "_mean"),
        }[moment]
        setattr(where, method, die)
    try:
        train(engine, num_steps=2)
    except RuntimeError as error:
        (folder / f"error_{rank}").write_text(str(error))
        raise


@pytest.mark.parametrize(
    ("size", "killed", "moment"),
    [
        (3, 1, "before it"),
        (2, 1, "before the first collective"),
        (2, 0, "before the first difference"),
        (3, 2, "before the first difference"),
    ],
)
def test_a_rank_is_killed(size: int, killed: int, moment: str, tmp_path: Path) -> None:
    context, port = forkserver_context(), free_port()
    arguments = port, tmp_path, killed, moment
    ranks = [context.Process(target=run_rank, args=(rank, size, *arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [-signal.SIGKILL if r == killed else 1 for r in range(size)]
    for rank in set(range(size)) - {killed}:
        text = (tmp_path / f"error_{rank}").read_text()
        assert text.startswith("engine.step: "), text
        assert f"rank {killed}" in text, text
        assert killed == 0 or "communication failed" in text, text
