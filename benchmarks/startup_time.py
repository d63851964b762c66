"""How long does one of eight ranks take to make its share of a model's weights under `Init`, and to digest it?

    OMP_NUM_THREADS=1 python benchmarks/startup_time.py --layers 4 --output benchmarks/results/startup_time.json

Before and after alternate: all random numbers drawn one after the other, as PyTorch builds the dense model, against
what `deferred_init` does; SHA-256 of all bytes against `distributed/replicas.py`. Values are dropped as soon as they
are made: what is left is the time that the machine's processors work on them, which is what is compared, since other
programs shared the machine. Wall seconds are in the raw figures too.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.provenance import write_result
from benchmarks.common.ranks import option_parser
from sdp_deepspeed import Init
from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.deferred_init import fills
from sdp_deepspeed.deferred_init.materialize import DeferredModel
from sdp_deepspeed.deferred_init.materializer import Materializer
from sdp_deepspeed.distributed.replicas import digests
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors, named_tensors

RANKS, RANK = 8, 3
MODEL: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8192,
}
MODES = {
    "forward x block": {"regime": "forward", "strategy": "block"},
    "forward x neuron": {"regime": "forward", "strategy": "neuron"},
    "backward": {"regime": "backward", "strategy": "block"},
}
BEFORE = "all numbers drawn"
NEVER = 1 << 62


class AllAlike:
    """A world of ranks that say what this one says, each with `num_threads` cores of its own."""

    def __init__(self, num_threads: int) -> None:
        self.rank, self.size = RANK, RANKS
        self._num_threads = num_threads

    def gather_objects(self, value: Any) -> list[Any]:
        if not isinstance(value, tuple):
            return [value] * RANKS
        state, _ = value
        return [(state, range(rank * self._num_threads, (rank + 1) * self._num_threads)) for rank in range(RANKS)]


def seconds_of(work: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


class Start:
    """One rank's masked model without storage, in one mode."""

    def __init__(self, mode: str, num_layers: int) -> None:
        torch.manual_seed(0)
        with Init():
            model = LlamaForCausalLM(LlamaConfig(**MODEL, num_hidden_layers=num_layers))
        deferred = DeferredModel.of(model)
        assert deferred is not None
        self.deferred = deferred
        block = parse({KEY: {"coverage": 0.5, **MODES[mode]}})
        assert block is not None
        plan, _ = plan_model(model, block, RANKS)
        self.model = RankModel(plan, tuple(dense_tensors(model)), PieceViews(named_tensors(model)), RANK)
        self.mask = Mask(model, self.model, locate_branches(model))
        self.mask.apply()
        pieces = self.model.pieces_with_storing_ranks()
        sizes = [(piece, self.model.views.shapes[piece.parameter]) for piece, ranks in pieces if RANK in ranks]
        self.num_parameters = sum(math.prod(shape) for shape in self.model.views.shapes.values())
        self.num_elements = [piece.num_elements(shape) for piece, shape in sizes]

    def make(self, num_threads: int, *, draws_all: bool = False) -> dict[str, float]:
        """Fill what the rank has; its values go nowhere."""
        nowhere = mock.patch.multiple(Materializer, store=_drop, finish=_drop)
        before = mock.patch.object(fills, "MIN_JUMP", NEVER) if draws_all else nullcontext()
        world: Any = AllAlike(num_threads)
        with nowhere, before:
            return seconds_of(lambda: self.deferred.materialize(self.mask, torch.device("cpu"), world))

    def digest(self, take: Callable[[Iterable[torch.Tensor]], object], values: torch.Tensor) -> dict[str, float]:
        """Of tensors as large as the rank's pieces, in bf16; all have the same memory."""
        return seconds_of(lambda: take(values[:count] for count in self.num_elements))


def _drop(*_: object) -> None:
    """No mock, which would keep what it was given."""


def sha256(tensors: Iterable[torch.Tensor]) -> list[str]:
    return [hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest() for tensor in tensors]


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    starts = {mode: Start(mode, arguments.layers) for mode in MODES}
    largest = max(count for start in starts.values() for count in start.num_elements)
    values = torch.randn(largest).to(torch.bfloat16)
    results: list[dict[str, Any]] = [
        {"mode": mode, "num_elements": sum(start.num_elements), "num_pieces": len(start.num_elements)}
        | {"make": {str(count): [] for count in arguments.threads}, "sha256": [], "digest": []}
        for mode, start in starts.items()
    ]
    before = []
    for repeat in range(arguments.repeats):
        before.append(starts["backward"].make(1, draws_all=True))  # the same in each mode
        for row, start in zip(results, starts.values(), strict=True):
            for count in arguments.threads:
                row["make"][str(count)].append(start.make(count))
            row["sha256"].append(start.digest(sha256, values))
            row["digest"].append(start.digest(digests, values))
        print(f"repeat {repeat}: before {before[-1]}, after {[row['make'] for row in results]}", flush=True)
    size = starts["backward"].num_parameters
    facts = {"model": MODEL, "num_parameters": size, "num_ranks": RANKS, "before": before, "arguments": vars(arguments)}
    write_result(arguments.output, {"what": "startup_time", **facts, "results": results})


if __name__ == "__main__":
    main()
