"""Boxes between ranks, which are threads here: the right values, in messages that fit into a bucket."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.replan.catalog import Catalog
from sdp_deepspeed.replan.share import Share
from sdp_deepspeed.replan.transfer import Transfer
from tests.helpers.gatherers import outcomes_of
from tests.helpers.properties import examples
from tests.helpers.replanned_boxes import KEY, SHAPE, layouts
from tests.helpers.threads import Ranks

SIZE = 3
RANKS = Ranks(SIZE)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
CPU = torch.device("cpu")
NUM_QUESTIONS = 3  # collectives: how long requests are, the requests, how many rounds


def owned_by(boxes: list[Box], dense: torch.Tensor) -> Chunks:
    chunks = Chunks(SHAPE, dense.dtype)
    for box in boxes:
        chunks.add(box, dense[box.slices_in(Box.whole(SHAPE))].mT.contiguous().mT)  # in another order in memory
    return chunks


@given(layouts(SIZE), st.sampled_from(DTYPES), st.integers(0, SIZE - 1))
@examples(20)
def test_each_rank_gets_what_it_asks_for(layout: list[list[Box]], dtype: torch.dtype, needs_nothing: int) -> None:
    dense = (torch.arange(24) * 1.5 - 7).view(SHAPE).to(dtype)

    def work(rank: int, objects: Any) -> tuple[torch.Tensor, int, int]:
        owned = {KEY: owned_by(layout[rank], dense)}
        catalog = Catalog.gather(owned, objects)
        place = torch.zeros(SHAPE, dtype=dtype)
        wanted = [] if rank == needs_nothing else [(KEY, Box.whole(SHAPE), place)]
        share = Share.of(wanted, {KEY: list(owned[KEY].items())}, catalog)
        share.copy()
        transfer = Transfer(Communicator(RANKS.groups[rank], objects=objects), device=CPU, bucket_bytes=0)
        transfer.run(share, owned, catalog)
        return place, transfer.sent_bytes, share.num_bytes(catalog)

    outcomes = outcomes_of(SIZE, work)
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, Exception), outcomes
        expected = torch.zeros_like(dense) if rank == needs_nothing else dense
        assert torch.equal(outcome[0], expected)
    sent, least = (sum(outcome[index] for outcome in outcomes) for index in (1, 2))
    assert least <= sent <= least + 16 * SIZE * SIZE, "what must move, and less than 16 bytes between two ranks"


def test_messages_fit_into_a_bucket() -> None:
    """A large tensor of one rank goes to two others in many rounds; a round packs a bucket at most."""
    shape, bucket = (300, 100), 3 * 8192
    dense = torch.randn(shape)
    for group in RANKS.groups:
        group.sent.clear()

    def work(rank: int, objects: Any) -> torch.Tensor:
        chunks = Chunks(shape, torch.float32)
        if rank == 0:
            chunks.add(Box.whole(shape), dense)
        owned = {KEY: chunks}
        catalog = Catalog.gather(owned, objects)
        place = torch.zeros(shape)
        local = {KEY: list(chunks.items())}
        share = Share.of([(KEY, Box.whole(shape), place)], local, catalog)
        share.copy()
        transfer = Transfer(Communicator(RANKS.groups[rank], objects=objects), device=CPU, bucket_bytes=bucket)
        transfer.run(share, owned, catalog)
        return place

    assert all(torch.equal(place, dense) for place in outcomes_of(SIZE, work))
    sent = [group.sent[NUM_QUESTIONS:] for group in RANKS.groups]
    assert len({len(of_rank) for of_rank in sent}) == 1, "all ranks go through all rounds"
    assert max(sent[0]) <= bucket
    assert len(sent[0]) < 2 * 4 * dense.numel() / 8192, "messages are not much smaller than they may be"
    assert sum(sent[0]) == 2 * 4 * dense.numel()
    assert sum(map(sum, sent[1:])) == 0
