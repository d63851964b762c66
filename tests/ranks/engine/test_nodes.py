"""`"subnetworks": "nodes"`: four ranks that play nodes by LOCAL_WORLD_SIZE."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest

from sdp_deepspeed import fully_shard
from sdp_deepspeed.fsdp import sharded_model_of
from tests.helpers.models import config, llama
from tests.helpers.ranks import Rank
from tests.helpers.tensor_parallel_models import build
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

pytestmark = pytest.mark.world(4)
TWO, FOUR = (0, 0, 1, 1), (0, 1, 2, 3)
LOCAL: dict[str, Any] = {"local_steps": {"every": 2}}


@contextmanager
def nodes_of(size: int) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": f"{size}"}):
        yield


def on_nodes(**block: Any) -> Any:
    return engine_of(config(**{"coverage": 0.5, "subnetworks": "nodes"} | block))


def test_a_node_is_a_subnetwork_also_after_a_resume_on_others(rank: Rank) -> None:
    """As with the number of nodes; with and without local steps."""
    blocks: list[dict[str, Any]] = [LOCAL, {"regime": "backward"}]
    for index, block in enumerate(blocks):
        with nodes_of(2):
            engine = on_nodes(**block)
        assert engine.plan.subnetwork_of_rank == TWO
        number = on_nodes(**block, subnetworks=2)
        assert train(engine, num_steps=3) == train(number, num_steps=3)
        engine.save_checkpoint(f"{rank.folder}/{index}")
        with nodes_of(1):
            smaller = on_nodes(**block)
        assert smaller.plan.subnetwork_of_rank == FOUR
        smaller.load_checkpoint(f"{rank.folder}/{index}")
        assert_identical(dense_state(smaller), dense_state(engine))
        train(smaller, num_steps=1, first=3)


def test_in_schedules_and_replans(rank: Rank) -> None:
    phases = [{"until_step": 1, **LOCAL}, {"subnetworks": 4}]
    with nodes_of(2):
        engine = on_nodes(schedule=phases)
        assert engine.plan.subnetwork_of_rank == TWO
        train(engine, num_steps=2)
        assert engine.plan.subnetwork_of_rank == FOUR
        later = on_nodes(schedule=[{"until_step": 1, "subnetworks": 4}, {}])
        train(later, num_steps=2)
        assert later.plan.subnetwork_of_rank == TWO
        called = on_nodes(subnetworks=4)
        called.replan({"subnetworks": "nodes", **LOCAL})
        assert called.plan.subnetwork_of_rank == TWO


def test_with_fsdp2(rank: Rank) -> None:
    with nodes_of(2):
        model = fully_shard(llama(), None, {"coverage": 0.5, "subnetworks": "nodes"})
    assert sharded_model_of(model).plan.subnetwork_of_rank == TWO


def test_what_is_no_layout_is_refused_on_all_ranks(rank: Rank) -> None:
    refusal(ValueError, on_nodes, "subnetworks", "set LOCAL_WORLD_SIZE")
    with nodes_of(4):
        refusal(ValueError, on_nodes, "all 4 ranks are on one node")
        shard = partial(fully_shard, llama(), None, {"coverage": 0.5, "subnetworks": "nodes"})
        refusal(ValueError, shard, "all 4 ranks are on one node")
        engine = on_nodes(subnetworks=2)
        refusal(ValueError, partial(engine.replan, {"subnetworks": "nodes"}), "all 4 ranks are on one node")
        phases = [{"until_step": 1, "subnetworks": 2}, {}]
        refusal(ValueError, partial(on_nodes, schedule=phases), "schedule[1]", "all 4 ranks are on one node")
    with nodes_of(3 if rank.rank < 3 else 1):
        refusal(ValueError, on_nodes, "nodes have 1 and 3 of the 4 ranks")


def test_with_tensor_parallelism(rank: Rank) -> None:
    """Two data-parallel ranks of two tensor-parallel ones each. Last: DeepSpeed never forgets the groups of AutoTP."""
    settings = config(coverage=0.5, subnetworks="nodes") | {"tensor_parallel": {"autotp_size": 2}}
    with nodes_of(2):
        engine = engine_of(settings, build("llama"))
    assert engine.plan.subnetwork_of_rank == (0, 1)
    with nodes_of(1):
        refusal(ValueError, partial(engine_of, settings, build("llama")), "ranks of two nodes")
