"""Tensors say their dtype and device: torch's defaults are the user's, who may have set others."""

from __future__ import annotations

import ast

import pytest
from torch.utils._device import _device_constructors

from tests.helpers.repository import PACKAGE

FACTORIES = {function.__name__ for function in _device_constructors()}  # which torch's default device changes


def careless_tensors(source: str) -> list[str]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        ast.unparse(node)
        for node in calls
        if isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in FACTORIES
        and not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}
    ]


@pytest.mark.parametrize("module", sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")))
def test_tensors_say_their_dtype_and_device(module: str) -> None:
    assert not careless_tensors((PACKAGE / module).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source", ["torch.empty(3)", "torch.zeros(2, device=d)", "torch.tensor([1.0], dtype=t)", "torch.randperm(4)"]
)
def test_a_careless_tensor_is_found(source: str) -> None:
    assert careless_tensors(source) == [source]


def test_a_careful_one_is_not() -> None:
    assert not careless_tensors("torch.empty(3, dtype=t, device=d); torch.empty_like(x); x.new_zeros(3)")
