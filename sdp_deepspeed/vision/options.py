"""The command line of launch/train_vision.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sdp_deepspeed.command_parser import Parser, positive, read_json
from sdp_deepspeed.config import KEY
from sdp_deepspeed.support.host_types import refuse_wrong_types
from sdp_deepspeed.training.batch_sizes import micro_steps
from sdp_deepspeed.training.options import Options, add_model, add_run, fill_automatic, read_config, read_model
from sdp_deepspeed.vision.compute_share import compute_share
from sdp_deepspeed.vision.config import KNOWN, ImageConfig, Images
from sdp_deepspeed.vision.shapes import full_shape
from sdp_deepspeed.vision.splits import Splits, open_splits

BATCH_NORM_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class VisionOptions(Options):
    """What one run is to do; `data` has the fields of `ImageConfig`.

    Args:
        steps: 0 until `settle` has made steps of epochs.
        label_smoothing: share of the target that all classes have alike, in training.
        epochs: passes over the training images; None where steps are given.
        batch_norm_batches: training batches of each rank from which the dense model's batch norms get their statistics.
        equal_flops: make as many steps as cost what `steps` or `epochs` of data parallelism would.
    """

    steps: int = 0
    label_smoothing: float = 0.0
    batch_norm_batches: int = BATCH_NORM_BATCHES
    epochs: float | None = None
    equal_flops: bool = False

    def opened(self) -> tuple[Images, Splits]:
        """The data's settings, and the data; ValueError if they cannot be opened."""
        images = ImageConfig.from_dict(self.data).filled()
        return images, open_splits(images)


def _parser() -> Parser:
    parser = Parser(
        prog="train_vision.py",
        description="Train an image classifier. Start it with `deepspeed launch/train_vision.py ...` or\n"
        "`torchrun ...`; start it again to resume.",
    )
    add_model(parser, example="configs/vision/models/resnet18.json")
    add = parser.add_argument
    add("--dataset", choices=sorted(KNOWN), help="a data set with its usual settings; digits need no network")
    add("--data", type=Path, help="JSON: the data's settings, beside --dataset or for other data")
    add("--epochs", type=_positive_number, help="passes over the training images")
    add("--steps", type=positive, help="optimizer steps, in place of epochs")
    add("--equal-flops", action="store_true", help="more of them: as many as cost what data parallelism would")
    add("--label-smoothing", type=_share, default=0.0, help="between 0 and 1 (default 0)")
    add(
        "--batch-norm-batches",
        type=positive,
        default=BATCH_NORM_BATCHES,
        metavar="N",
        help=f"training batches that give a dense model its batch norms' statistics (default {BATCH_NORM_BATCHES})",
    )
    add_run(parser)
    return parser


def _positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 0 <= share < 1")
    return value


def parse_options(arguments: Sequence[str] | None = None) -> VisionOptions:
    """Options from the command line (`sys.argv` by default). ValueError for whatever the user got wrong."""
    given = vars(_parser().parse_args(arguments))
    model = read_model(given, example="vit")
    if (given["steps"] is None) == (given["epochs"] is None):
        raise ValueError("give either --epochs or --steps")
    data_path, dataset = given.pop("data"), given.pop("dataset")
    data = read_json(data_path, "--data") if data_path else {}
    if dataset is not None and data.setdefault("dataset", dataset) != dataset:
        raise ValueError(f"--dataset is {dataset!r}, dataset in --data {data['dataset']!r}: give one of them")
    ImageConfig.from_dict(data)
    config = read_config(given)
    refuse_wrong_types(config)
    given["steps"] = given["steps"] or 0
    return VisionOptions(model=model, data=data, deepspeed_config=config, **given)


def settle(options: VisionOptions, num_ranks: int) -> VisionOptions:
    """With the number of steps, also where schedules say "auto"; opens the data.

    Raises:
        ValueError: data or model that cannot be used, or a schedule with --equal-flops.
    """
    steps = _num_steps(options, num_ranks)
    fill_automatic(options.deepspeed_config, steps)
    return replace(options, steps=steps)


def _num_steps(options: VisionOptions, num_ranks: int) -> int:
    parallel = options.deepspeed_config.get("tensor_parallel") or {}
    if parallel.get("autotp_size", 1) > 1 and (options.epochs is not None or options.equal_flops):
        raise ValueError("--epochs, --equal-flops: with tensor_parallel give --steps, as several ranks share a batch")
    images, splits = options.opened()
    steps: float = options.steps
    if options.epochs is not None:
        micro_batch, accumulation = micro_steps(options.deepspeed_config, num_ranks)
        steps = options.epochs * len(splits.train) / (micro_batch * accumulation * num_ranks)
    if options.equal_flops and KEY in options.deepspeed_config:
        shape = full_shape(options.model, splits.names, images.image_size)
        steps /= compute_share(shape, options.deepspeed_config, num_ranks=num_ranks, image_size=images.image_size)
    return max(1, round(steps))
