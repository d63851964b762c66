"""Writes configs/recipes/*.json and the tables of configs/README.md from the table in configs/recipes.py,
and configs/vision/recipes/*.json from configs/vision_recipes.py.

python configs/make.py            # write what differs; a minute and a half, most of it for the figures of the README
python configs/make.py --check    # write nothing; exit code 1 if a file differs, and say which
python configs/make.py --check --files    # the same for the JSON files alone: a second
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the repository's root
from configs.recipes import NUM_WORKERS, TOKENS_PER_PARAMETER, Recipe, recipes  # noqa: E402
from configs.vision_recipes import vision_recipes  # noqa: E402
from sdp_deepspeed.estimate.forecast import Forecast, forecast  # noqa: E402

RECIPES = ROOT / "configs" / "recipes"
OF_IMAGES = ROOT / "configs" / "vision" / "recipes"
README = ROOT / "configs" / "README.md"
DATA = "configs/data/fineweb.json"
BEGIN, END = "<!-- recipes -->", "<!-- /recipes -->"
# NVIDIA's data sheet of the A100 80GB: dense bf16. The utilization is an assumption, not a measurement.
GPU, FLOPS_PER_SECOND, UTILIZATION = "A100", 312e12, 0.4
_GIB = 2**30


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    parser.add_argument("--files", action="store_true", help="the JSON files alone, not the README's figures")
    options = parser.parse_args(arguments)
    texts = files()
    if not options.files:
        texts[README] = readme(README.read_text(encoding="utf-8"))
    return settle(texts, RECIPES, check=options.check) | settle(vision_files(), OF_IMAGES, check=options.check)


def files() -> dict[Path, str]:
    """The JSON files, by path."""
    return {RECIPES / f"{recipe.name}.json": json.dumps(recipe.config(), indent=2) + "\n" for recipe in recipes()}


def vision_files() -> dict[Path, str]:
    """Those for images, by path."""
    return {OF_IMAGES / f"{name}.json": json.dumps(config, indent=2) + "\n" for name, config in vision_recipes()}


def settle(texts: Mapping[Path, str], folder: Path, *, check: bool) -> int:
    """Make the files what they should be, or with `check` say what is not; returns the exit code.

    Args:
        texts: what belongs into each file.
        folder: holds recipes only: other JSON files go.
    """
    present = {path: path.read_text(encoding="utf-8") for path in [*texts, *folder.glob("*.json")] if path.exists()}
    wrong = sorted(path for path in {*texts, *present} if texts.get(path) != present.get(path))
    for path in wrong:
        if check:
            print(f"{path} is not what its table says: run python configs/make.py")
        elif path in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
        else:
            path.unlink()
    return int(check and bool(wrong))


def readme(text: str, forecast_of: Callable[[Recipe], Forecast] | None = None) -> str:
    """The README with its tables made anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{tables(forecast_of or forecast_recipe)}\n{END}{after}"


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def forecast_recipe(recipe: Recipe) -> Forecast:
    """On the recipe's eight GPUs, with the blocks of the FineWeb config."""
    shape = read(ROOT / "configs" / "models" / f"{recipe.size.name}.json")
    length = read(ROOT / DATA)["sequence_length"]
    return forecast(shape, recipe.config(), num_ranks=NUM_WORKERS, sequence_length=length)


def num_steps(figures: Forecast) -> int:
    """For TOKENS_PER_PARAMETER tokens per parameter of the dense model, in whole hundreds."""
    steps = TOKENS_PER_PARAMETER * figures.num_parameters / figures.tokens_per_step
    return round(steps / 100) * 100


def hours(figures: Forecast, steps: int) -> float:
    """Computing alone: what travels may hide behind it or not."""
    return steps * figures.flops / (FLOPS_PER_SECOND * UTILIZATION) / 3600


def tables(forecast_of: Callable[[Recipe], Forecast]) -> str:
    """One for each size, as markdown."""
    lines: list[str] = []
    dense: Forecast | None = None
    for recipe in recipes():
        figures = forecast_of(recipe)
        if recipe.mode is None:
            dense = figures
            lines += [*_heading(recipe, figures), ""] if not lines else ["", *_heading(recipe, figures), ""]
            lines += [_HEADER, "|---|---|---|---|---|---|---|---|"]
        assert dense is not None, "the plain twin comes first"
        lines.append(row(recipe, figures, dense))
    return "\n".join(lines)


_HEADER = (
    "| recipe | coverage | state, GiB | activations, GiB | peak, GiB | sent per step, MB | hours | "
    "steps at equal FLOPs |"
)


def _heading(recipe: Recipe, figures: Forecast) -> list[str]:
    size, steps = recipe.size.name, num_steps(figures)
    tokens = steps * figures.tokens_per_step
    return [
        f"### {size}",
        "",
        f"{figures.num_parameters / 1e6:.0f}M parameters, {steps} steps of {figures.tokens_per_step} tokens: "
        f"{tokens / 1e9:.1f}B tokens. On {NUM_WORKERS} GPUs:",
        "",
        "```bash",
        f"RECIPE={recipe.name}",
        f"deepspeed --num_gpus {NUM_WORKERS} launch/pretrain.py --model configs/models/{size}.json \\",
        f"    --data {DATA} --deepspeed_config configs/recipes/$RECIPE.json --run-folder runs/$RECIPE --steps {steps}",
        "```",
    ]


def row(recipe: Recipe, figures: Forecast, dense: Forecast) -> str:
    """Of a table; `dense` are the figures of the plain twin."""
    steps = num_steps(dense)
    cells = [
        f"`{recipe.name}`",
        "-" if recipe.mode is None else f"{recipe.coverage:g}{', whole ends' if recipe.whole_ends else ''}",
        *(f"{count / _GIB:.2f}" for count in (figures.rank.state, figures.activations, figures.peak)),
        f"{figures.rank.sent_bytes / 1e6:.0f}",
        f"{hours(figures, steps):.1f}",
        str(round(steps * dense.flops / figures.flops / 100) * 100),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
