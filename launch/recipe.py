"""Read a run from one YAML file with the sections `model`, `data`, `training` and `deepspeed`.

    deepspeed --num_gpus 4 launch/pretrain.py configs/recipes/llama_134m.yaml training.max_steps=100 sdp.coverage=0.25

`key=value` overrides a key by its dotted path. `sdp` stands for the block `subnetwork_data_parallel`; `sdp=off` trains
with plain data parallelism and everything else unchanged. Unknown keys and values of the wrong type are errors.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import torch
from datasets import Dataset, IterableDataset
from huggingface_hub.errors import StrictDataclassError
from pydantic import TypeAdapter, ValidationError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, TrainingArguments
from transformers.utils import is_timm_available

import sdp_deepspeed
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.config import recipe as recipes
from sdp_deepspeed.teams.join import NUMBER

Kind = TypeVar("Kind")
Rows = TypeVar("Rows", Dataset, IterableDataset)


@dataclass
class Recipe:
    """The sections of a recipe.

    Attributes:
        model: `model_type` and other keys of the Transformers config, or the `name` of a config (folder or hub); for
            images also the name of a `timm` model and `model_args`.
        data: fields of the program's data class.
        training: fields of `TrainingArguments`.
        deepspeed: the DeepSpeed config with the block; None without this section.
        block: `subnetwork_data_parallel`, from the DeepSpeed config or its own section (FSDP2).
        prepare_only: prepare the data and stop.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    training: dict[str, Any]
    deepspeed: dict[str, Any] | None
    block: dict[str, Any]
    prepare_only: bool

    @property
    def has_subnetworks(self) -> bool:
        return bool(self.block) and bool(self.block.get("enabled", True))

    @property
    def num_teams(self) -> int | None:
        """K of `local_steps`; None without teams."""
        steps = self.block.get("local_steps") if self.has_subnetworks else None
        return None if steps is None else int(steps["teams"])


def fail(message: object) -> NoReturn:
    """Exit on every rank; rank 0 prints the message."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(5)  # launchers kill all ranks when one fails: let rank 0 print first
    sys.exit(2)


def read_recipe(description: str, sections: Sequence[str], arguments: Sequence[str] | None = None) -> Recipe:
    """Read the recipe that the command line names, and apply the overrides.

    Args:
        description: text for `--help`.
        sections: names of the sections that this program supports.
        arguments: command line without the program's name. Default: `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="YAML file, such as configs/recipes/quickstart.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as training.max_steps=20 sdp.coverage=0.25"
    )
    parser.add_argument("--prepare_only", action="store_true", help="prepare the data in one process and exit")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # passed by the deepspeed launcher
    options = parser.parse_intermixed_args(arguments)
    if os.access(sys.prefix, os.W_OK):  # operators that DeepSpeed compiles fit one environment
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
    try:
        found = recipes.read_recipe(options.recipe, options.overrides, sections)
        holder = found if KEY in sections else found["deepspeed"]
        parse(holder)
    except ValueError as error:
        fail(error)
    known = {name: found.get(name, {}) for name in ("model", "data", "training")}
    return Recipe(
        **known, deepspeed=found.get("deepspeed"), block=holder.get(KEY, {}), prepare_only=options.prepare_only
    )


def section_of(kind: type[Kind], values: dict[str, Any], where: str, **more: Any) -> Kind:
    """Create a dataclass from a section, with values validated and converted by the fields' types."""
    hints, known = get_type_hints(kind), [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    try:
        recipes.check_keys(values, known, where)
    except ValueError as error:
        fail(error)
    checked = {}
    for key, value in values.items():
        try:
            checked[key] = TypeAdapter(hints[key]).validate_python(value)
        except ValidationError as error:
            fail(f"{where}.{key}: got {value!r}; {error.errors()[0]['msg']}")
    try:
        return kind(**checked, **more)
    except (ValueError, TypeError) as error:
        fail(f"{where}: {error}")


def training_arguments(recipe: Recipe, **defaults: Any) -> TrainingArguments:
    """Create the Trainer's arguments, which starts the process group of a distributed run."""
    use_cpu = os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
    values = {"use_cpu": use_cpu, "data_seed": recipe.training.get("seed", 42)} | defaults
    if recipe.training.get("enable_jit_checkpoint"):
        fail("training.enable_jit_checkpoint: not supported; remove it, since SIGTERM saves a checkpoint anyway")
    values |= recipe.training
    if recipe.num_teams is not None:
        values["output_dir"] = f"{values.get('output_dir', 'trainer_output')}/team{_team_number()}"
    return section_of(TrainingArguments, values, "training", deepspeed=recipe.deepspeed)


def own_part(recipe: Recipe, rows: Rows) -> Rows:
    """This team's part of a dataset; without teams all of it."""
    if recipe.num_teams is None:
        return rows
    return rows.shard(num_shards=recipe.num_teams, index=_team_number())


def _team_number() -> int:
    given = os.environ.get(NUMBER, "")
    if not given.isdecimal():
        fail(f"{NUMBER}: got {given!r}, expected the number of this team; `sdp teams` sets it")
    return int(given)


def initialization(recipe: Recipe) -> AbstractContextManager[None]:
    """Context in which the model of a run is built: `Init` for subnetworks, so that no rank holds the whole model, and
    output projections start smaller (`branch_scale`). AutoTP divides initialized weights."""
    needs_weights = "tensor_parallel" in (recipe.deepspeed or {})
    return sdp_deepspeed.Init() if recipe.has_subnetworks and not needs_weights else nullcontext()


def model_config(recipe: Recipe, **defaults: Any) -> PretrainedConfig:
    """Create the Transformers config of the section `model`; `defaults` apply to keys that it does not set."""
    values = dict(recipe.model)
    name, kind = values.pop("name", None), values.pop("model_type", None)
    if (name is None) == (kind is None):
        fail("model: expected model_type (such as llama) with sizes, or the name of a config (a folder, or on the Hub)")
    try:
        if kind is not None and kind not in CONFIG_MAPPING:
            recipes.check_keys([kind], CONFIG_MAPPING, "model.model_type")
        if kind == "timm_wrapper" and not is_timm_available():
            fail("model: timm is not installed; run pip install timm")
        plain = AutoConfig.from_pretrained(name) if kind is None else AutoConfig.for_model(kind)
        recipes.check_keys(values, [key for key in dir(plain) if not key.startswith("_")], "model")
        values = defaults | values
        return AutoConfig.from_pretrained(name, **values) if kind is None else AutoConfig.for_model(kind, **values)
    except (ValueError, TypeError, OSError, StrictDataclassError) as error:
        fail(f"model: {error}")
