"""One order of collectives: whatever each rank holds and however late it is, nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from sdp_deepspeed.fsdp.collective_order import gathered_ahead

Collective = tuple[str, int]  # "AG" or "RS", of a unit
NUM_SEEDS = 200


def one_after_the_other(num_units: int) -> list[tuple[int, int]]:
    return [(2 * index, 2 * index + 1) for index in range(num_units)]


def test_what_is_next_is_gathered_ahead_where_units_run_one_after_the_other() -> None:
    assert gathered_ahead(one_after_the_other(4)) == [False, True, True, True]
    assert gathered_ahead([]) == []


def test_units_that_run_into_each_other_are_not() -> None:
    """1 and 2 are a layer whose norms run first: begin 1, begin 2, end 1, end 2; or one inside of the other."""
    for inner in ([(2, 4), (3, 5)], [(2, 5), (3, 4)]):
        assert gathered_ahead([(0, 1), *inner, (6, 7), (8, 9)]) == [False, False, False, False, True]


class Model:
    """Holder sets of units, and which of them run into the one before."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.num_ranks = draw.randint(2, 6)
        num_units = draw.randint(2, 12)
        self.holders = [
            set(draw.sample(range(self.num_ranks), draw.randint(1, self.num_ranks))) for _ in range(num_units)
        ]
        spans: list[tuple[int, int]] = []
        while len(spans) < num_units:
            at = 4 * len(spans)
            crossed = draw.random() < 0.3 and len(spans) + 2 <= num_units
            spans += [(at, at + 2), (at + 1, at + 3)] if crossed else [(at, at + 1)]
        self.spans = spans

    def backward(self, rank: int, ahead: Sequence[bool]) -> Iterator[Collective]:
        """As FSDP2 issues them."""
        gathered: set[int] = set()
        held = [index for index, ranks in enumerate(self.holders) if rank in ranks]
        for pair in self._stretches():
            own = [index for index in pair if index in held]
            for index in own:
                if index not in gathered:
                    yield ("AG", index)
                previous = self._previous(index, held, ahead)
                if previous is not None and previous not in gathered:
                    gathered.add(previous)
                    yield ("AG", previous)
            for index in own:
                yield ("RS", index)

    def _previous(self, index: int, held: Sequence[int], ahead: Sequence[bool]) -> int | None:
        """What is gathered ahead; by FSDP2's own rule, where `ahead` is empty, what this rank ran before."""
        if not ahead:
            return max((other for other in held if other < index), default=None)
        return index - 1 if ahead[index] and index - 1 in held else None

    def _stretches(self) -> Iterator[tuple[int, ...]]:
        """The units, last first; those that run into each other together."""
        index = len(self.spans) - 1
        while index >= 0:
            crossed = index > 0 and self.spans[index - 1][1] > self.spans[index][0]
            yield (index, index - 1) if crossed else (index,)
            index -= 2 if crossed else 1

    def hangs(self, programs: Sequence[Sequence[Collective]], draw: random.Random) -> bool:
        """Whether ranks that issue these, each waiting for the one before, come to no end; whoever is ready may be
        late."""
        places = [0] * self.num_ranks
        while True:
            waiting = {
                rank: program[place]
                for rank, (program, place) in enumerate(zip(programs, places, strict=True))
                if place < len(program)
            }
            if not waiting:
                return False
            ready = [c for c in {*waiting.values()} if all(waiting.get(rank) == c for rank in self.holders[c[1]])]
            if not ready:
                return True
            chosen = draw.choice(sorted(ready))
            for rank in self.holders[chosen[1]]:
                places[rank] += 1


def position(collective: Collective) -> tuple[int, int]:
    """In the sequence of the proof, where all units are apart."""
    kind, unit = collective
    return (-unit, 0) if kind == "AG" else (-unit + 1, 1)


@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(0, NUM_SEEDS, 50)], ids=str)
def test_no_rank_waits_for_ever(seeds: range) -> None:
    for seed in seeds:
        model, draw = Model(seed), random.Random(seed)
        ahead = gathered_ahead(model.spans)
        programs = [list(model.backward(rank, ahead)) for rank in range(model.num_ranks)]
        assert not model.hangs(programs, draw), seed
        if all(start == 4 * index for index, (start, _) in enumerate(model.spans)):
            assert all(program == sorted(program, key=position) for program in programs), seed


def test_by_fsdp2s_own_rule_some_would() -> None:
    """Else the test above would prove nothing."""
    models = [Model(seed) for seed in range(NUM_SEEDS)]
    hanging = [
        seed
        for seed, model in enumerate(models)
        if model.hangs([list(model.backward(rank, [])) for rank in range(model.num_ranks)], random.Random(seed))
    ]
    assert len(hanging) > NUM_SEEDS // 20
