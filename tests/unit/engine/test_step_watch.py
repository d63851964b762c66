"""A step's time, divided by marks of a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.engine.step_watch import HostClock, StepWatch, clock_of


class Clock(HostClock):
    """Stands still between `pass_`."""

    now = 0.0

    def mark(self) -> Any:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


class Work:
    """Takes a while to wait for."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.left = clock, seconds

    def wait(self) -> None:
        self.clock.pass_(self.left)


def one_step(clock: Clock, watch: StepWatch) -> None:
    """1 s forward, 2 s backward, 3 s between, 10 s of a step of which 4 s and 0.5 s wait for collectives."""
    watch.begin()
    clock.pass_(1)
    with watch.together():
        clock.pass_(2)
    clock.pass_(3)
    with watch.together():
        first, second = watch.metered(Work(clock, 4), 100), watch.metered(Work(clock, 0.5), 11)
        clock.pass_(5.5)
        first.wait()
        second.wait()


def test_a_step_is_divided() -> None:
    clock = Clock()
    watch = StepWatch(clock)
    clock.pass_(50)
    for _ in range(2):  # the second step remembers nothing of the first
        one_step(clock, watch)
        assert watch.seconds() == (16.0, 4.0, 4.5)
        assert watch.sent == 111


def test_a_step_that_fails_is_marked_to_its_end() -> None:
    clock = Clock()
    watch = StepWatch(clock)
    watch.begin()

    def fail() -> None:
        with watch.together():
            clock.pass_(2)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert watch.seconds() == (2.0, 0.0, 0.0)


def test_the_clock_of_a_cpu_goes_forward() -> None:
    clock = clock_of(torch.device("cpu"))
    assert clock.seconds(clock.mark(), clock.mark()) >= 0


class Dist:
    """Two ranks' worth of `torch.distributed`, of which this is the second."""

    def get_rank(self, group: Any) -> int:
        return 1

    def get_world_size(self, group: Any) -> int:
        return 2

    def all_to_all_single(self, *arguments: Any, **options: Any) -> Work:
        return Work(Clock(), 0)


def test_a_communicator_meters_what_goes_to_others() -> None:
    watch, group = StepWatch(Clock()), Communicator(Dist())
    sent, received = torch.zeros(7, dtype=torch.bfloat16), torch.zeros(7, dtype=torch.bfloat16)
    group.all_to_all(received, sent, [3, 4], [5, 2])
    assert watch.sent == 0
    group.meter = watch
    group.all_to_all(received, sent, [3, 4], [5, 2]).wait()
    assert watch.sent == 5 * 2, "five elements of two bytes, and not the two that stay"
