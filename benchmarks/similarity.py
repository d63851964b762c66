"""How similar is each mode's averaged gradient to the dense one, layer by layer (arXiv 2507.09029, Figure 2)?

    python benchmarks/similarity.py --model configs/models/tiny.json --ranks 8 --coverage 0.5 \
        --output benchmarks/results/similarity.json --plot benchmarks/results/similarity.png
    python benchmarks/similarity.py --model configs/vision/models/resnet18.json --batch 16 \
        --output benchmarks/results/similarity_images.json --plot benchmarks/results/similarity_images.png
    python benchmarks/similarity.py --from-json benchmarks/results/similarity.json --plot similarity.png

One process: the reference runs the workers one after the other, each on batches of its own. The dense gradient is the
mean over the same batches. The model is pre-trained densely in between, so forward masking meets a model that has not
learned to live without its units; a run under forward masking looks better than this. For the backward regime it also
measures the distance that sdp_deepspeed/reference/theory.md bounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageClassification

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.device import device, device_name
from benchmarks.common.provenance import write_result
from benchmarks.tables.plot_similarity import plot_similarity
from benchmarks.tables.similarity import MODE_KEY, similarity
from sdp_deepspeed.architectures import locate_branches, unit_costs
from sdp_deepspeed.command_parser import positive, read_json
from sdp_deepspeed.config import KEY, MODES, Mode, parse
from sdp_deepspeed.data import DataConfig, build
from sdp_deepspeed.estimate.forecast import classifies_images
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.reference import theory
from sdp_deepspeed.reference.virtual_workers import masked_average
from sdp_deepspeed.training.model import build_model, check_fits
from sdp_deepspeed.vision.batches import ImageBatches
from sdp_deepspeed.vision.config import ImageConfig
from sdp_deepspeed.vision.pixels import Pixels
from sdp_deepspeed.vision.shapes import full_shape
from sdp_deepspeed.vision.splits import open_splits

Batch = dict[str, torch.Tensor]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def plan_of(model: nn.Module, mode: Mode, coverage: float, num_ranks: int) -> Plan:
    """The plan that a run with this block would have."""
    block = parse({KEY: {"coverage": coverage, **mode._asdict()}})
    assert block is not None
    plan, _ = plan_model(model, block, num_ranks)
    return plan


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Batch], steps: int) -> None:
    """Dense steps, each on one batch."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, next(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.zero_grad()


def compare(model: nn.Module, plans: dict[str, Plan], batches: list[list[Batch]]) -> dict[str, dict[str, Any]]:
    """For each mode its similarities on the same batches; in the backward regime also V and T."""
    some_plan = next(iter(plans.values()))
    dense = theory.dense_gradients(model, some_plan, batches, loss_of)
    full, layers = theory.mean(dense), {branch.layer for branch in locate_branches(model)}
    found: dict[str, dict[str, Any]] = {}
    for mode, plan in plans.items():
        average = masked_average(model, plan, theory.worker_gradients(model, plan, batches, loss_of))
        found[mode] = {"layers": theory.similarity(average, full, layers)}
        if plan.regime == "backward":
            found[mode] |= {
                "deviation": theory.deviation(plan, dense),
                "distance": theory.distance(plan, average, dense),
            }
    return found


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Raw figures: for each number of dense steps and each draw of batches, each mode's similarities."""
    shape = read_json(arguments.model, "--model")
    if "model_type" not in shape:
        raise ValueError('--model: the JSON has no "model_type": expected a Transformers config, e.g. "llama"')
    model, data, batches = (_images if classifies_images(shape) else _text)(arguments, shape)
    plans = {str(mode): plan_of(model, mode, arguments.coverage, arguments.ranks) for mode in MODES}
    return {
        "what": "similarity",
        "model": shape | {"num_parameters": sum(p.numel() for p in model.parameters())},
        "data": data,
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
        "plans": {name: facts_of(model, plan) for name, plan in plans.items()},
        "records": list(records(model, plans, _on_device(batches), arguments)),
        "device": device_name(),
    }


def _text(arguments: argparse.Namespace, shape: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any], Iterator[Batch]]:
    """The model, what it learns from, and batches of that."""
    data = data_config(arguments, shape)
    model = build_model(shape, seed=arguments.seed).to(device())
    bundle = build(data, micro_batch=arguments.batch)
    check_fits(model.config, bundle)
    return model, dataclasses.asdict(data), bundle.train


