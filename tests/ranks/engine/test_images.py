"""Models of images in the engine: running statistics, buffers that no state dict has, parameters of a layer itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_deepspeed.config import MODES
from tests.helpers.models import batches, inputs_of
from tests.helpers.more_models import SPECIMENS
from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, sgd, train

NAMES = ("resnet", "swin", pytest.param("convnext", marks=pytest.mark.slow))
pytestmark = pytest.mark.world(2)


def start(name: str, regime: str, strategy: str, **block: Any) -> Any:
    return engine_of(sgd(regime=regime, strategy=strategy, **block), SPECIMENS[name].build())


@pytest.mark.slow
@pytest.mark.parametrize(("regime", "strategy"), MODES)
def test_agrees_with_the_reference_in_bf16(rank: Rank, regime: str, strategy: str) -> None:
    """In small steps: batch norms of few numbers. In fp32 it is in the oracle's sample."""
    check_case(Case(2, 1, regime, strategy, "resnet", optimizer="SGD", precision="bf16", clip=0.1), rank)


@torch.no_grad()
def logits(model: Any, rank: Rank) -> torch.Tensor:
    (batch,) = next(batches(rank.size, 1))[rank.rank]
    model.eval()
    found: torch.Tensor = model(**inputs_of(model, batch)).logits
    model.train()
    return found


def stored(engine: Any) -> dict[str, torch.Tensor]:
    """All that this rank stores, buffers too, by the pieces of the plan."""
    mask = engine.mask
    pieces = [piece for name in mask.shapes for piece, _ in mask.pieces_of(name) if mask.is_stored(piece)]
    return {f"{piece.parameter}[{piece.dim}, {piece.start}]": mask.view(piece).clone() for piece in pieces}


@pytest.mark.parametrize("name", NAMES)
def test_resumes_and_loads_without_us(rank: Rank, name: str) -> None:
    """Bit for bit on the same layout; with the dense model in another mode, and as Transformers reads it."""
    for mode, another in ((MODES[1], MODES[2]), (MODES[3], MODES[0])):
        engine = start(name, *mode)
        train(engine, num_steps=2)
        folder, dense = rank.folder / "-".join(mode), dense_state(engine)
        engine.save_checkpoint(str(folder))
        engine.save_pretrained(folder / "export")
        dist.barrier()
        found = logits(SPECIMENS[name].model.from_pretrained(folder / "export"), rank)
        assert torch.equal(logits(engine, rank), found)
        resumed, other = start(name, *mode), start(name, *another)
        resumed.load_checkpoint(str(folder))
        assert_identical(stored(resumed), stored(engine))
        assert train(engine, num_steps=1, first=2) == train(resumed, num_steps=1, first=2)
        assert_identical(stored(resumed), stored(engine))
        other.load_checkpoint(str(folder))
        assert_identical(dense_state(other), dense)
