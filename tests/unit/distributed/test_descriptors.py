"""The soft limit of open files is raised as far as ranks need; a hard limit below that is told."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from sdp_deepspeed.distributed import descriptors
from sdp_deepspeed.distributed.descriptors import RESERVE, allow_connections, needed_descriptors
from tests.helpers.repository import ROOT


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of this process, as if: the last is in force."""
    found = [(1024, 4096)]
    monkeypatch.setattr(descriptors, "num_open", lambda: 40)
    monkeypatch.setattr(resource, "getrlimit", lambda what: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, values: found.append(values))
    return found


def test_what_512_ranks_need() -> None:
    assert needed_descriptors(512) == 515


def test_few_ranks_change_nothing(limits: list[tuple[int, int]]) -> None:
    allow_connections(8, pytest.fail)
    assert limits == [(1024, 4096)]


def test_the_soft_limit_is_raised_as_far_as_needed(limits: list[tuple[int, int]]) -> None:
    allow_connections(512, pytest.fail)
    assert limits[1:] == [(40 + 515 + RESERVE, 4096)]
    allow_connections(512, pytest.fail, num_groups=3)
    assert limits[2:] == [(40 + 3 * 515 + RESERVE, 4096)]


AGENT = """
import os, resource, subprocess, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
rank = "from sdp_deepspeed.distributed.descriptors import allow_connections; allow_connections(8, print)"
subprocess.run([sys.executable, "-c", rank], env=os.environ | {"RANK": "0"}, check=True)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("keeps_the_store", "limit"), [("True", 2 * needed_descriptors(8) + RESERVE), ("False", 64)])
def test_the_limit_of_torchruns_agent_is_raised_where_it_keeps_the_store(keeps_the_store: str, limit: int) -> None:
    environment = os.environ | {"TORCHELASTIC_USE_AGENT_STORE": keeps_the_store}
    command = [sys.executable, "-c", AGENT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"{limit}\n", done.stderr


def test_a_hard_limit_that_is_too_low_is_told(limits: list[tuple[int, int]]) -> None:
    said: list[str] = []
    allow_connections(4096, said.append)
    assert limits[1:] == [(4096, 4096)]
    assert len(said) == 1
    assert "4096 ranks may need 4651 open files" in said[0]
    assert "the hard limit is 4096: raise it" in said[0]


def test_no_limit_stays_none(limits: list[tuple[int, int]]) -> None:
    limits[:] = [(resource.RLIM_INFINITY, resource.RLIM_INFINITY)]
    allow_connections(4096, pytest.fail)
    assert len(limits) == 1