def _images(
    arguments: argparse.Namespace, shape: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any], Iterator[Batch]]:
    given = read_json(arguments.data, "--data") if arguments.data else {"dataset": "digits"}
    data = ImageConfig.from_dict(given)
    images = data.filled()
    splits = open_splits(images)
    full = full_shape(shape, splits.names, images.image_size)
    model = build_model(full, seed=arguments.seed, auto_class=AutoModelForImageClassification).train().to(device())
    pixels = Pixels(splits.train, images)
    batches = ImageBatches(pixels, micro_batch=arguments.batch, rank=0, world_size=1, seed=images.seed)
    return model, dataclasses.asdict(images), batches


def _on_device(batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
        yield {name: tensor.to(device()) for name, tensor in batch.items()}


def records(
    model: nn.Module, plans: dict[str, Plan], batches: Iterator[Batch], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Train the dense model to each step, and compare on new batches in each draw."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    done = 0
    for step in sorted(set(arguments.steps)):
        train(model, optimizer, batches, step - done)
        done = step
        for draw in range(arguments.draws):
            found = compare(model, plans, [[next(batches)] for _ in range(arguments.ranks)])
            yield from ({"step": step, "draw": draw, MODE_KEY: mode} | found[mode] for mode in plans)
            print(f"after {step} dense steps: draw {draw + 1} of {arguments.draws} measured", file=sys.stderr)


def facts_of(model: nn.Module, plan: Plan) -> dict[str, object]:
    """What the figures depend on besides the model; for the backward regime also the T / V that theory permits."""
    weights = [cost.num_parameters for cost in unit_costs(model, plan.units)]
    facts: dict[str, object] = {
        "hash": plan.hash,
        "num_units": len(plan.units),
        "num_subnetworks": plan.num_subnetworks,
        "num_holders": plan.num_holders,
        "spectral_gap": plan.spectral_gap(weights),
    }
    if plan.regime == "backward":
        facts["permitted"] = dataclasses.asdict(theory.permitted(plan, weights))
    return facts


def data_config(arguments: argparse.Namespace, shape: Mapping[str, Any]) -> DataConfig:
    """The data's settings; what --data leaves open follows the model."""
    data = read_json(arguments.data, "--data") if arguments.data else {}
    data.setdefault("sequence_length", min(128, shape.get("max_position_embeddings", 128)))
    if not data.get("tokenizer"):
        data.setdefault("vocab_size", shape.get("vocab_size"))
    return DataConfig.from_dict(data)


def whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return int(text)


def read_result(path: Path) -> dict[str, Any]:
    result = read_json(path, "--from-json")
    if result.get("what") != "similarity":
        raise ValueError(f'--from-json: {path} is not what this command writes: its "what" is {result.get("what")!r}')
    return result


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, help="JSON: a Transformers config, such as configs/models/tiny.json; of text or images")
    add("--output", type=Path, help="where the raw figures go")
    add("--plot", type=Path, help="where the plot goes (.png, .pdf, .svg); needs the extra `plot`")
    add("--from-json", type=Path, help="measure nothing, show the raw figures of this file")
    add("--ranks", type=positive, default=8, help="virtual workers (default 8)")
    add("--coverage", type=float, default=0.5, help="C (default 0.5)")
    add("--steps", type=whole, nargs="+", default=[0, 200], help="dense steps before each measurement (default 0 200)")
    add("--draws", type=positive, default=3, help="measurements with new batches each (default 3)")
    add("--batch", type=positive, default=4, help="sequences or images per worker, and per dense step (default 4)")
    add("--learning-rate", type=float, default=1e-3, help="of the dense steps (default 1e-3)")
    add("--data", type=Path, help="JSON: the data's settings (default: Python's library's source, or digits)")
    add("--seed", type=int, default=0, help="of the initial weights (default 0); --data has one of its own")
    options = parser.parse_args(arguments)
    missing = options.model is None or options.output is None
    if missing if options.from_json is None else options.model or options.output:
        parser.error("give --model and --output to measure, or --from-json without them to show what was measured")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        if options.from_json is None:
            write_result(str(options.output), measure(options))
        result = read_result(options.from_json or options.output)
        print(similarity(result))
        if options.plot is not None:
            plot_similarity(result, options.plot)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
