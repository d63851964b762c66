"""Layers of the package, read from the source: pure modules know neither DeepSpeed nor torch.distributed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sdp_deepspeed

PACKAGE = Path(sdp_deepspeed.__file__).parent
HOSTS = ("deepspeed", "torch.distributed", "transformers", "accelerate")

# Modules and folders that may import no host at all, whatever they import of ours included.
PURE = (
    "config",
    "units",
    "plan",
    "plan_json",
    "planning",
    "assignment",
    "assignment_graph",
    "assignment_problem",
    "assignment_search",
    "estimate",
    "estimate_table",
    "support",
    "support_cells",
    "support_rows",
    "support_table",
    "reference",
    "theory",
    "segments",
    "places",
    "exchange",
    "gradients",
    "param_groups",
    "fetch",
    "stepping",
    "communicator",
    "gate",
    "agreement",
    "architectures",
    "masking",
    "dense",
    "deferred",
    "deferred_program",
    "start",
    "averaging",
    "backward_reduction",
    "model_parallel",
    "placement",
    "shards",
    "state_dicts",
)
# DeepSpeed is named by these only; everything else gets what it needs handed in.
MAY_NAME_DEEPSPEED = {
    "__init__",
    "checkpoint",  # its calls are methods of the engine
    "engine",
    "optimizer",
    "seam",
    "settings",
    "tensor_parallel",
    "training",
}


def modules() -> dict[str, Path]:
    """Dotted names inside the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imports_of(name: str, source: str, *, is_package: bool = False) -> Iterator[str]:
    """Absolute names of what a module imports, in functions too, `if TYPE_CHECKING` left out."""
    tree = ast.parse(source)
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    here = ["sdp_deepspeed", *name.split(".")] if name != "__init__" else ["sdp_deepspeed", "__init__"]
    package = here if is_package else here[:-1]
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_below(name: str, tops: tuple[str, ...]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def breaches(name: str, source: str, *, is_package: bool = False) -> list[str]:
    return [found for found in imports_of(name, source, is_package=is_package) if is_below(found, HOSTS)]


def read(name: str) -> tuple[str, bool]:
    path = modules()[name]
    return path.read_text(encoding="utf-8"), path.name == "__init__.py" and name != "__init__"


def ours(name: str) -> set[str]:
    """Modules of ours that `name` imports."""
    source, is_package = read(name)
    known = modules()
    found = set()
    for imported in imports_of(name, source, is_package=is_package):
        parts = imported.split(".")
        if parts[0] == "sdp_deepspeed":
            inside = [".".join(parts[1:stop]) for stop in range(len(parts), 1, -1)]
            found |= {next((module for module in inside if module in known), "__init__")}
    return found - {name}


def all_of_ours(name: str) -> set[str]:
    """`name` and everything of ours that it imports, directly or not; the light `__init__` is no part of it."""
    reached, left = set(), [name]
    while left:
        module = left.pop()
        if module not in reached and module != "__init__":
            reached.add(module)
            left += ours(module)
    return reached


def pure_modules() -> list[str]:
    return [name for name in modules() if name.split(".")[0] in PURE]


def test_the_list_is_true() -> None:
    assert {name.split(".")[0] for name in pure_modules()} == set(PURE)


@pytest.mark.parametrize("name", pure_modules())
def test_pure_modules_import_no_host(name: str) -> None:
    for module in all_of_ours(name):
        source, is_package = read(module)
        assert not breaches(module, source, is_package=is_package), f"{name} imports {module}"


def test_deepspeed_is_named_in_few_places() -> None:
    named = set()
    for name in modules():
        source, is_package = read(name)
        if any(is_below(found, ("deepspeed",)) for found in imports_of(name, source, is_package=is_package)):
            named.add(name.split(".")[0])
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
    assert breaches("plan", f"import torch\n{line}\n")


def test_relative_imports_are_followed() -> None:
    assert list(imports_of("masking.block", "from ..plan import Plan\nfrom . import x")) == [
        "sdp_deepspeed.plan.Plan",
        "sdp_deepspeed.masking.x",
    ]
    assert list(imports_of("masking", "from .block import A", is_package=True)) == ["sdp_deepspeed.masking.block.A"]
    assert not breaches("plan", "if TYPE_CHECKING:\n    import deepspeed\n")
    assert {"plan", "units", "places", "architectures", "masking.neuron"} <= all_of_ours("masking.mask")


def test_files_stay_readable() -> None:
    """STYLE.md: 300 lines is the limit."""
    long = {
        path.name: length
        for folder in (PACKAGE, Path(__file__).parent)
        for path in folder.rglob("*.py")
        if (length := len(path.read_text(encoding="utf-8").splitlines())) > 300
    }
    assert not long
