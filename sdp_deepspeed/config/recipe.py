"""Recipes: the YAML file of a run and its `key=value` overrides, as the programs in launch/ and `sdp` read them."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.messages import KEY, did_you_mean

_INSTALLED = Path(sysconfig.get_path("data"), "share", "sdp_deepspeed", "recipes")  # by a wheel
_SECTIONS = ("model", "data", "training")


class _Loader(yaml.SafeLoader):
    """Follows YAML 1.2 in two points: 3e-4 is a number, and only the words true and false are booleans."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:bool"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_recipe(path: Path, overrides: Sequence[str] = (), sections: Sequence[str] | None = None) -> dict[str, Any]:
    """Read a recipe, replace a DeepSpeed config that is a path by the file's content, and apply overrides. `model.timm`
    is short for the architecture of Transformers' wrapper of timm.

    Args:
        path: YAML file, or the name of one that is installed with this package, such as "quickstart".
        overrides: `a.b.c=value`. `sdp` stands for the block; `sdp=off` disables it.
        sections: allowed sections. Default: model, data, training, and `subnetwork_data_parallel` if the recipe has
            it at the top level (FSDP2), else `deepspeed`.

    Raises:
        ValueError: the file cannot be read, an unknown section, or an invalid override.
    """
    installed = _INSTALLED / f"{path}.yaml"
    if path.name == str(path) and not path.exists() and installed.is_file():
        path = installed
    try:
        recipe = yaml.load(regular(path).read_text(encoding="utf-8"), _Loader)  # of safe tags only
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not a YAML file: {error}") from None
    if sections is None:
        sections = (*_SECTIONS, KEY if isinstance(recipe, dict) and KEY in recipe else "deepspeed")
    if not isinstance(recipe, dict):
        raise ValueError(f"{path}: expected the sections {', '.join(sections)}")
    check_keys(recipe, sections, str(path))
    if isinstance(recipe.get("deepspeed"), str):
        recipe["deepspeed"] = read_json(path.parent / recipe["deepspeed"])
    for override in overrides:
        apply_override(recipe, override, sections)
    for name in sections:
        if not isinstance(recipe.get(name), dict):
            raise ValueError(f"{path}: section {name}: got {recipe.get(name)!r}, expected a mapping")
    if "timm" in recipe.get("model", {}):
        recipe["model"] |= {"model_type": "timm_wrapper", "architecture": recipe["model"].pop("timm")}
    return recipe


def apply_override(recipe: dict[str, Any], override: str, sections: Sequence[str]) -> None:
    """Apply `a.b.c=value` to a recipe with these sections; the value is YAML; for `deepspeed`, it may be the path of a
    JSON file."""
    path, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"{override!r}: expected key=value, such as training.max_steps=20")
    keys = path.split(".")
    try:
        value = yaml.load(text, _Loader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{override!r}: {error}") from None
    if keys[0] == "sdp":
        keys[:1] = [KEY] if KEY in sections else ["deepspeed", KEY]
        if keys[-1] == KEY and value in ("on", "off"):
            keys, value = [*keys, "enabled"], value == "on"
    check_keys(keys[:1], sections, "overrides")
    if keys == ["deepspeed"] and isinstance(value, str):
        value = read_json(Path(value))
    inner: Any = recipe
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{override!r}: {key} is {inner!r}, expected a mapping")
    inner[keys[-1]] = value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError with the path, and the position of the error."""
    try:
        content = json.loads(regular(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, numbers of thousands of digits, thousands of brackets
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got a {type(content).__name__}, expected a JSON object {{...}}")
    return content


def check_keys(given: Iterable[Any], known: Iterable[str], where: str) -> None:
    """Raise ValueError for the first unknown key, with the most similar known one."""
    names = list(known)
    for key in given:
        if key not in names:
            raise ValueError(f"{where}: unknown key {key!r}; {did_you_mean(str(key), names, cutoff=0.4)}")
