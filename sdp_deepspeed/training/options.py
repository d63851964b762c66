"""The command line of launch/pretrain.py, checked before anything heavy is imported."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp_deepspeed.command_parser import Parser, positive, read_json
from sdp_deepspeed.config import KEY
from sdp_deepspeed.support.host_types import refuse_wrong_types
from sdp_deepspeed.total_steps import fill_total_steps

# Keys of the decoders' configs that no model can have as zero; and those that may be null for a size of its own.
_SIZES = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions"),
    }
)
_DERIVED_SIZES = frozenset({"head_dim", "num_key_value_heads", "n_inner"})
_LARGEST_SIZE = 2**31
HOSTS = ("deepspeed", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one run is to do.

    Args:
        model: the model's shape as a Transformers config with `model_type`.
        deepspeed_config: DeepSpeed's config, with our block or without.
        data: fields of `sdp_deepspeed.data.config.DataConfig`.
        run_folder: everything that the run leaves behind.
        steps: optimizer steps of the whole run, those before a resume included.
        eval_interval: steps between evaluations of the dense model; one more at the start and at the end.
        save_interval: steps between checkpoints; one more at the end and on a stop.
        keep_checkpoints: how many of the newest checkpoints stay on disk.
        step_limit: seconds that ranks wait for one another in a step; None for DeepSpeed's own, or 600.
        seed: of the model's initial weights.
        gradient_checkpointing: recompute activations in the backward pass.
        baseline: train without our block, all else equal.
        host: "deepspeed", or "fsdp2" for FSDP2 without DeepSpeed.
    """

    model: dict[str, Any]
    deepspeed_config: dict[str, Any]
    data: dict[str, Any]
    run_folder: Path
    steps: int
    eval_interval: int = 100
    save_interval: int = 500
    keep_checkpoints: int = 2
    step_limit: int | None = None
    seed: int = 0
    gradient_checkpointing: bool = False
    baseline: bool = False
    host: str = "deepspeed"


def _parser() -> Parser:
    parser = Parser(
        prog="pretrain.py",
        description="Pre-train a decoder. Start it with `deepspeed launch/pretrain.py ...` or `torchrun ...`; start\n"
        "it again to resume.",
    )
    add_model(parser, example="configs/models/tiny.json")
    parser.add_argument(
        "--data", type=Path, help="JSON: the data's settings (default: the Python standard library's source)"
    )
    parser.add_argument("--steps", type=positive, required=True, help="optimizer steps of the whole run")
    add_run(parser)
    return parser


def add_model(parser: Parser, *, example: str) -> None:
    """What is trained how: --model, --deepspeed_config, --host."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help=f"JSON: a Transformers config, such as {example}")
    add("--deepspeed_config", type=Path, required=True, help="JSON: DeepSpeed's config with or without our block")
    add("--host", choices=HOSTS, default=HOSTS[0], help="DeepSpeed (default), or FSDP2, which needs no DeepSpeed")


def add_run(parser: Parser) -> None:
    """The run's folder and intervals, and what else any task has."""
    add = parser.add_argument
    add("--run-folder", type=Path, required=True, help="where config, metrics, checkpoints and the model go")
    add("--eval-interval", type=positive, default=100, help="steps between evaluations (default 100)")
    add("--save-interval", type=positive, default=500, help="steps between checkpoints (default 500)")
    add("--keep-checkpoints", type=positive, default=2, help="newest checkpoints to keep (default 2)")
    add("--step-limit", type=positive, help="seconds that ranks wait for one another (default 600)")
    add("--seed", type=int, default=0, help="seed of the initial weights (default 0)")
    add("--gradient-checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--baseline", action="store_true", help="ignore our block: plain DeepSpeed or FSDP2, for comparison")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher passes it; the environment says the same


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line (`sys.argv` by default). ValueError for whatever the user got wrong."""
    given = vars(_parser().parse_args(arguments))
    model = read_model(given, example="llama")
    data_path = given.pop("data")
    data = read_json(data_path, "--data") if data_path else {}
    data.setdefault("sequence_length", min(128, model.get("max_position_embeddings", 128)))
    if not data.get("tokenizer"):
        data.setdefault("vocab_size", model.get("vocab_size"))
    config = read_config(given)
    fill_automatic(config, given["steps"])
    refuse_wrong_types(config)
    return Options(model=model, data=data, deepspeed_config=config, **given)


def read_model(given: dict[str, Any], *, example: str) -> dict[str, Any]:
    """Take --model, and what only the launcher gives, from parsed arguments; ValueError for what the JSON has wrong."""
    given.pop("local_rank")
    model = read_json(given.pop("model"), "--model")
    if not isinstance(model.get("model_type"), str):
        raise ValueError(f'--model: the JSON has no "model_type": expected a Transformers config, e.g. "{example}"')
    refuse_wrong_sizes(model)
    return model


def read_config(given: dict[str, Any]) -> dict[str, Any]:
    """Take --deepspeed_config from parsed arguments, without our block where --baseline says so."""
    config = read_json(given.pop("deepspeed_config"), "--deepspeed_config")
    if given["baseline"]:
        config.pop(KEY, None)
    return config


def fill_automatic(config: dict[str, Any], steps: int) -> None:
    """Write the number of steps, the one setting that the command line decides, where the learning rate's schedule says
    "auto", and where phases end at fractions of it."""
    fill_total_steps(config, steps)
    scheduler = config.get("scheduler")
    parameters = scheduler.get("params") if isinstance(scheduler, dict) else None
    if isinstance(parameters, dict) and parameters.get("total_num_steps") == "auto":
        parameters["total_num_steps"] = steps


def refuse_wrong_sizes(model: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, which Transformers would fail on without naming them, or build nothing from.

    Raises:
        ValueError: by key.
    """
    for key in sorted((_SIZES | _DERIVED_SIZES) & model.keys()):
        value = model[key]
        if value is None and key in _DERIVED_SIZES:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _LARGEST_SIZE:
            raise ValueError(f"--model: {key}: got {value!r}, expected a whole number of at least 1")
