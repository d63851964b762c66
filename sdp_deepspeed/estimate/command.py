"""`sdp estimate`: memory and traffic by formula per parameter, or of one model and config, before anything runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sdp_deepspeed.command_parser import Parser, positive, read_json
from sdp_deepspeed.messages import listed
from sdp_deepspeed.sizes import mib_text

if TYPE_CHECKING:
    from sdp_deepspeed.estimate.forecast import Forecast

_FORMULAS_ONLY = ("coverage", "regime", "accumulate_in_fp32", "offload", "ranks_per_node")
_BOTH = "--model and --deepspeed_config: give both, or neither for the formulas"


def configure(parser: Parser) -> None:
    """Arguments of `sdp estimate`."""
    parser.description = (
        "Bytes of model state (weights, gradients, optimizer), and the least to send in a step, per parameter that\n"
        "belongs to a unit (is not shared): subnetworks beside plain data parallelism, at each ZeRO stage.\n"
        "Stock ZeRO sends more: it all-reduces gradients where a reduce-scatter would do. The table is Markdown.\n"
        "Buffers come on top: two buckets, four with overlap_comm, and as many again between nodes.\n\n"
        "With --model and --deepspeed_config: memory, bytes sent and FLOPs of that run on each rank. Nothing is\n"
        "allocated and no GPU is needed: the subnetwork with most FLOPs runs on tensors without data. What kernels\n"
        "and the GPU need for themselves comes on top. With a schedule each phase in turn."
    )
    parser.epilog = (
        "example: sdp estimate --ranks 8 --model model.json --deepspeed_config ds.json --sequence-length 1024"
    )
    add = parser.add_argument
    add("--ranks", type=positive, default=8, help="data-parallel ranks, replicas of subnetworks included (8)")
    add("--ranks-per-node", type=positive, help="add what crosses between nodes (all ranks on one node)")
    add("--coverage", type=float, default=0.5, help="share of subnetworks that hold a unit (0.5)")
    add("--regime", choices=["forward", "backward"], default="forward", help="what a worker computes (forward)")
    add("--dtype", choices=["fp32", "bf16", "fp16"], default="bf16", help='of the weights (bf16), or where "auto"')
    add("--accumulate-in-fp32", action="store_true", help="data_types.grad_accum_dtype: fp32")
    add("--accumulation", type=positive, default=1, help='gradient_accumulation_steps (1), or where "auto"')
    add("--offload", action="store_true", help="zero_optimization.offload_optimizer: cpu")
    add = parser.add_argument_group("for one model and config").add_argument
    add("--model", type=Path, help="JSON: a Transformers config with model_type")
    add("--deepspeed_config", type=Path, help="JSON: a DeepSpeed config, with the block or without")
    add("--sequence-length", type=positive, help="tokens per sample; not for images (image_size of the model)")
    add("--micro-batch-size", type=positive, default=1, help='per rank, where the config says "auto" (1)')
    add("--host", choices=["deepspeed", "fsdp2"], default="deepspeed", help="what shards and averages (deepspeed)")
    add("--gradient-checkpointing", action="store_true", help="activations are recomputed in the backward pass")
    parser.set_defaults(run=_run, defaults={name: parser.get_default(name) for name in _FORMULAS_ONLY})


def _run(options: argparse.Namespace) -> int:
    if (options.model is None) != (options.deepspeed_config is None):
        raise ValueError(_BOTH)
    if options.model is not None:
        if idle := [name for name in _FORMULAS_ONLY if getattr(options, name) != options.defaults[name]]:
            flags = listed(f"--{name.replace('_', '-')}" for name in idle)
            raise ValueError(
                f"{flags}: no effect with --model and --deepspeed_config, whose JSON says it; leave it out"
            )
        return _of_a_run(options)
    if options.sequence_length or options.gradient_checkpointing or options.host != "deepspeed":
        raise ValueError(f"--sequence-length, --gradient-checkpointing and --host need {_BOTH}")
    return _by_formula(options)


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
    from sdp_deepspeed.estimate.forecast import classifies_images, forecast
    from sdp_deepspeed.estimate.settings import configs_of_phases, refuse_unsharded, without_auto
    from sdp_deepspeed.support.host_types import refuse_wrong_types

    shape = read_json(options.model, "--model")
    if not isinstance(shape.get("model_type"), str):
        raise ValueError('--model: the JSON has no "model_type": expected a Transformers config, e.g. "llama"')
    images = classifies_images(shape)
    if images == (options.sequence_length is not None):
        problem = "the model takes images: leave it out" if images else "needed for a model of text"
        raise ValueError(f"--sequence-length: {problem}")
    config = without_auto(
        read_json(options.deepspeed_config, "--deepspeed_config"),
        micro_batch=options.micro_batch_size,
        accumulation=options.accumulation,
        dtype=options.dtype,
    )
    refuse_wrong_types(config)
    if options.host == "fsdp2":
        refuse_unsharded(config)  # before its schedule is divided into phases
    phases = configs_of_phases(config, options.ranks)
    for index, phase in enumerate(phases, start=1):
        figures = forecast(
            shape,
            phase,
            num_ranks=options.ranks,
            sequence_length=options.sequence_length,
            gradient_checkpointing=options.gradient_checkpointing,
            host=options.host,
        )
        if len(phases) > 1:
            print(f"phase {index} of {len(phases)}:")
        print(_text(figures, options.ranks, "images" if images else "tokens"))
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
