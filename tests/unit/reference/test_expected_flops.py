"""FLOPs of a worker, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.expected_flops import dense_flops, worker_flops

ROWS, WIDTH, INNER = 5, 3, 4


class TwoBranches(nn.Module):
    """A stem, then an MLP of four neurons, in a list as Transformers' layers are, and a linear block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH))])
        self.block = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.layers[0](x)
        return (x + self.block(x)).sum()


def plan(regime: str) -> Plan:
    """Worker 0 has one of four neurons and no block, worker 1 three neurons and the block."""

    def neurons(start: int, length: int) -> tuple[Piece, ...]:
        up, down = "layers.0.0", "layers.0.1"
        return (
            Piece(f"{up}.weight", 0, start, length),
            Piece(f"{up}.bias", 0, start, length),
            Piece(f"{down}.weight", 1, start, length),
        )

    block = (Piece("block.weight", None, 0, WIDTH**2), Piece("block.bias", None, 0, WIDTH))
    units = (Unit("few", neurons(0, 1)), Unit("many", neurons(1, 3)), Unit("block", block))
    return Plan(regime, "block", 2, 1, 0, units, ((0,), (1,), (1,)), (0, 1))


# A product of [ROWS, a] and [a, b] takes 2 ROWS a b. The stem's input has no gradient, so it takes two products, all
# else three: the output, the gradient of the inputs, that of the weights.
STEM, MLP, BLOCK = (2 * ROWS * size for size in (WIDTH**2, 2 * WIDTH * INNER, WIDTH**2))


@pytest.mark.parametrize(
    ("regime", "expected"),
    [
        ("forward", (2 * STEM + 3 * MLP // 4, 2 * STEM + 3 * 3 * MLP // 4 + 3 * BLOCK)),
        ("backward", (2 * STEM + 2 * MLP + MLP // 4 + 2 * BLOCK, 2 * STEM + 2 * MLP + 3 * MLP // 4 + 3 * BLOCK)),
    ],
)
def test_flops_of_a_worker(regime: str, expected: tuple[int, int]) -> None:
    model = TwoBranches()
    dense = dense_flops(model, lambda: model(torch.ones(ROWS, WIDTH)))
    assert dense.total == 2 * STEM + 3 * MLP + 3 * BLOCK
    assert {name: flops for name, flops in dense.of_modules.items() if flops} == {
        "stem": STEM,
        "layers.0.0": MLP // 2,
        "layers.0.1": MLP // 2,
        "block": BLOCK,
    }
    assert tuple(worker_flops(model, plan(regime), worker, dense) for worker in (0, 1)) == expected
