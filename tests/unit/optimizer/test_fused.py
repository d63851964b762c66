"""torch's Adam and AdamW take their fused kernel, unless the user chose another; the numbers stay."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sdp_deepspeed.optimizer.fused import avoid_fused, prefer_fused
from tests.helpers.trained_states import Trained, one_rank

KINDS = [torch.optim.Adam, torch.optim.AdamW]


class Own(torch.optim.AdamW):
    """A user's, which may do anything with its options."""


class Calls(TorchDispatchMode):
    """Names of what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def chosen(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> tuple[Any, Any]:
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], **options)
    prefer_fused(optimizer)
    return optimizer.param_groups[0].get("fused"), optimizer.param_groups[0].get("foreach")


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_taken_where_nobody_chose(kind: type[torch.optim.Optimizer]) -> None:
    assert chosen(kind) == (True, None)
    assert chosen(kind, amsgrad=True, maximize=True) == (True, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"capturable": True}, {"differentiable": True}]
)
def test_who_chose_gets_it(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], **options)
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    prefer_fused(optimizer)
    assert {key: optimizer.param_groups[0][key] for key in before} == before


def test_of_other_optimizers_nothing_is_known() -> None:
    assert chosen(torch.optim.SGD) == chosen(torch.optim.Adagrad) == chosen(Own) == (None, None)


def test_each_group_decides_for_itself() -> None:
    groups: list[dict[str, Any]] = [{"params": [torch.nn.Parameter(torch.ones(3))]} for _ in range(2)]
    optimizer = torch.optim.Adam([groups[0] | {"foreach": True}, groups[1]])
    prefer_fused(optimizer)
    assert [options["fused"] for options in optimizer.param_groups] == [None, True]


def test_devices_without_the_kernel_keep_theirs() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.empty(3, device="meta"))])
    prefer_fused(optimizer)
    assert optimizer.param_groups[0]["fused"] is None


def stepped(state: Trained, num_steps: int = 3) -> list[str]:
    """What the last step runs."""
    for _ in range(num_steps - 1):
        state.step()
    with Calls() as calls:
        state.step()
    return calls.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_one_kernel_for_each_group(kind: type[torch.optim.Optimizer], stage: int, dtype: torch.dtype) -> None:
    """Of the flat master, or of all views of fp32 weights; and to rounding the numbers of the kernels beside it."""
    ours, plain = one_rank(kind=kind, stage=stage, dtype=dtype), one_rank(kind=kind, stage=stage, dtype=dtype)
    plain.optimizer.optimizer.param_groups[0]["fused"] = False
    (group,) = ours.optimizer.groups
    fused = [name for name in stepped(ours) if "_fused_adam" in name]
    assert len(fused) == 1, fused
    assert not [name for name in stepped(plain) if "_fused_adam" in name]
    assert len(group.tensors) == (1 if dtype == torch.bfloat16 else len(group.fragments))
    found, expected = ours.tensors(), plain.tensors()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Three steps of lr 0.1 with one rounding of fp32 each; weights in bf16 may round to the neighbor.
        spacing = 2**-8 if value.dtype == torch.bfloat16 else 8 * 2**-24
        assert torch.allclose(found[name], value, rtol=spacing, atol=spacing), name


def test_not_where_several_ranks_step_the_same() -> None:
    """Holders of a unit may have it at different places of flat masters, where the kernel may round otherwise."""
    assert not [name for name in stepped(one_rank(stage=0)) if "_fused_adam" in name]


def test_there_by_choice_where_weights_are_stepped_in_place() -> None:
    """Each tensor is one of its own, alike on all holders."""
    kind: Any = partial(torch.optim.AdamW, fused=True)
    assert [name for name in stepped(one_rank(stage=0, kind=kind)) if "_fused_adam" in name]


@pytest.mark.parametrize("kind", [*KINDS, torch.optim.SGD])
def test_not_there_on_a_cpu_by_choice(kind: Any) -> None:
    """As the Trainer's own optimizer would have it; on a GPU the place of an element does not matter."""
    fused: Any = partial(kind, fused=True)
    state = one_rank(stage=0, dtype=torch.bfloat16, kind=fused)
    assert not [name for name in stepped(state) if "_fused_" in name]
    assert [options["fused"] for options in state.optimizer.param_groups] == [False]
    on_gpu = kind([torch.nn.Parameter(torch.empty(3, device="meta"))])
    on_gpu.param_groups[0]["fused"] = True
    avoid_fused(on_gpu)
    assert on_gpu.param_groups[0]["fused"] is True
