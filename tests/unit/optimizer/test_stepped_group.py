"""What the wrapped optimizer steps: views of fp32 weights, or a flat fp32 master; and handing it over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.places import PieceViews, side_by_side
from sdp_deepspeed.optimizer.stepped_group import SteppedGroup, check_fresh, repoint
from sdp_deepspeed.units import Piece

ROWS = Piece("w", 0, 1, 2)
COLUMNS = Piece("w", 1, 1, 2)
WHOLE = Piece("w", None, 0, 12)
BIAS = Piece("b", None, 0, 2)


def parameters_of(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.arange(12.0).view(4, 3).to(dtype)), "b": nn.Parameter(torch.ones(2).to(dtype))}


def weights(dtype: torch.dtype = torch.float32) -> PieceViews:
    """Of the dense model."""
    return PieceViews(parameters_of(dtype))


def stored_columns() -> tuple[nn.Parameter, PieceViews]:
    """As a rank stores columns that it holds: these alone, with the cut dim outermost."""
    parameters = parameters_of()
    parameters["w"].data = side_by_side([COLUMNS], parameters["w"].data)
    views = PieceViews(parameters)
    views.put([COLUMNS])
    return parameters["w"], views


@pytest.mark.parametrize(
    ("fragment", "dtype", "expected"),
    [
        (Fragment(WHOLE, 3, 7), torch.float32, True),
        (Fragment(ROWS, 1, 5), torch.float32, True),
        (Fragment(COLUMNS, 0, 8), torch.float32, False),  # of a tensor that is stored row by row
        (Fragment(WHOLE, 0, 12), torch.bfloat16, False),
        (Fragment(ROWS, 1, 5), torch.bfloat16, False),
    ],
)
def test_what_can_be_viewed_is_stepped_in_place(fragment: Fragment, dtype: torch.dtype, expected: bool) -> None:
    assert SteppedGroup([fragment], weights(dtype)).in_place is expected


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (1, 7), (3, 4)])
def test_stored_columns_can_be_viewed(start: int, stop: int) -> None:
    """Any stretch of them, over the border between columns too."""
    parameter, views = stored_columns()
    fragment = Fragment(COLUMNS, start, stop)
    group = SteppedGroup([fragment], views)
    assert group.in_place
    (view,) = group.tensors
    assert view.tolist() == [1.0, 4.0, 7.0, 10.0, 2.0, 5.0, 8.0, 11.0][start:stop]
    view.data.fill_(-1)
    assert int((parameter == -1).sum()) == stop - start


@pytest.mark.parametrize(
    ("fragment", "expected"),
    [(Fragment(WHOLE, 3, 7), [3.0, 4.0, 5.0, 6.0]), (Fragment(ROWS, 1, 5), [4.0, 5.0, 6.0, 7.0])],
)
def test_views_share_storage(fragment: Fragment, expected: list[Any]) -> None:
    parameters = parameters_of()
    (view,) = SteppedGroup([fragment], PieceViews(parameters)).tensors
    assert view.tolist() == expected
    view.data.fill_(-1)
    assert int((parameters["w"] == -1).sum()) == view.numel()


def test_fp32_weights_are_stepped_in_place() -> None:
    parameter, views = stored_columns()
    group = SteppedGroup([Fragment(COLUMNS, 1, 8), Fragment(BIAS, 1, 2)], views)
    assert group.in_place
    assert group.num_elements == 8
    group.set_flat_gradient(torch.arange(1.0, 9.0))
    torch.optim.SGD(group.tensors, lr=1.0).step()
    group.write_back()
    assert parameter.tolist() == [[1, -2], [3, 0], [5, 2], [7, 4]]
    assert views.tensors["b"].tolist() == [1, -7]
    assert all(tensor.grad is None for tensor in group.tensors)


def test_columns_of_a_tensor_stored_by_rows_keep_a_master() -> None:
    parameters = parameters_of()
    group = SteppedGroup([Fragment(COLUMNS, 0, 3), Fragment(BIAS, 0, 1)], PieceViews(parameters))
    assert not group.in_place
    assert [tensor.numel() for tensor in group.tensors] == [4]
    group.set_flat_gradient(torch.ones(4))
    torch.optim.SGD(group.tensors, lr=1.0).step()
    group.write_back()
    assert parameters["w"].tolist() == [[0, 0, 2], [3, 3, 5], [6, 6, 8], [9, 10, 11]]
    assert parameters["b"].tolist() == [0, 1]


def test_master_keeps_what_bf16_loses() -> None:
    """Near 1 bf16 has a spacing of 2**-8 below: four steps of 2**-10 show only together."""
    parameters = parameters_of(torch.bfloat16)
    group = SteppedGroup([Fragment(BIAS, 0, 2)], PieceViews(parameters))
    optimizer = torch.optim.SGD(group.tensors, lr=2.0**-10)
    for _ in range(4):
        group.set_flat_gradient(torch.ones(2))
        optimizer.step()
        group.write_back()
    assert parameters["b"].tolist() == [1 - 2**-8] * 2


def test_reload_master_takes_the_weights() -> None:
    parameters = parameters_of(torch.bfloat16)
    group = SteppedGroup([Fragment(WHOLE, 2, 5)], PieceViews(parameters))
    parameters["w"].data.fill_(7)
    group.reload_master()
    assert group.tensors[0].tolist() == [7, 7, 7]


def test_whole_gradients_of_stage_0() -> None:
    """Into one flat gradient of a master, or as they are where weights are stepped in place."""
    gradients = {"w": torch.arange(12.0).view(4, 3), "b": torch.tensor([20.0, 30.0])}
    fragments = [Fragment(COLUMNS, 0, 8), Fragment(BIAS, 0, 2)]
    for dtype in (torch.float32, torch.bfloat16):
        group = SteppedGroup(fragments, weights(dtype))
        group.set_gradients(PieceViews(gradients))
        assert flat_gradient(group) == [1, 4, 7, 10, 2, 5, 8, 11, 20, 30]
    _, views = stored_columns()
    group = SteppedGroup(fragments, views)
    assert group.in_place
    own = {"w": side_by_side([COLUMNS], gradients["w"]), "b": gradients["b"]}
    stored = PieceViews(own)
    stored.put([COLUMNS])
    group.set_gradients(stored)
    assert flat_gradient(group) == [1, 4, 7, 10, 2, 5, 8, 11, 20, 30]
    assert [t.grad.data_ptr() for t in group.tensors if t.grad is not None] == [t.data_ptr() for t in own.values()]


def test_what_all_holders_froze_is_not_stepped() -> None:
    """In place; in a flat master its gradient is zero. What one holder trained is stepped also where it is frozen."""
    gradients = {"w": torch.zeros(4, 3), "b": torch.tensor([0.0, 30.0])}
    fragments = [Fragment(WHOLE, 0, 12), Fragment(BIAS, 0, 2)]
    group = SteppedGroup(fragments, weights())
    group.set_gradients(PieceViews(gradients), {"w", "b"})
    assert [tensor.grad is None for tensor in group.tensors] == [True, False]
    group.set_gradients(PieceViews(gradients), {"b"})
    assert flat_gradient(group) == [0.0] * 13 + [30.0]
    group = SteppedGroup(fragments, weights(torch.bfloat16))
    group.set_gradients(PieceViews(gradients), {"w", "b"})
    assert flat_gradient(group) == [0.0] * 13 + [30.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_tensors_have_their_shapes(dtype: torch.dtype) -> None:
    """Also where their parts are in several segments, whose averages are apart (in place) or side by side."""
    views, shapes = weights(dtype), {"w": (4, 3), "b": (2,)}
    before = {name: tensor.detach().float().clone() for name, tensor in views.tensors.items()}
    group = SteppedGroup([Fragment(WHOLE, 0, 7), Fragment(WHOLE, 7, 12), Fragment(BIAS, 0, 2)], views, shapes=shapes)
    assert group.fragments == [Fragment(WHOLE, 0, 12), Fragment(BIAS, 0, 2)]
    assert [tuple(tensor.shape) for tensor in group.tensors] == [(4, 3), (2,)]
    flat = torch.arange(1.0, 15.0)
    group.set_flat_gradient(*(flat.split([7, 5, 2]) if group.in_place else [flat]))
    assert [None if t.grad is None else t.grad.tolist() for t in group.tensors] == [
        [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]],
        [13, 14],
    ]
    torch.optim.SGD(group.tensors, lr=1.0).step()
    group.write_back()
    assert torch.equal(views.tensors["w"].float(), before["w"] - flat[:12].view(4, 3))
    assert torch.equal(views.tensors["b"].float(), before["b"] - flat[12:])
    views.tensors["w"].data = views.tensors["w"].data.clone() + 1
    group.link()
    group.reload_master()
    assert torch.equal(group.tensors[0], views.tensors["w"].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_tensors_of_stage_0(dtype: torch.dtype) -> None:
    """What this rank steps may be in any order of parts; a number is stepped as a list of one."""
    parameters = parameters_of(dtype) | {"s": nn.Parameter(torch.tensor(3.0, dtype=dtype))}
    gradients = {"w": torch.arange(12.0).view(4, 3), "b": torch.tensor([20.0, 30.0]), "s": torch.tensor(40.0)}
    number = Fragment(Piece("s", None, 0, 1), 0, 1)
    fragments = [Fragment(WHOLE, 0, 5), Fragment(BIAS, 0, 2), number, Fragment(WHOLE, 5, 12)]
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    group = SteppedGroup(fragments, PieceViews(parameters), shapes=shapes)
    group.set_gradients(PieceViews(gradients))
    assert [None if t.grad is None else t.grad.tolist() for t in group.tensors] == [
        gradients["w"].tolist(),
        [20, 30],
        [40],
    ]


def flat_gradient(group: SteppedGroup) -> list[float]:
    found: list[float] = torch.cat([tensor.grad for tensor in group.tensors if tensor.grad is not None]).tolist()
    return found


def test_link_follows_replaced_storage() -> None:
    """Others replace `param.data` behind us; a step after `link` must reach the new storage."""
    parameters = parameters_of()
    group = SteppedGroup([Fragment(WHOLE, 0, 12)], PieceViews(parameters))
    parameters["w"].data = torch.zeros(4, 3)
    step_once(group, 12)
    assert bool((parameters["w"] == -1).all())
    parameter, views = stored_columns()
    group = SteppedGroup([Fragment(COLUMNS, 0, 8)], views)
    parameter.data = torch.zeros_like(parameter)  # keeps the order in memory, as clone() does
    step_once(group, 8)
    assert bool((parameter == -1).all())


def step_once(group: SteppedGroup, num_elements: int) -> None:
    group.link()
    group.set_flat_gradient(torch.ones(num_elements))
    torch.optim.SGD(group.tensors, lr=1.0).step()


def test_storage_of_another_order_is_an_error() -> None:
    """A flat copy would be stepped, and the weights would stay as they are."""
    parameter, views = stored_columns()
    group = SteppedGroup([Fragment(COLUMNS, 0, 8)], views)
    parameter.data = parameter.data.contiguous()
    with pytest.raises(RuntimeError, match="another memory order"):
        group.link()


def test_a_group_of_which_this_rank_steps_nothing() -> None:
    group = SteppedGroup([], weights())
    assert group.tensors == []
    group.link()
    group.set_flat_gradient(torch.empty(0))
    group.set_gradients(PieceViews({}))
    group.write_back()
    group.reload_master()


def groups_of(parameters: dict[str, nn.Parameter]) -> list[SteppedGroup]:
    return [
        SteppedGroup([Fragment(WHOLE, 4, 9)], PieceViews(parameters)),
        SteppedGroup([Fragment(BIAS, 0, 1)], PieceViews(parameters)),
    ]


def param_groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [parameters["w"]], "lr": 0.5}, {"params": [parameters["b"]], "weight_decay": 0.1}]


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop"])
def test_repointed_optimizer_is_as_if_built_for_the_fragments(kind: str) -> None:
    """Options stay, the group objects stay (LR schedulers hold them), and steps equal those of a fresh optimizer."""
    parameters = parameters_of()
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
    parameters = parameters_of()
    optimizer = torch.optim.Adagrad(param_groups(parameters), initial_accumulator_value=4.0)
    groups = groups_of(parameters)
    repoint(optimizer, groups)
    assert optimizer.state[groups[0].tensors[0]]["sum"].tolist() == [4.0] * 5


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "SGD"])
def test_a_stepped_optimizer_is_refused(kind: str) -> None:
    parameters = parameters_of()
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(param_groups(parameters), lr=0.1, **options)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(ValueError, match="already holds state for 2 parameters"):
        check_fresh(optimizer)
