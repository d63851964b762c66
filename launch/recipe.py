"""Read a run from one YAML file with the sections `model`, `data`, `training` and `deepspeed`.

    deepspeed --num_gpus 4 launch/pretrain.py configs/recipes/134m.yaml training.max_steps=100 sdp.coverage=0.25

`key=value` overrides a key by its dotted path. `sdp` stands for the block `subnetwork_data_parallel`; `sdp=off` trains
with plain data parallelism and everything else equal. Unknown keys and values of the wrong type are errors.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar, get_type_hints

import torch
import yaml
from huggingface_hub.errors import StrictDataclassError
from pydantic import TypeAdapter, ValidationError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, TrainingArguments

from sdp_deepspeed.config import KEY, parse

Kind = TypeVar("Kind")


@dataclass
class Recipe:
    """The sections of a recipe.

    Attributes:
        model: `model_type` and other keys of the Transformers config, or the `name` of a config (folder or hub).
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


class _Loader(yaml.SafeLoader):
    """Two rules of YAML 1.2: 3e-4 is a number, and only true and false are booleans."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:bool"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


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
    try:
        found = yaml.load(options.recipe.read_text(encoding="utf-8"), _Loader)  # of safe tags only
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"{options.recipe}: {error}")
    if not isinstance(found, dict):
        fail(f"{options.recipe}: expected the sections {', '.join(sections)}")
    _check_keys(found, sections, str(options.recipe))
    folder = options.recipe.parent
    if isinstance(found.get("deepspeed"), str):
        found["deepspeed"] = _read_json(folder / found["deepspeed"])
    for override in options.overrides:
        _override(found, override, sections)
    for name in sections:
        if not isinstance(found.get(name), dict):
            fail(f"{options.recipe}: section {name}: got {found.get(name)!r}, expected a mapping")
    holder = found if KEY in sections else found["deepspeed"]
    try:
        parse(holder)
    except ValueError as error:
        fail(error)
    known = {name: found.get(name, {}) for name in ("model", "data", "training")}
    return Recipe(
        **known, deepspeed=found.get("deepspeed"), block=holder.get(KEY, {}), prepare_only=options.prepare_only
    )


def _override(found: dict[str, Any], override: str, sections: Sequence[str]) -> None:
    """Apply `a.b.c=value`; the value is YAML, for `deepspeed` also the path of a JSON file."""
    path, equals, text = override.partition("=")
    if not equals:
        fail(f"{override!r}: expected key=value, such as training.max_steps=20")
    keys = path.split(".")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        fail(f"{override!r}: {error}")
    if keys[0] == "sdp":
        keys[:1] = [KEY] if KEY in sections else ["deepspeed", KEY]
        if keys[-1] == KEY and value in ("on", "off"):
            keys, value = [*keys, "enabled"], value == "on"
    _check_keys(keys[:1], sections, "overrides")
    if keys == ["deepspeed"] and isinstance(value, str):
        value = _read_json(Path(value))
    inner: Any = found
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            fail(f"{override!r}: {key} is {inner!r}, which has no keys")
    inner[keys[-1]] = value


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"deepspeed: {path}: {error}")


def _check_keys(given: Iterable[Any], known: Iterable[str], where: str) -> None:
    names = list(known)
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1, 0.4)
            fail(f"{where}: unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {names}"))


def section_of(kind: type[Kind], values: dict[str, Any], where: str, **more: Any) -> Kind:
    """Create a dataclass from a section, with values validated and converted by the fields' types."""
    hints, known = get_type_hints(kind), [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    _check_keys(values, known, where)
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
    return section_of(TrainingArguments, values | recipe.training, "training", deepspeed=recipe.deepspeed)


def model_config(recipe: Recipe, **defaults: Any) -> PretrainedConfig:
    """Create the Transformers config of the section `model`; `defaults` apply to keys that it does not set."""
    values = dict(recipe.model)
    name, kind = values.pop("name", None), values.pop("model_type", None)
    if (name is None) == (kind is None):
        fail("model: expected model_type (such as llama) with sizes, or the name of a config (a folder or the hub's)")
    try:
        if kind is not None and kind not in CONFIG_MAPPING:
            _check_keys([kind], CONFIG_MAPPING, "model.model_type")
        plain = AutoConfig.from_pretrained(name) if kind is None else AutoConfig.for_model(kind)
        _check_keys(values, [key for key in dir(plain) if not key.startswith("_")], "model")
        values = defaults | values
        return AutoConfig.from_pretrained(name, **values) if kind is None else AutoConfig.for_model(kind, **values)
    except (ValueError, TypeError, OSError, StrictDataclassError) as error:
        fail(f"model: {error}")
