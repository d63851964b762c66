"""`sdp estimate`: by formula per parameter, or for one model and config, on the GPUs that it would run on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sdp_deepspeed.command_parser import Parser, positive, read_json
from sdp_deepspeed.estimate import __main__ as formulas
from sdp_deepspeed.messages import listed
from sdp_deepspeed.sizes import mib_text

if TYPE_CHECKING:
    from sdp_deepspeed.estimate.per_rank import RankEstimate
    from sdp_deepspeed.training.forecast import Forecast

# What the two files say, where they are given.
_OF_FORMULAS = ("coverage", "regime", "dtype", "accumulate_in_fp32", "accumulation", "offload", "ranks_per_node")

_ALL_THREE = (
    "--model, --deepspeed_config and --sequence-length: give all three (without the last for images), or none for the "
    "formulas"
)
_MANY = 10**6  # steps of a run whose number nobody says: an end for each phase


def configure(parser: Parser) -> None:
    """Arguments of `sdp estimate`."""
    formulas.configure(parser)
    parser.description = (
        f"{parser.description}\n\n"
        "With --model and --deepspeed_config: what that run takes on each of so many ranks: memory, bytes, FLOPs.\n"
        "Nothing is allocated and no GPU is needed: the subnetwork of the worker that computes most runs on tensors\n"
        "without data. Kernels' temporary memory and the GPU's own come on top. With a schedule each phase in turn."
    )
    parser.epilog = (
        "example: sdp estimate --ranks 8 --sequence-length 1024 --model configs/models/134M.json \\\n"
        "             --deepspeed_config configs/recipes/134M-forward-block-4of8.json"
    )
    add = parser.add_argument_group("for one model and config").add_argument
    add("--model", type=Path, help="JSON: a Transformers config, such as configs/models/134M.json")
    add("--deepspeed_config", type=Path, help="JSON: DeepSpeed's config, with our block or without")
    add(
        "--sequence-length",
        type=positive,
        help="tokens of a block; not for images, whose size is in the --model JSON (image_size)",
    )
    add("--host", choices=["deepspeed", "fsdp2"], default="deepspeed", help="what shards and averages (deepspeed)")
    add("--gradient-checkpointing", action="store_true", help="activations are recomputed in the backward pass")
    parser.set_defaults(run=_run, defaults={name: parser.get_default(name) for name in _OF_FORMULAS})


def _run(options: argparse.Namespace) -> int:
    files, length = (options.model, options.deepspeed_config), options.sequence_length
    if {*files, length} == {None} and not options.gradient_checkpointing and options.host == "deepspeed":
        return formulas.run(options)
    if None in files:
        raise ValueError(_ALL_THREE)
    if idle := [name for name in _OF_FORMULAS if getattr(options, name) != options.defaults[name]]:
        flags = listed(f"--{name.replace('_', '-')}" for name in idle)
        raise ValueError(f"{flags}: no effect with --model and --deepspeed_config, whose JSON says it; leave it out")
    # Heavy imports only now: help and mistakes are answered at once.
    from sdp_deepspeed.support.host_types import refuse_wrong_types
    from sdp_deepspeed.training.forecast import forecast
    from sdp_deepspeed.training.forecast_inputs import classifies_images
    from sdp_deepspeed.training.forecast_settings import configs_of_phases, refuse_unsharded
    from sdp_deepspeed.training.options import fill_automatic, refuse_wrong_sizes

    shape = read_json(options.model, "--model")
    if not isinstance(shape.get("model_type"), str):
        raise ValueError('--model: the JSON has no "model_type": expected a Transformers config, e.g. "llama"')
    refuse_wrong_sizes(shape)
    images = classifies_images(shape)
    if images and length is not None:
        raise ValueError(
            "--sequence-length: the model takes images, as large as image_size in its JSON says (or 224 x 224)"
        )
    if not images and length is None:
        raise ValueError(_ALL_THREE)
    config = read_json(options.deepspeed_config, "--deepspeed_config")
    fill_automatic(config, steps=_MANY)
    refuse_wrong_types(config)
    if options.host == "fsdp2":
        refuse_unsharded(config)  # before its schedule is divided into phases
    phases = configs_of_phases(config, options.ranks)
    for index, phase in enumerate(phases, start=1):
        figures = forecast(
            shape,
            phase,
            num_ranks=options.ranks,
            sequence_length=length,
            gradient_checkpointing=options.gradient_checkpointing,
            host=options.host,
        )
        if len(phases) > 1:
            print(f"phase {index} of {len(phases)}:")
        print(_text(figures, options.ranks, "images" if images else "tokens"))
    return 0


def _exchanged(rank: RankEstimate) -> dict[str, str]:
    return {
        "the step's fp32 gradients": mib_text(rank.step_gradients),
        "buffers of what travels, at most": mib_text(rank.buffers),
    }


def _gathered(rank: RankEstimate) -> dict[str, str]:
    return {"gathered at once, at most": mib_text(rank.gathered)}


def _text(figures: Forecast, num_ranks: int, items: str) -> str:
    rank = figures.rank
    rows = {
        "weights": mib_text(rank.weights),
        "gradients": mib_text(rank.gradients),
        "optimizer state": mib_text(rank.optimizer),
        **({"optimizer state in host memory": mib_text(rank.host_optimizer)} if rank.host_optimizer else {}),
        "activations of a micro-batch": mib_text(figures.activations),
        **(_gathered(rank) if rank.gathered else _exchanged(rank)),
        "peak, at least": mib_text(figures.peak),
        "sent per step": mib_text(rank.sent_bytes),
        "FLOPs per step": f"{figures.flops:.4g}",
    }
    width = max(map(len, rows))
    lines = [
        f"{figures.num_parameters / 1e6:.1f}M parameters on {num_ranks} ranks, "
        f"{figures.tokens_per_step} {items} per step",
        "estimate for the worker that computes most:",
        *(f"  {name.ljust(width)}  {value}" for name, value in rows.items()),
        *(f"warning: {warning}" for warning in figures.warnings),
    ]
    return "\n".join(lines)
