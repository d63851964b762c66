"""The floors of the package, read from the source: who may import whom, no circles, and who knows which host."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.repository import FLOORS, PACKAGE, TESTS

HOSTS = ("deepspeed", "torch.distributed", "transformers", "accelerate")

# As FLOORS, inside a room that has folders.
INNER_FLOORS = {"checkpoint": ("__main__", "checkpointer", "interop", "save", "load", "state", "storage")}
# Rooms that know no host at all, whatever they import of ours included.
PURE = (
    "architectures",
    "atomic_files",
    "command_parser",
    "config",
    "config_errors",
    "coverage",
    "deferred_init",
    "distributed",
    "estimate",
    "exchange",
    "folder_lock",
    "layout",
    "lock_owner",
    "masking",
    "messages",
    "plan",
    "reference",
    "sizes",
    "support",
    "units",
    "version",
)
# DeepSpeed is named by these only; everything else gets what it needs handed in.
MAY_NAME_DEEPSPEED = {"__init__", "checkpoint", "engine", "optimizer", "tensor_parallel", "training"}


@cache
def modules() -> dict[str, Path]:
    """Dotted names inside the package; a room is the name of its `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


@cache
def imports_in(source: str, *, for_types: bool) -> tuple[str, ...]:
    """Absolute names of what a module imports, in functions too.

    Args:
        for_types: with what stands below `if TYPE_CHECKING`.
    """
    nodes = list(ast.walk(ast.parse(source)))
    typing_only = {
        inner
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found: list[str] = []
    for node in nodes:
        if node in typing_only and not for_types:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import: {ast.unparse(node)}"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def is_below(name: str, tops: tuple[str, ...]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def breaches(source: str) -> list[str]:
    return [found for found in imports_in(source, for_types=False) if is_below(found, HOSTS)]


@cache
def read(name: str) -> str:
    return modules()[name].read_text(encoding="utf-8")


@cache
def ours(name: str, *, for_types: bool) -> frozenset[str]:
    """Modules of ours that `name` imports."""
    known, found = modules(), set()
    for imported in imports_in(read(name), for_types=for_types):
        parts = imported.split(".")
        if parts[0] == "sdp_deepspeed":
            inside = [".".join(parts[1:stop]) for stop in range(len(parts), 1, -1)]
            found.add(next((module for module in inside if module in known), "__init__"))
    return frozenset(found - {name})


def all_of_ours(name: str) -> set[str]:
    """`name` and everything of ours that it imports, directly or not; the light `__init__` is no part of it."""
    reached: set[str] = set()
    left = [name]
    while left:
        module = left.pop()
        if module not in reached and module != "__init__":
            reached.add(module)
            left += ours(module, for_types=False)
    return reached


def room_of(name: str) -> str:
    return name.split(".")[0]


def test_every_room_has_a_floor() -> None:
    assert {room_of(name) for name in modules()} <= set(FLOORS)
    assert len(set(FLOORS)) == len(FLOORS)
    assert set(PURE) <= set(FLOORS)


@pytest.mark.parametrize("name", modules())
def test_rooms_import_what_stands_below(name: str) -> None:
    """Imports for types count: who needs another's type needs its room."""
    for imported in ours(name, for_types=True):
        here, there = FLOORS.index(room_of(name)), FLOORS.index(room_of(imported))
        assert here <= there, f"{name} imports {imported}, which stands above it"


@pytest.mark.parametrize("room", INNER_FLOORS)
def test_floors_inside_a_room(room: str) -> None:
    floors = INNER_FLOORS[room]
    for name in modules():
        for imported in ours(name, for_types=True) if is_below(name, (room,)) and name != room else ():
            if is_below(imported, (room,)):
                here, there = (floors.index(module.split(".")[1]) for module in (name, imported))
                assert here <= there, f"{name} imports {imported}, which stands above it"


def test_there_is_no_circle() -> None:
    """Neither between rooms, which the floors say already, nor between the modules of a room."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for imported in sorted(ours(name, for_types=True)):
                visit(imported, (*path, name))
            done.add(name)

    for name in modules():
        visit(name, ())


@pytest.mark.parametrize("name", [name for name in modules() if room_of(name) in PURE])
def test_pure_rooms_import_no_host(name: str) -> None:
    for module in all_of_ours(name):
        assert not breaches(read(module)), f"{name} imports {module}"


def test_deepspeed_is_named_in_few_places() -> None:
    named = {
        room_of(name)
        for name in modules()
        if any(is_below(found, ("deepspeed",)) for found in imports_in(read(name), for_types=True))
    }
    assert named <= MAY_NAME_DEEPSPEED, f"new: {sorted(named - MAY_NAME_DEEPSPEED)}"


@pytest.mark.parametrize(
    "line",
    [
        "import deepspeed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "def f():\n    from deepspeed.runtime.engine import DeepSpeedEngine",
        "try:\n    import transformers\nexcept ImportError:\n    pass",
    ],
)
def test_a_breach_is_found(line: str) -> None:
    assert breaches(f"import torch\n{line}\n")


def test_what_is_read_from_a_source() -> None:
    types = "if TYPE_CHECKING:\n    import deepspeed\n"
    assert not breaches(types)
    assert imports_in(types, for_types=True) == ("deepspeed",)
    assert {"plan.plan", "units", "layout.places", "architectures", "masking.neuron"} <= all_of_ours("masking.mask")
    with pytest.raises(AssertionError, match="relative"):
        imports_in("from ..plan import Plan", for_types=True)


def constructors(source: str) -> Iterator[tuple[str, list[str]]]:
    """Class names and what their `__init__` takes besides self. Dataclasses are the objects that long lists become."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    arguments = [*item.args.posonlyargs, *item.args.args[1:], *item.args.kwonlyargs]
                    yield node.name, [argument.arg for argument in arguments]


@pytest.mark.parametrize("name", modules())
def test_no_constructor_takes_more_than_six(name: str) -> None:
    for owner, arguments in constructors(read(name)):
        assert len(arguments) <= 6, f"{owner} takes {arguments}: make an object of what belongs together"


def test_files_stay_readable() -> None:
    """300 lines is the limit."""
    long = {
        str(path): length
        for folder in (PACKAGE, TESTS, *(TESTS.parent / name for name in ("benchmarks", "configs", "launch")))
        for path in folder.rglob("*.py")
        if (length := len(path.read_text(encoding="utf-8").splitlines())) > 300
    }
    assert not long
