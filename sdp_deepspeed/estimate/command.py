"""`sdp estimate`: memory and traffic by formula per parameter, or of the run that a recipe describes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sdp_deepspeed.command_parser import Parser, positive
from sdp_deepspeed.messages import listed
from sdp_deepspeed.sizes import mib_text

if TYPE_CHECKING:
    from sdp_deepspeed.estimate.forecast import Forecast

_OF_FORMULAS = ("coverage", "regime", "dtype", "accumulate_in_fp32", "accumulation", "offload", "ranks_per_node")


def configure(parser: Parser) -> None:
    """Arguments of `sdp estimate`."""
    parser.description = (
        "Bytes of model state (weights, gradients, optimizer), and the least to send in a step, per parameter that\n"
        "belongs to a unit (is not shared): subnetworks beside plain data parallelism, at each ZeRO stage.\n"
        "Stock ZeRO sends more: it all-reduces gradients where a reduce-scatter would do. The table is Markdown.\n"
        "Buffers come on top: two buckets, four with overlap_comm, and as many again between nodes.\n\n"
        "With a recipe: memory, bytes sent and FLOPs of that run on each rank. Nothing is allocated and no GPU is\n"
        "needed: the subnetwork with most FLOPs runs on tensors without data. What kernels and the GPU need for\n"
        "themselves comes on top. With a schedule each phase in turn."
    )
    parser.epilog = "example: sdp estimate --ranks 8 configs/recipes/llama_134m.yaml"
    add = parser.add_argument
    add("recipe", type=Path, nargs="?", help="a run's YAML: model, data, training, and deepspeed or the block")
    add("--ranks", type=positive, default=8, help="data-parallel ranks, replicas of subnetworks included (8)")
    add = parser.add_argument_group("for the formulas, without a recipe").add_argument
    add("--ranks-per-node", type=positive, help="add what crosses between nodes (all ranks on one node)")
    add("--coverage", type=float, default=0.5, help="share of subnetworks that hold a unit (0.5)")
    add("--regime", choices=["forward", "backward"], default="forward", help="what a worker computes (forward)")
    add("--dtype", choices=["fp32", "bf16", "fp16"], default="bf16", help="of the weights (bf16)")
    add("--accumulate-in-fp32", action="store_true", help="data_types.grad_accum_dtype: fp32")
    add("--accumulation", type=positive, default=1, help="gradient_accumulation_steps (1)")
    add("--offload", action="store_true", help="zero_optimization.offload_optimizer: cpu")
    parser.set_defaults(run=_run, defaults={name: parser.get_default(name) for name in _OF_FORMULAS})


def _run(options: argparse.Namespace) -> int:
    if options.recipe is None:
        return _by_formula(options)
    if idle := [name for name in _OF_FORMULAS if getattr(options, name) != options.defaults[name]]:
        flags = listed(f"--{name.replace('_', '-')}" for name in idle)
        raise ValueError(f"{flags}: no effect with a recipe, which says it; leave it out")
    return _of_a_run(options)


def _by_formula(options: argparse.Namespace) -> int:
    from sdp_deepspeed.estimate.formulas import (
        between_nodes,
        between_nodes_table,
        bytes_per_parameter,
        sent_per_parameter,
        table,
    )
    from sdp_deepspeed.estimate.precision import Precision

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


def _of_a_run(options: argparse.Namespace) -> int:
    # Heavy imports only now: help and mistakes are answered at once.
    from sdp_deepspeed.estimate.forecast import forecast
    from sdp_deepspeed.estimate.recipe import read_run
    from sdp_deepspeed.estimate.settings import configs_of_phases

    run = read_run(options.recipe)
    phases = configs_of_phases(run.config)
    for index, phase in enumerate(phases, start=1):
        figures = forecast(
            run.shape,
            phase,
            num_ranks=options.ranks,
            sequence_length=run.sequence_length,
            gradient_checkpointing=run.gradient_checkpointing,
            host=run.host,
        )
        if len(phases) > 1:
            print(f"phase {index} of {len(phases)}:")
        print(_text(figures, options.ranks, "images" if run.sequence_length is None else "tokens"))
    return 0


def _text(figures: Forecast, num_ranks: int, items: str) -> str:
    rank = figures.rank
    if rank.gathered:
        exchanged = {"gathered at once, at most": rank.gathered}
    else:
        exchanged = {
            "the step's fp32 gradients": rank.step_gradients,
            "buffers of what travels, at most": rank.buffers,
        }
    num_bytes = {
        "weights": rank.weights,
        "gradients": rank.gradients,
        "optimizer state": rank.optimizer,
        **({"optimizer state in host memory": rank.host_optimizer} if rank.host_optimizer else {}),
        "activations of a micro-batch": figures.activations,
        **exchanged,
        "peak, at least": figures.peak,
        "sent per step": rank.sent_bytes,
    }
    rows = {name: mib_text(value) for name, value in num_bytes.items()} | {"FLOPs per step": f"{figures.flops:.4g}"}
    width = max(map(len, rows))
    lines = [
        f"{figures.num_parameters / 1e6:.1f}M parameters on {num_ranks} ranks, "
        f"{figures.tokens_per_step} {items} per step",
        "estimate for the worker that computes most:",
        *(f"  {name.ljust(width)}  {value}" for name, value in rows.items()),
        *(f"warning: {warning}" for warning in figures.warnings),
    ]
    return "\n".join(lines)
