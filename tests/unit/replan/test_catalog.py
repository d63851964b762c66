"""What there is before a re-plan: what a rank may take from itself, and what all ranks send."""

from __future__ import annotations

from typing import Any

import torch

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState
from sdp_deepspeed.distributed.agreement import OneRank
from sdp_deepspeed.replan.catalog import Catalog, OwnState
from tests.helpers.trained_states import SHAPE, one_rank


def test_own_state_is_views_of_what_lives() -> None:
    trained = one_rank(dtype=torch.bfloat16)
    trained.step()
    chunks = trained.rank_chunks()
    own = OwnState.of(chunks, OptimizerState(trained.optimizer, chunks), own_buffers=False)
    kinds = {key.partition("/")[0] for key in own.owned}
    assert kinds == {"weight", "master", "exp_avg", "exp_avg_sq"}
    for key in own.owned:
        assert key in own.local
    with torch.no_grad():
        trained.module.get_parameter("shared").fill_(3)
    (box, values), *_ = own.local["weight/shared"]
    assert box == Box.whole(SHAPE)
    assert bool((values == 3).all()), "a copy would take as much memory again"


def test_buffers_are_one_s_own_where_the_plan_stays() -> None:
    """Else the writer's, which this rank is, once; with its own it has them among what it stores, too."""
    trained = one_rank()
    chunks = trained.rank_chunks()
    number = [
        len(OwnState.of(chunks, OptimizerState(trained.optimizer, chunks), own_buffers=own).local["weight/num_seen"])
        for own in (False, True)
    ]
    assert number == [1, 2]


def test_the_catalog_of_all_ranks() -> None:
    trained = one_rank()
    trained.step()
    chunks = trained.rank_chunks()
    own = OwnState.of(chunks, OptimizerState(trained.optimizer, chunks), own_buffers=False)
    catalog = Catalog.gather(own.owned, OneRank())
    assert not list(catalog.gaps())
    stored: dict[str, Any] = dict(catalog.metadata().state_dict_metadata)
    assert stored.keys() == own.owned.keys()
    assert tuple(stored["exp_avg/cut"].size) == SHAPE
    assert stored["weight/num_seen"].properties.dtype == torch.float32
