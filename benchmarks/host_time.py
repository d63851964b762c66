"""What does a step cost the host beside model and optimizer? Real shapes, without storage and without a network.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py --output benchmarks/results/host_time.json

One rank of a world that is not there packs, sends, adds up and writes back meta tensors in bf16 at stage 1, on nodes of
eight. Kernels and collectives are counted, not run: what is timed are the views, the lists and Python around them, in
seconds of this thread, so that nothing else on the machine matters. The optimizer's own step and the norm are left out.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.provenance import write_result
from benchmarks.common.ranks import option_parser
from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.distributed.communicator import Communicator, Done
from sdp_deepspeed.layout.nodes import Nodes
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors, named_tensors

RANKS_PER_NODE, RANK = 8, 3
SHARED_SIZES = {"num_attention_heads": 32, "vocab_size": 32000}
MODELS = {
    "1B": SHARED_SIZES
    | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
    "7B": SHARED_SIZES
    | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_key_value_heads": 32},
}
KERNELS = ("_foreach_copy_", "_foreach_add_", "_foreach_div_", "_foreach_zero_")


@dataclass(frozen=True)
class Case:
    """Forward regime, C = 1/2.

    Args:
        target: milliseconds of host time per step that were asked for.
    """

    model: str
    strategy: str
    num_ranks: int
    num_subnetworks: int
    target: float


CASES = (Case("1B", "block", 8, 8, 20), Case("7B", "block", 256, 8, 60), Case("7B", "neuron", 64, 64, 150))


class Nobody:
    """The functions of `torch.distributed` that a step calls, on a rank whose peers are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.num_calls = 0

    def get_rank(self, group: Any) -> int:
        return self._rank

    def get_world_size(self, group: Any) -> int:
        return self._size

    def all_to_all_single(self, *arguments: Any, **options: Any) -> Done:
        self.num_calls += 1
        return Done()

    all_reduce = all_to_all_single


@dataclass(frozen=True)
class Worker:
    """One rank of a case: its subnetwork, what steps it, and what it calls instead of its peers."""

    model: torch.nn.Module
    rank_model: RankModel
    optimizer: SubnetworkOptimizer
    nobody: Nobody
    planning_seconds: float

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


@contextmanager
def counted_kernels() -> Iterator[Counter[str]]:
    """Launches for many tensors at once, which do nothing here: meta tensors would be taken one by one, slowly."""
    found = Counter[str]()
    with ExitStack() as stack:
        for name in KERNELS:
            count = partial(found.update, [name])
            stack.enter_context(mock.patch.object(torch, name, lambda *_, count=count: count()))
        yield found


def build_worker(
    case: Case, shape: dict[str, Any], device: str, make_optimizer: Callable[..., Any], *, needs_norm: bool
) -> Worker:
    """Without the ranks that an engine would need.

    Args:
        shape: of a Llama.
        make_optimizer: from parameters to the one that steps.
    """
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)
    block = parse({KEY: {"coverage": 0.5, "strategy": case.strategy, "subnetworks": case.num_subnetworks}})
    assert block is not None
    start = time.thread_time()
    plan, _ = plan_model(model, block, case.num_ranks)
    planning = time.thread_time() - start
    tensors = tuple(replace(info, group=0) for info in dense_tensors(model))
    nodes = Nodes.of([rank // RANKS_PER_NODE for rank in range(case.num_ranks)])
    rank_model = RankModel(plan, tensors, PieceViews(named_tensors(model)), RANK, on_nodes=nodes)
    Mask(model, rank_model, locate_branches(model), scales=False).apply()
    nobody = Nobody(RANK, case.num_ranks)
    settings = OptimizerSettings(1, 0.0, torch.bfloat16, max_in_flight=1, needs_norm=needs_norm)
    inner = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    optimizer = SubnetworkOptimizer(inner, rank_model, Communicator(nobody), settings=settings)
    optimizer.install()
    return Worker(model, rank_model, optimizer, nobody, planning)


def nothing_steps(parameters: list[torch.nn.Parameter]) -> Any:
    """An optimizer that does nothing: its own time is left out."""
    inner = mock.create_autospec(torch.optim.SGD(parameters), instance=True)
    inner.param_groups, inner.state = [{"params": parameters}], {}
    return inner


def measure(case: Case, repeats: int) -> dict[str, Any]:
    worker = build_worker(case, MODELS[case.model], "meta", nothing_steps, needs_norm=False)
    optimizer, nobody, plan = worker.optimizer, worker.nobody, worker.rank_model.plan
    seconds = []
    for _ in range(1 + repeats):
        for parameter in worker.parameters:
            parameter.grad = torch.empty_like(parameter)
        nobody.num_calls = 0
        with counted_kernels() as kernels:
            start = time.thread_time()
            optimizer.step()
            seconds.append(time.thread_time() - start)
    buckets = optimizer.exchange.buckets
    return vars(case) | {
        "num_holder_sets": len(set(plan.holders)),
        "planning_seconds": worker.planning_seconds,
        "num_buckets": len(buckets),
        "most_segments": max(len(bucket.segments) for bucket in buckets),
        "num_fragments": sum(len(optimizer.exchange.held(bucket)) for bucket in buckets),
        "num_collectives": nobody.num_calls,
        "num_kernels": kernels,
        "first_seconds": seconds[0],
        "seconds": seconds[1:],
    }


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    results = [measure(case, arguments.repeats) for case in CASES]
    write_result(arguments.output, {"what": "host_time", "arguments": vars(arguments), "results": results})


if __name__ == "__main__":
    main()
