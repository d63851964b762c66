"""How long does a step take on other networks? Predicted from latency and bandwidth, and checked where it was measured.

    python benchmarks/predict_links.py --output benchmarks/results/predicted_links.json

The model: a collective takes alpha seconds, and the bytes that a link must carry over beta bytes per second. A step
takes its operations over a rate of them and the collectives, one after the other; or, where all of that overlaps, the
longer of the two. What the exchange sends is counted from plans of the package and its routes, inside nodes and between
them. The others are rings: DDP all-reduces gradients (twice a reduce-scatter's bytes); stock ZeRO-1 and ZeRO-2 gather
weights on top; ZeRO-3 and FSDP2 scatter gradients and gather weights twice. A node's link to others carries what one
rank of a ring sends.

There are two checks against what step_time.py measured. With one rank on each of two nodes: a step without a slow link,
its calls and bytes as counted, and alpha and beta of each collective from link_rates.py, give the step over a slow
link. With four ranks on each: the bytes between nodes, as counted from plans and rings here, beside the link's own
counter, and what a slower link adds to a step for them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.links import Link, lines_of, rate
from benchmarks.common.models import LLAMAS
from benchmarks.common.provenance import write_result
from benchmarks.common.traffic import Traffic, exchanged, rings
from sdp_deepspeed.config import KEY
from sdp_deepspeed.estimate.precision import Precision

ROOT = Path(__file__).parents[1]
RANKS_PER_NODE, SUBNETWORKS = 8, 8
PRECISION = Precision.of("bf16")
INSIDE = Link(20e-6, 450e9)  # of a GPU: NVLink's 900 GB/s are both directions
BETWEEN: dict[str, Link | None] = {  # of a node; with 900 GB/s all GPUs are in one domain of NVLink, which is one node
    "900 GB/s": None,
    "400 GB/s": Link(40e-6, 400e9),
    "25 GB/s": Link(40e-6, 25e9),
    "1 Gb/s": Link(300e-6, 0.125e9),
}
NUM_GPUS, COVERAGES = (8, 64, 512), (1.0, 0.5, 0.25)
TOKENS, LENGTH, FLOPS_PER_SECOND = 8 * 2048, 2048, 400e12  # of a GPU and step; two fifths of an H100's peak in bf16
# Operators of c10d, as step_time.py counts them, and the line of link_rates.py for each.
LINES = {
    "send": "all_to_all, receives first, a rank late",
    "allreduce_": "all_reduce, a rank late",
    "allgather_": "all_gather, a rank late",
    "_allgather_base_": "all_gather, a rank late",
    "broadcast_": "one way, a rank late",
}


@cache
def _exchanged(model: torch.nn.Module, num_gpus: int, coverage: float, ranks_per_node: int) -> Traffic:
    """Several networks ask for each."""
    block = {"coverage": coverage, "subnetworks": min(SUBNETWORKS, num_gpus)}
    return exchanged(model, block, num_gpus, ranks_per_node=ranks_per_node, precision=PRECISION)


def compute_seconds(shape: Mapping[str, Any], num_parameters: int, coverage: float) -> float:
    """Of a step without communication: 6 operations a token and weight, and attention; the head is everybody's."""
    head = shape["vocab_size"] * shape["hidden_size"]
    body = num_parameters - 2 * head  # without embeddings, which are looked up
    scores = 3.5 * 4 * LENGTH * shape["hidden_size"] * shape["num_hidden_layers"]  # forward, and backward 2.5 times
    return TOKENS * (coverage * (6 * body + scores) + 6 * head) / FLOPS_PER_SECOND


def seconds_on_levels(traffic: Traffic, between: Link | None) -> tuple[float, float]:
    """Inside nodes and between them."""
    return (
        INSIDE.seconds(traffic.inside, traffic.num_inside),
        between.seconds(traffic.between, traffic.num_between) if between else 0.0,
    )


