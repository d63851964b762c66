"""Only regular files are read: every place that reads one says so, since a device or a pipe may never end."""

from __future__ import annotations

import ast

import pytest

from tests.helpers.repository import PACKAGE

READERS = ("read_text", "read_bytes")  # of a path
OPENERS = ("open", "safe_open", "load", "memmap")  # with a path as their first argument
# In memory, or not of a user: the kernel's own files, and a lock that was opened before.
EXEMPT = (
    "torch.load(buffer",
    "path.open('rb')",
    "files.open(path, 'rb')",
    "Path('/proc/sys/kernel/random/boot_id').read_text",
    "(_PROC / ",
    "(_TASKS / ",
)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_careless(node: ast.Call) -> bool:
    name, owner = _name(node.func), node.func.value if isinstance(node.func, ast.Attribute) else None
    owner_text = "" if owner is None else ast.unparse(owner)
    if {"w", "wb", "a"} & {str(word.value) for word in node.args if isinstance(word, ast.Constant)}:
        return False
    if name in READERS:
        path = owner
    elif name in OPENERS and node.args and owner_text in ("", "torch", "np"):
        path = node.args[0]
    else:
        return name == "open" and owner_text not in ("os", "self")
    return not (isinstance(path, ast.Call) and _name(path.func) == "regular")


def careless_reads(source: str) -> list[str]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    texts = [ast.unparse(node) for node in calls if _is_careless(node)]
    return [text for text in texts if not text.startswith(EXEMPT)]


@pytest.mark.parametrize("module", sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")))
def test_only_regular_files_are_read(module: str) -> None:
    assert not careless_reads((PACKAGE / module).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source", ["path.read_text()", "open(path)", "torch.load(file)", "np.memmap(file)", "safe_open(a / b)", "p.open()"]
)
def test_a_careless_read_is_found(source: str) -> None:
    assert careless_reads(source)


@pytest.mark.parametrize(
    "source", ["regular(p).read_text()", "open(p, 'w')", "os.open(p, 0)", "torch.load(regular(p))", "load()"]
)
def test_what_is_careful_or_writes_is_not(source: str) -> None:
    assert not careless_reads(source)
