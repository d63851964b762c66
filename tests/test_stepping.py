"""What the wrapped optimizer steps: views of fp32 weights, or a flat fp32 master; and handing it over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.segments import Fragment
from sdp_deepspeed.stepping import SteppedGroup, can_view, check_fresh, repoint, view_of
from sdp_deepspeed.units import Piece

ROWS = Piece("w", 0, 1, 2)
COLUMNS = Piece("w", 1, 1, 2)
WHOLE = Piece("w", None, 0, 12)


def weights(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.arange(12.0).view(4, 3).to(dtype)), "b": nn.Parameter(torch.ones(2).to(dtype))}


@pytest.mark.parametrize(
    ("fragment", "dtype", "expected"),
    [
        (Fragment(WHOLE, 3, 7), torch.float32, True),
        (Fragment(ROWS, 1, 5), torch.float32, True),
        (Fragment(COLUMNS, 0, 8), torch.float32, True),
        (Fragment(COLUMNS, 0, 5), torch.float32, False),  # ragged: no view of it exists
        (Fragment(WHOLE, 0, 12), torch.bfloat16, False),
    ],
)
def test_can_view(fragment: Fragment, dtype: torch.dtype, expected: bool) -> None:
    assert can_view(fragment, weights(dtype)["w"]) is expected


@pytest.mark.parametrize(
    ("fragment", "expected"),
    [
        (Fragment(WHOLE, 3, 7), [3.0, 4.0, 5.0, 6.0]),
        (Fragment(ROWS, 1, 5), [4.0, 5.0, 6.0, 7.0]),
        (Fragment(COLUMNS, 0, 8), [[1.0, 2.0], [4.0, 5.0], [7.0, 8.0], [10.0, 11.0]]),
    ],
)
def test_view_of_shares_storage(fragment: Fragment, expected: list[Any]) -> None:
    tensor = weights()["w"].data
    view = view_of(fragment, tensor)
    assert view.tolist() == expected
    view.fill_(-1)
    assert int((tensor == -1).sum()) == view.numel()


def test_fp32_weights_are_stepped_in_place() -> None:
    parameters = weights()
    group = SteppedGroup([Fragment(COLUMNS, 0, 8), Fragment(Piece("b", None, 0, 2), 1, 2)], parameters)
    assert group.in_place
    assert group.num_elements == 9
    group.set_flat_gradient(torch.arange(1.0, 10.0))
    torch.optim.SGD(group.tensors, lr=1.0).step()
    group.write_back()
    assert parameters["w"].tolist() == [[0, 0, 0], [3, 1, 1], [6, 2, 2], [9, 3, 3]]
    assert parameters["b"].tolist() == [1, -8]
    assert all(tensor.grad is None for tensor in group.tensors)


def test_ragged_columns_keep_a_master() -> None:
    parameters = weights()
    group = SteppedGroup([Fragment(COLUMNS, 0, 3)], parameters)
    assert not group.in_place
    group.set_flat_gradient(torch.ones(3))
    torch.optim.SGD(group.tensors, lr=1.0).step()
    group.write_back()
    assert parameters["w"].tolist() == [[0, 0, 1], [3, 3, 5], [6, 7, 8], [9, 10, 11]]


def test_master_keeps_what_bf16_loses() -> None:
    """Near 1 bf16 has a spacing of 2**-8 below: four steps of 2**-10 show only together."""
    parameters = weights(torch.bfloat16)
    group = SteppedGroup([Fragment(Piece("b", None, 0, 2), 0, 2)], parameters)
    optimizer = torch.optim.SGD(group.tensors, lr=2.0**-10)
    for _ in range(4):
        group.set_flat_gradient(torch.ones(2))
        optimizer.step()
        group.write_back()
    assert parameters["b"].tolist() == [1 - 2**-8] * 2


def test_reload_master_takes_the_weights() -> None:
    parameters = weights(torch.bfloat16)
    group = SteppedGroup([Fragment(WHOLE, 2, 5)], parameters)
    parameters["w"].data.fill_(7)
    group.reload_master()
    assert group.tensors[0].tolist() == [7, 7, 7]


def test_whole_gradients_of_stage_0() -> None:
    gradients = {"w": torch.arange(12.0).view(4, 3), "b": torch.tensor([20.0, 30.0])}
    for dtype in (torch.float32, torch.bfloat16):
        fragments = [Fragment(COLUMNS, 0, 8), Fragment(Piece("b", None, 0, 2), 0, 2)]
        group = SteppedGroup(fragments, weights(dtype))
        group.set_gradients(gradients)
        flat = torch.cat([tensor.grad.reshape(-1) for tensor in group.tensors if tensor.grad is not None])
        assert flat.tolist() == [1, 2, 4, 5, 7, 8, 10, 11, 20, 30]


def test_link_follows_replaced_storage() -> None:
    """Others replace `param.data` behind us; a step after `link` must reach the new storage."""
    parameters = weights()
    group = SteppedGroup([Fragment(WHOLE, 0, 12)], parameters)
    parameters["w"].data = torch.zeros(4, 3)
    group.link()
    group.set_flat_gradient(torch.ones(12))
    torch.optim.SGD(group.tensors, lr=1.0).step()
    assert bool((parameters["w"] == -1).all())


def test_a_group_of_which_this_rank_steps_nothing() -> None:
    group = SteppedGroup([], weights())
    assert group.tensors == []
    group.link()
    group.set_flat_gradient(torch.empty(0))
    group.set_gradients({})
    group.write_back()
    group.reload_master()


def groups_of(parameters: dict[str, nn.Parameter]) -> list[SteppedGroup]:
    return [
        SteppedGroup([Fragment(WHOLE, 4, 9)], parameters),
        SteppedGroup([Fragment(Piece("b", None, 0, 2), 0, 1)], parameters),
    ]


def param_groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [parameters["w"]], "lr": 0.5}, {"params": [parameters["b"]], "weight_decay": 0.1}]


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop"])
def test_repointed_optimizer_is_as_if_built_for_the_fragments(kind: str) -> None:
    """Options stay, the group objects stay (LR schedulers hold them), and steps equal those of a fresh optimizer."""
    parameters = weights()
    optimizer = getattr(torch.optim, kind)(param_groups(parameters), lr=0.1)
    before = list(optimizer.param_groups)
    groups = groups_of(parameters)
    repoint(optimizer, groups)
    assert all(now is then for now, then in zip(optimizer.param_groups, before, strict=True))
    assert [options["lr"] for options in optimizer.param_groups] == [0.5, 0.1]
    assert set(optimizer.state) <= {group.tensors[0] for group in groups}
    copies = {"w": nn.Parameter(parameters["w"].data.flatten()[4:9].clone()), "b": nn.Parameter(torch.ones(1))}
    expected = getattr(torch.optim, kind)(param_groups(copies), lr=0.1)
    for _ in range(3):
        groups[0].tensors[0].grad, copies["w"].grad = torch.full((5,), 2.0), torch.full((5,), 2.0)
        groups[1].tensors[0].grad, copies["b"].grad = torch.full((1,), 3.0), torch.full((1,), 3.0)
        optimizer.step()
        expected.step()
    assert torch.equal(parameters["w"].flatten()[4:9], copies["w"])
    assert parameters["w"].flatten()[[0, 3, 9, 11]].tolist() == [0, 3, 9, 11]
    assert parameters["b"].tolist() == [copies["b"].item(), 1.0]


def test_adagrad_keeps_its_initial_accumulator() -> None:
    parameters = weights()
    optimizer = torch.optim.Adagrad(param_groups(parameters), initial_accumulator_value=4.0)
    groups = groups_of(parameters)
    repoint(optimizer, groups)
    assert optimizer.state[groups[0].tensors[0]]["sum"].tolist() == [4.0] * 5


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "SGD"])
def test_a_stepped_optimizer_is_refused(kind: str) -> None:
    parameters = weights()
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(param_groups(parameters), lr=0.1, **options)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(ValueError, match="already holds state for 2 parameters"):
        check_fresh(optimizer)
