"""Every private name that we use of a host is listed and exists; one that disappeared is named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

import sdp_deepspeed
from sdp_deepspeed.engine import private_api
from sdp_deepspeed.engine.host_engine import HostEngine

PACKAGE = Path(sdp_deepspeed.__file__).parent
HOSTS = ("deepspeed", "torch", "transformers", "accelerate")
LISTED = (*private_api.PRIVATE_NAMES, *private_api.PRIVATE_NAMES_OF_TOOLS)
# Documented by DeepSpeed for everybody.
PUBLIC = {
    "deepspeed.comm",
    "deepspeed.utils.log_dist",
    "deepspeed.utils.logger",
    "deepspeed.accelerator.get_accelerator",
}


def test_nothing_is_missing() -> None:
    assert private_api.missing_names(LISTED) == []


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
