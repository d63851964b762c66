"""The tables of benchmarks/README.md, and of the README above it: which raw figures each is made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.tables.balance import balance
from benchmarks.tables.counts import collectives, faults, model_state, peak_shares
from benchmarks.tables.hosts import hosts_memory, hosts_time
from benchmarks.tables.learning import few_data, learning, rates
from benchmarks.tables.links import (
    link_rates,
    one_way,
    predicted_beside_measured,
    predicted_between_nodes,
    predicted_links,
)
from benchmarks.tables.markdown import Result
from benchmarks.tables.replans import replan_time
from benchmarks.tables.startup import given_back, startup_side_by_side, startup_time
from benchmarks.tables.summary import summary
from benchmarks.tables.systems import growth, memory_and_bytes, scaling, times
from benchmarks.tables.time_to_loss import time_to_loss
from benchmarks.tables.times import between_nodes, checkpoint_time, host_time, overlap, step_ratios
from benchmarks.tables.vision import vision

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Block:
    """What stands between `<!-- name -->` and `<!-- /name -->`: a table of some of the files in RESULTS."""

    make: Callable[..., str]
    files: tuple[str, ...]

    def text(self) -> str:
        return self.make(*(read(RESULTS / f"{name}.json") for name in self.files))


SIX_MILLION, WIDE = ("corners_2_ranks", "corners_4_ranks"), ("corners_wide_2_ranks", "corners_wide_4_ranks")
BLOCKS = {
    "summary": Block(summary, ("peak_4_ranks", "peak_4_ranks_coverage_1", "corners_4_ranks", "zero2_4_ranks")),
    "model-state": Block(model_state, ("model_state_4_ranks",)),
    "peaks": Block(peak_shares, ("peak_2_ranks", "peak_4_ranks")),
    "start-up": Block(startup_side_by_side, ("startup_4_ranks", "startup_2_ranks")),
    "given-back": Block(given_back, ("given_back_2_ranks",)),
    "start-time": Block(startup_time, ("startup_time",)),
    "step-time-zero-1": Block(step_ratios, SIX_MILLION + WIDE),
    "step-time-batch-4": Block(step_ratios, ("corners_2_ranks_batch_4", "corners_4_ranks_batch_4")),
    "step-time-zero-2": Block(
        step_ratios,
        ("zero2_2_ranks", "zero2_4_ranks", "zero2_2_ranks_accumulation_4", "zero2_4_ranks_accumulation_4"),
    ),
    "systems-memory": Block(memory_and_bytes, ("systems_4_ranks",)),
    "systems-time": Block(times, ("systems_4_ranks",)),
    "hosts-memory": Block(hosts_memory, ("hosts_2_ranks", "hosts_4_ranks", "hosts_4_ranks_bf16")),
    "hosts-time": Block(hosts_time, ("hosts_2_ranks", "hosts_4_ranks", "hosts_1_gbit_2_ranks", "hosts_1_gbit_4_ranks")),
    "scaling": Block(scaling, tuple(f"scaling_{number}_ranks" for number in (1, 2, 4, 8))),
    "overlap": Block(overlap, ("overlap_2_ranks", "overlap_4_ranks", "overlap_1_gbit")),
    "one-way": Block(one_way, ("one_way_as_it_was", "one_way_no_restarts", "one_way_one_bucket", "step_1_gbit")),
    "link-rates": Block(link_rates, ("link_rates_1_gbit", "link_rates_100_mbit")),
    "predicted-check": Block(
        predicted_beside_measured, ("predicted_links", "step_fast_link", "step_1_gbit", "step_100_mbit")
    ),
    "predicted-between-nodes": Block(predicted_between_nodes, ("predicted_links",)),
    "predicted-links": Block(predicted_links, ("predicted_links",)),
    "time-to-loss": Block(time_to_loss, ("time_to_loss_1_gbit", "time_to_loss_100_mbit")),
    "between-nodes": Block(between_nodes, ("between_nodes", "between_nodes_250_mbit")),
    "host-time": Block(host_time, ("host_time",)),
    "growth": Block(growth, ("growth_8_ranks", "growth_64_ranks", "growth_512_ranks")),
    "collectives": Block(collectives, ("collectives_2_ranks",)),
    "checkpoints": Block(checkpoint_time, ("checkpoints_4_ranks",)),
    "replans": Block(replan_time, ("replan_4_ranks",)),
    "kills": Block(faults, ("faults", "faults_4_ranks")),
    "balance": Block(balance, ("balance",)),
    "vision": Block(vision, ("vision_4_ranks",)),
    "learning": Block(learning, ("learning",)),
    "learning-headers": Block(partial(learning, study="headers"), ("learning",)),
    "learning-few-data": Block(few_data, ("learning",)),
    "learning-rates": Block(rates, ("learning",)),
}


def read(path: Path) -> Result:
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def filled(document: str) -> str:
    """`document` with each block whose markers it has as the raw figures make it now."""
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, found, rest = document.partition(begin)
        if found:
            document = before + begin + block.text() + "\n" + end + rest.partition(end)[2]
    return document
