"""How high does memory rise while a worker starts: from before the model is built to after `deepspeed.initialize`?

    OMP_NUM_THREADS=1 python benchmarks/startup_memory.py --ranks 4 --output benchmarks/results/startup_4_ranks.json

    OMP_NUM_THREADS=1 python benchmarks/startup_memory.py --ranks 2 --models "134M's layers, 2048 tokens" \
        --precisions bf16 --contestants "SDP + ZeRO-1" --output benchmarks/results/given_back_2_ranks.json

Every contestant starts in fresh processes, so that their largest resident set is its own too (context: it holds the
interpreter and all libraries). The resident set around masking shows what goes back to the system. Gradients and
activations are not there yet; stock ZeRO-1 has its moments already, ours come with the first step. Collectives' copies
inside gloo are no tensors and do not count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.models import Shape
from benchmarks.common.provenance import write_result
from sdp_deepspeed.config import Mode

PRECISIONS = ("fp32", "bf16")
CONTESTANTS = ("ZeRO-1", "SDP + ZeRO-1", "SDP + ZeRO-1, built under Init")
BASELINE = CONTESTANTS[0]
BUCKET_ELEMENTS = 2_000_000
CONFIG = Path(__file__).parents[1] / "configs" / "models" / "134M.json"


@dataclass(frozen=True)
class Start:
    """What the processes of one start need to know."""

    contestant: str
    precision: str
    shape: Shape
    num_ranks: int
    coverage: float


def models() -> dict[str, Shape]:
    """The 134M configuration, and the same layers with a small vocabulary, so that less is shared."""
    shape = json.loads(CONFIG.read_text())
    return {"134M": shape, "134M's layers, 2048 tokens": shape | {"vocab_size": 2048}}


def figures_of_rank(start: Start) -> dict[str, Any]:
    """One rank's figures; all ranks call it. Its imports are not the parent's, which only waits."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import sdp_deepspeed
    from benchmarks.common.contestants import Contestant
    from benchmarks.common.measured_step import watched_host_memory
    from sdp_deepspeed.engine.held_bytes import resident_bytes

    mode = None if start.contestant == BASELINE else Mode("forward", "block")
    config = Contestant(1, mode, start.coverage).config(start.precision, bucket=BUCKET_ELEMENTS)
    deferred = start.contestant.endswith("Init")
    context: AbstractContextManager[Any] = sdp_deepspeed.Init() if deferred else nullcontext()
    before, began = resident_bytes(), time.perf_counter()
    masked: dict[str, int] = {}
    with watched_host_memory() as figures, watched_give_back(masked):
        torch.manual_seed(0)
        with context:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**start.shape), dtype=torch.float32)
        deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    seconds = time.perf_counter() - began
    return asdict(figures) | {"seconds": seconds, "process_before": before, "process_peak": resident_bytes()} | masked


@contextmanager
def watched_give_back(figures: dict[str, int]) -> Iterator[None]:
    """The process's resident set before and after free memory is given back, in `figures`; of ours only."""
    from sdp_deepspeed.engine import apply_plan

    give_back = apply_plan.give_back

    def watched(device: Any) -> None:
        figures["masked"] = resident_now()
        give_back(device)
        figures["given_back"] = figures["masked"] - resident_now()

    with mock.patch.object(apply_plan, "give_back", watched):
        yield


def resident_now() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rank_main(rank: int, folder: str, start: Start, queue: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(start.num_ranks)}
    # The question is how high host memory rises, so this one stays on the CPU.
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu"}
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=start.num_ranks)
    queue.put((rank, figures_of_rank(start)))
    dist.barrier()
    dist.destroy_process_group()


def measure(start: Start) -> list[dict[str, Any]]:
    """Start one contestant in fresh processes; the figures of each rank."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = range(start.num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=rank_main, args=(rank, folder, start, queue)) for rank in ranks]
        for process in processes:
            process.start()
        figures = dict(queue.get(timeout=600) for _ in processes)
        for process in processes:
            process.join()
    return [figures[rank] for rank in ranks]


def sizes(shape: Shape) -> dict[str, int]:
    """Parameters of the dense model, and how many of them every worker holds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    shared = sum(count for name, count in counts.items() if ".layers." not in name)
    return {"num_parameters": sum(counts.values()), "num_shared": shared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=str, required=True, help="where the raw figures go, as JSON")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--models", nargs="+", choices=list(models()), default=list(models()))
    arguments = parser.parse_args()
    results = []
    for model, precision, name in itertools.product(arguments.models, arguments.precisions, arguments.contestants):
        shape = models()[model]
        ranks = measure(Start(name, precision, shape, arguments.ranks, arguments.coverage))
        results.append({"model": model, "precision": precision, "name": name, "ranks": ranks} | sizes(shape))
        print(f"{model} {precision} {name}: {max(rank['peak'] for rank in ranks) / 2**20:.1f} MiB", flush=True)
    facts = {"num_ranks": arguments.ranks, "models": models(), "baseline": BASELINE, "arguments": vars(arguments)}
    write_result(arguments.output, {"what": "startup", **facts, "results": results})


if __name__ == "__main__":
    main()
