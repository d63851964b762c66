"""`sdp estimate`: bytes of model state and of traffic per parameter."""

from __future__ import annotations

import argparse

from sdp_deepspeed.command_parser import Parser, positive
from sdp_deepspeed.estimate.formulas import (
    between_nodes,
    between_nodes_table,
    bytes_per_parameter,
    sent_per_parameter,
    table,
)
from sdp_deepspeed.estimate.precision import Precision


def configure(parser: Parser) -> None:
    """Arguments of `sdp estimate`."""
    parser.description = (
        "Bytes of model state (weights, gradients, optimizer), and the least to send in a step, per parameter that\n"
        "belongs to a unit (is not shared): subnetworks beside plain data parallelism, at each ZeRO stage.\n"
        "Stock ZeRO sends more: it all-reduces gradients where a reduce-scatter would do. The table is Markdown.\n"
        "Buffers come on top: two buckets, four with overlap_comm, and as many again between nodes."
    )
    add = parser.add_argument
    add("--ranks", type=positive, default=8, help="data-parallel ranks, replicas of subnetworks included (8)")
    add("--ranks-per-node", type=positive, help="add what crosses between nodes (all ranks on one node)")
    add("--coverage", type=float, default=0.5, help="share of subnetworks that hold a unit (0.5)")
    add("--regime", choices=["forward", "backward"], default="forward", help="what a worker computes (forward)")
    add("--dtype", choices=["fp32", "bf16", "fp16"], default="bf16", help="of the weights (bf16)")
    add("--accumulate-in-fp32", action="store_true", help="data_types.grad_accum_dtype: fp32")
    add("--accumulation", type=positive, default=1, help="gradient_accumulation_steps (1)")
    add("--offload", action="store_true", help="zero_optimization.offload_optimizer: cpu")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table; returns the exit code."""
    ranks, coverage, accumulation = options.ranks, options.coverage, options.accumulation
    if not 0 < coverage <= 1:
        raise ValueError(f"--coverage: got {coverage:g}, expected a number above 0 and at most 1")
    if coverage * ranks < 1:
        raise ValueError(
            f"--coverage: {coverage:g} of {ranks} ranks leaves units without a holder: needs 1/{ranks} or more"
        )
    precision = Precision.of(options.dtype, accumulate_in_fp32=options.accumulate_in_fp32)
    rows = bytes_per_parameter(ranks, coverage, precision, regime=options.regime, offload=options.offload)
    sent = sent_per_parameter(ranks, coverage, precision, regime=options.regime, accumulation=accumulation)
    print(f"{ranks} ranks, C = {coverage:g}, {options.regime} regime, {options.dtype}, {accumulation} micro-steps\n")
    print(table(rows, sent, offload=options.offload))
    if options.ranks_per_node is not None:
        crossing = between_nodes(ranks, coverage, options.ranks_per_node, precision, regime=options.regime)
        print(f"\n{between_nodes_table(crossing, -(-ranks // options.ranks_per_node))}")
    return 0
