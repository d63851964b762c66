"""A group of DeepSpeed's waits as long as the run's own group does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_deepspeed.distributed.step_limit import take_limit_of_the_run

RUN = timedelta(seconds=77)


@pytest.fixture
def run() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=RUN)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(("given", "expected"), [({}, RUN), ({"timeout": timedelta(seconds=5)}, timedelta(seconds=5))])
def test_a_group_without_a_limit_of_its_own_takes_that_of_the_run(given: dict[str, Any], expected: timedelta) -> None:
    group: Any = dist.new_group([0], **given)
    take_limit_of_the_run(dist, group)
    assert group._get_backend(torch.device("cpu")).options._timeout == expected
