"""Teams for a benchmark whose ranks a launcher has started as one world: each rank starts a process, which has the same
rank in the team of its node."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import deepspeed
import torch
import torch.distributed as dist

from benchmarks.common.device import backend, keep_freed_memory, take_device
from benchmarks.common.ranks import gather, num_nodes
from sdp_deepspeed.teams.join import LIGHTHOUSE, NUMBER

_PROCESSES = multiprocessing.get_context("forkserver")  # children have imported everything when they start


def run_in_teams(measure: Callable[..., Any], *arguments: Any, back_after: float | None = None) -> list[Any]:
    """Call a function in a team on each node, with a lighthouse on the first one. Every rank calls it.

    Args:
        measure: importable, called with the arguments.
        back_after: seconds after which a process that was killed starts again, once; None: it does not.

    Returns:
        What each rank's last process returned, on all ranks; None from those that were killed.
    """
    os.environ.setdefault("RUST_LOG", "warn")  # read when torchft is imported
    _PROCESSES.set_forkserver_preload(["benchmarks.common.contestants", "torchft.coordination"])
    with tempfile.TemporaryDirectory() as created:
        folder, address, lighthouse = Path(gather(created)[0]), "", None
        if dist.get_rank() == 0:
            from torchft.coordination import LighthouseServer

            lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=1, join_timeout_ms=60_000, quorum_tick_ms=100)
            address = f"http://{os.environ['MASTER_ADDR']}:{urlsplit(lighthouse.address()).port}"
        team, rank = divmod(dist.get_rank(), size := dist.get_world_size() // num_nodes())
        variables = {NUMBER: team, LIGHTHOUSE: gather(address)[0], "RANK": rank, "LOCAL_RANK": rank}
        variables |= {"WORLD_SIZE": size, "LOCAL_SIZE": size}
        result, code = _call(measure, arguments, variables, folder, "first")
        if code == -signal.SIGKILL and back_after is not None:
            time.sleep(back_after)
            result, code = _call(measure, arguments, variables, folder, "second")
        codes = gather(code)
        if lighthouse is not None:
            lighthouse.shutdown()
    if {*codes} - {0, -signal.SIGKILL}:
        raise RuntimeError(f"processes of teams ended with {codes}")
    return gather(result)


def _call(
    measure: Callable[..., Any], arguments: tuple[Any, ...], variables: dict[str, Any], folder: Path, start: str
) -> tuple[Any, int | None]:
    """Result and exit code of a process of this rank's team."""
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    rendezvous = folder / f"{start}{variables[NUMBER]}"
    process = _PROCESSES.Process(target=_run, args=(sender, rendezvous, variables, measure, arguments))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = None
    process.join()
    return result, process.exitcode


def _run(
    sender: Any, rendezvous: Path, variables: dict[str, Any], measure: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {name: str(value) for name, value in variables.items()}
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    take_device()
    keep_freed_memory()
    method = rendezvous.as_uri()
    dist.init_process_group(backend(), init_method=method, rank=variables["RANK"], world_size=variables["WORLD_SIZE"])
    deepspeed.init_distributed(backend(), verbose=False)
    sender.send(measure(*arguments))
    dist.destroy_process_group()