def predicted(shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All networks and numbers of GPUs. Eight GPUs that a slower link joins are each a node of their own. In a ring all
    links are used at the same time, and the slowest decides; the exchange uses one level after the other."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    dense = compute_seconds(shape, num_parameters, 1.0)
    rows = []
    for num_gpus in NUM_GPUS:
        several = RANKS_PER_NODE if num_gpus > RANKS_PER_NODE else 1
        others = rings(num_parameters, num_gpus, num_layers=shape["num_hidden_layers"], precision=PRECISION)
        for name, between in BETWEEN.items():
            systems = {
                system: _figures(dense, max(seconds_on_levels(traffic, between)), traffic)
                for system, traffic in others.items()
            }
            for coverage in COVERAGES:
                traffic = _exchanged(model, num_gpus, coverage, several if between else num_gpus)
                compute = compute_seconds(shape, num_parameters, coverage)
                systems[f"sdp C={coverage:g}"] = _figures(compute, sum(seconds_on_levels(traffic, between)), traffic)
            rows.append({"gpus": num_gpus, "between": name, "systems": systems})
    return rows


def _figures(compute: float, link: float, traffic: Traffic) -> dict[str, float]:
    return {"compute": compute, "link": link, **asdict(traffic)}


def checked(measured: Mapping[str, Any], rates: Mapping[str, Any], fast: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of a step by contestant, predicted and measured (median).

    Args:
        measured: of step_time.py over the slow link.
        rates: of link_rates.py over the same.
        fast: of step_time.py without a slow link.
    """
    links = lines_of(rates["seconds"])
    found = {}
    for name, seconds in fast["seconds"].items():
        if name in measured["seconds"]:
            ways = measured["work"][name][0]["by_operator"]
            on_link = sum(links[LINES[way]].seconds(sent, calls) for way, (calls, sent) in ways.items() if way in LINES)
            found[name] = {
                "predicted": median(seconds) + on_link,
                "measured": median(measured["seconds"][name]),
                "without link": median(seconds),
            }
    return {"link": measured["link"], "steps": found}


def checked_between_nodes(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> dict[str, Any]:
    """Several ranks on each of two nodes: bytes that cross between these, and by how much a step is longer over the
    slower link (medians), predicted from these bytes alone and measured.

    Args:
        fast, slow: of step_time.py over two rates.
    """
    shape = {key: value for key, value in fast["model"].items() if key != "num_parameters"}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    layers, precision = shape["num_hidden_layers"], Precision.of("fp32")
    rings_of = rings(num_parameters, fast["ranks"], num_layers=layers, precision=precision)["ZeRO-1, ZeRO-2"]
    slower = 1 / rate(slow["link"]) - 1 / rate(fast["link"])
    found = {}
    for name, config in fast["configs"].items():
        traffic = rings_of
        if KEY in config:
            traffic = exchanged(
                model, config[KEY], fast["ranks"], ranks_per_node=fast["ranks_per_node"], precision=precision
            )
        longer = median(slow["seconds"][name]) - median(fast["seconds"][name])
        measured = {"bytes": fast["link_bytes"][name][0], "longer": longer}
        found[name] = {
            "predicted": {"bytes": traffic.between, "longer": traffic.between * slower},
            "measured": measured,
        }
    return {"links": [fast["link"], slow["link"]], "steps": found}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", required=True, help="where the raw figures go, as JSON")
    parser.add_argument("--model", choices=list(LLAMAS), default="1B", help="a Llama")
    parser.add_argument("--measured", nargs="*", default=["1_gbit", "100_mbit"], help="links, as results are named")
    options = parser.parse_args(arguments)
    results = ROOT / "benchmarks/results"

    def read(name: str) -> Any:
        return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))

    shape = LLAMAS[options.model]
    checks = [
        checked(read(f"step_{link}"), read(f"link_rates_{link}"), read("step_fast_link")) for link in options.measured
    ]
    facts = {
        "tokens": TOKENS,
        "length": LENGTH,
        "flops_per_second": FLOPS_PER_SECOND,
        "subnetworks": SUBNETWORKS,
        "ranks_per_node": RANKS_PER_NODE,
        "inside": asdict(INSIDE),
        "between": {name: link and asdict(link) for name, link in BETWEEN.items()},
    }
    rows = predicted(shape)
    result = {"what": "predicted_links", "model": shape, "facts": facts, "predicted": rows, "checks": checks}
    result["between_nodes"] = checked_between_nodes(read("between_nodes"), read("between_nodes_250_mbit"))
    write_result(options.output, {**result, "arguments": {"model": options.model, "measured": options.measured}})


if __name__ == "__main__":
    main()
