"""Peak of live tensors while a worker starts: from before the model is built to after `deepspeed.initialize`.

    OMP_NUM_THREADS=1 python benchmarks/startup.py --ranks 4 --output benchmarks/results/startup_4_ranks.json

Every contestant starts in fresh processes, so that their largest resident set is its own too (context: it holds the
interpreter and all libraries). Gradients and activations are not there yet; stock ZeRO-1 has its moments already, ours
come with the first step. Collectives' copies inside gloo are no tensors and do not count.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

PRECISIONS = ("fp32", "bf16")
CONTESTANTS = ("ZeRO-1", "SDP + ZeRO-1", "SDP + ZeRO-1, built under Init")
BASELINE = CONTESTANTS[0]
BUCKET_ELEMENTS = 2_000_000
CONFIG = Path(__file__).parent.parent / "configs" / "models" / "134M.json"


def models() -> dict[str, dict[str, Any]]:
    """The 134M configuration, and the same layers with a small vocabulary, so that less is shared."""
    shape = json.loads(CONFIG.read_text())
    return {"134M": shape, "134M's layers, 2048 tokens": shape | {"vocab_size": 2048}}


def start(contestant: str, precision: str, shape: dict[str, Any], coverage: float) -> dict[str, Any]:
    """One rank's figures; all ranks call it."""
    import deepspeed
    import torch
    from common.contestants import Contestant
    from transformers import AutoConfig, AutoModelForCausalLM

    import sdp_deepspeed
    from sdp_deepspeed.measure.step import resident_bytes, watched_host_memory

    ours = Contestant(1) if contestant == BASELINE else Contestant(1, "forward", "block")
    config = ours.config(precision, bucket=BUCKET_ELEMENTS, coverage=coverage)
    context: AbstractContextManager[Any] = sdp_deepspeed.Init() if contestant.endswith("Init") else nullcontext()
    before, began = resident_bytes(), time.perf_counter()
    with watched_host_memory() as figures:
        torch.manual_seed(0)
        with context:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.float32)
        deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    seconds = time.perf_counter() - began
    return asdict(figures) | {"seconds": seconds, "process_before": before, "process_peak": resident_bytes()}


def rank_main(rank: int, folder: str, arguments: dict[str, Any], queue: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments["ranks"])}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=arguments["ranks"])
    contestant, precision, shape = arguments["contestant"]
    queue.put((rank, start(contestant, precision, shape, arguments["coverage"])))
    dist.barrier()
    dist.destroy_process_group()


def measure(contestant: tuple[str, str, dict[str, Any]], ranks: int, coverage: float) -> list[dict[str, Any]]:
    """Start one contestant in fresh processes; the figures of each rank."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = {"ranks": ranks, "contestant": contestant, "coverage": coverage}
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=rank_main, args=(r, folder, arguments, queue)) for r in range(ranks)]
        for process in processes:
            process.start()
        figures = dict(queue.get(timeout=600) for _ in processes)
        for process in processes:
            process.join()
    return [figures[rank] for rank in range(ranks)]


def sizes(shape: dict[str, Any]) -> dict[str, int]:
    """Parameters of the dense model, and how many of them every worker holds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    shared = sum(count for name, count in counts.items() if ".layers." not in name)
    return {"num_parameters": sum(counts.values()), "num_shared": shared}


def main() -> None:
    from common.provenance import write_result

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=str, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    arguments = parser.parse_args()
    results = []
    for (model, shape), precision in ((m, p) for m in models().items() for p in arguments.precisions):
        for name in CONTESTANTS:
            ranks = measure((name, precision, shape), arguments.ranks, arguments.coverage)
            results.append({"model": model, "precision": precision, "name": name, "ranks": ranks} | sizes(shape))
            print(f"{model} {precision} {name}: {max(rank['peak'] for rank in ranks) / 2**20:.1f} MiB", flush=True)
    facts = {"num_ranks": arguments.ranks, "models": models(), "baseline": BASELINE, "arguments": vars(arguments)}
    write_result(arguments.output, {"what": "startup", **facts, "results": results})


if __name__ == "__main__":
    main()
