"""Every private name that we use of a host is listed and exists; one that disappeared is named."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

from sdp_deepspeed.engine import private_api
from sdp_deepspeed.engine.host_engine import HostEngine
from tests.helpers.repository import PACKAGE

HOSTS = ("deepspeed", "torch", "transformers", "accelerate")
LISTED = (*private_api.PRIVATE_NAMES, *private_api.PRIVATE_NAMES_OF_TOOLS)
PYTHONS = {"_initializing", "_exit", "_current_frames"}  # of a module's spec, of os, of sys
# Documented by DeepSpeed for everybody.
PUBLIC = {
    "deepspeed.comm",
    "deepspeed.utils.log_dist",
    "deepspeed.utils.logger",
    "deepspeed.accelerator.get_accelerator",
}


def test_nothing_is_missing() -> None:
    assert private_api.missing_names(LISTED) == []


@pytest.mark.parametrize(("module", "name"), private_api.PRIVATE_ATTRIBUTES)
def test_a_host_sets_the_attributes_of_its_instances(module: str, name: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert re.search(rf"\b{name}\b", Path(spec.origin).read_text(encoding="utf-8")), f"{module} has no {name}"


def used_names(source: str) -> Iterator[str]:
    """Dotted names of hosts in a source that are private: with an underscore, or anything inside of DeepSpeed."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in HOSTS:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                inside = node.module.startswith("deepspeed") or re.search(r"\._[a-z]", name)
                if inside and name not in PUBLIC and name not in HOSTS:
                    yield name
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*", name := ast.unparse(node)):
            yield name
        elif isinstance(node, ast.Attribute) and node.attr == "_get_default_store":
            yield f"torch.distributed.distributed_c10d.{node.attr}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_used_is_listed(path: Path) -> None:
    if path.name == "private_api.py":
        return
    listed = {f"{module}.{name}" for module, name in LISTED}
    for name in used_names(path.read_text(encoding="utf-8")):
        assert any(entry == name or entry.startswith(f"{name}.") for entry in listed), name


def own_names(tree: ast.AST) -> Iterator[str]:
    """What a module of ours defines: functions, classes, variables, and what its objects set on themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """Names with an underscore that are read or set: `x._name`, `getattr(x, "_name")`."""
    for node in ast.walk(tree):
        name: object = None
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if isinstance(name, str) and re.match("_[a-z]", name):
            yield name


def test_private_attributes_are_ours_or_listed() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    ours = {
        name
        for path, tree in trees.items()
        if path.name != "host_engine.py"  # the host's names, as a type
        for name in own_names(tree)
    }
    listed = {name.rpartition(".")[2] for _, name in (*LISTED, *private_api.PRIVATE_ATTRIBUTES)}
    used = {(name, path.name) for path, tree in trees.items() for name in private_attributes(tree)}
    others = {(name, path) for name, path in used if name not in ours | listed | PYTHONS}
    assert sorted((name, path) for name, path in others if not name.startswith("_sdp_")) == []


def test_the_typed_engine_is_the_real_one() -> None:
    """Every method that `HostEngine` promises is there, so that mypy does not follow a fiction."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    promised = {name for name, value in vars(HostEngine).items() if isinstance(value, FunctionType)}
    promised -= {"_no_init_or_replace_init", "_proto_hook"}  # typing's own
    assert "_configure_zero_optimizer" in promised
    assert {name for name in promised if not callable(getattr(DeepSpeedEngine, name, None))} == set()


def test_the_installed_versions_are_the_tested_ones() -> None:
    """CI runs with the pinned versions, so a new pin must be added to TESTED."""
    assert private_api.check_hosts() == []


@pytest.mark.parametrize(
    "name",
    [
        ("deepspeed.runtime.engine", "DeepSpeedEngine._gone"),
        ("deepspeed.runtime.engine", "Gone.step"),
        ("torch.nn", "Module()._gone"),
    ],
)
def test_what_disappeared_is_named(monkeypatch: pytest.MonkeyPatch, name: tuple[str, str]) -> None:
    monkeypatch.setattr(private_api, "PRIVATE_NAMES", (*private_api.PRIVATE_NAMES, name))
    assert private_api.missing_names(private_api.PRIVATE_NAMES) == [".".join(name)]
    with pytest.raises(
        RuntimeError, match=rf"lack {re.escape('.'.join(name))}.*tested are deepspeed .*here are deepspeed"
    ):
        private_api.check_hosts()


def test_a_module_that_disappeared_is_named() -> None:
    assert private_api.missing_names([("deepspeed.runtime.gone", "thing")]) == ["deepspeed.runtime.gone.thing"]


def test_another_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_api, "version", lambda host: "99.0+local")
    assert [text.split(" was not tested")[0] for text in private_api.check_hosts()] == [
        f"{host} 99.0+local" for host in private_api.TESTED
    ]
