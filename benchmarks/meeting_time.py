"""Host time and bytes of a meeting of many teams that train a 1B Llama, measured on one rank without the others.

    OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu python benchmarks/meeting_time.py --output benchmarks/results/meeting_time.json

`join` on rank 0 of a team's eight, in PyTorch's fake world, and the whole of `team.step()`: differences from the
anchors, the decision who takes part, each bucket's all-to-alls, the outer step, the new weights. Other teams say of
themselves what this one does. All-to-alls between teams fill what they receive with zeros, so links are not measured.
Times are seconds of this thread, in which waiting does not count. Weights are fp32, in host memory.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
import sdp_deepspeed
from benchmarks.common.fake_world import fake_world
from benchmarks.common.models import LLAMAS
from benchmarks.common.provenance import write_result
from benchmarks.common.ranks import option_parser
from sdp_deepspeed.teams.attendance import Attendance, Member
from sdp_deepspeed.teams.join import LIGHTHOUSE, NUMBER
from sdp_deepspeed.teams.meeting_point import MeetingPoint

RANKS = 8  # of each team
CASES = [(num_teams, coverage) for coverage in (1.0, 0.5) for num_teams in (4, 64)]


class _Group:
    """A process group of all teams, whose other members are not there."""

    def alltoall_base(self, target: torch.Tensor, *_: Any) -> _Group:
        target.zero_()
        return self

    def allgather(self, *_: Any) -> _Group:
        return self

    def wait(self) -> None:
        pass


class _MeetingPoint(MeetingPoint):
    """All teams are there, and each meeting counts."""

    num_teams = 0
    store = ""

    def __init__(self, address: str, team: int, *, is_first: bool, exchange_timeout: float) -> None:
        self.identity, self.group_name = f"team{team}", ""

    def gather(self, member: Member, whom: str, timeout: float) -> list[Member]:
        return [replace(member, team=team, identity=f"team{team}") for team in range(self.num_teams)]

    def connect(self, attendance: Attendance, rank: int) -> _Group:
        return _Group()

    def decide(self, name: str, counts: bool) -> bool:
        return counts


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="1B", choices=LLAMAS)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    results = []
    for num_teams, coverage in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results.append(pool.apply(measure, (num_teams, coverage, arguments)))
        row = results[-1]
        print(f"{num_teams} teams, C = {coverage}: {statistics.median(row['seconds']):.2f} s, {row['sent']:,} bytes")
    facts = {"what": "meeting_time", "model": arguments.model, "arguments": vars(arguments), "ranks": RANKS}
    write_result(arguments.output, facts | {"results": results})


def measure(num_teams: int, coverage: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Thread seconds and bytes of a meeting."""
    torch.set_num_threads(1)
    os.environ |= {NUMBER: "0", LIGHTHOUSE: "http://localhost:1"}
    _MeetingPoint.num_teams = num_teams
    block = {"coverage": coverage, "local_steps": {"teams": num_teams, "every": 2, "outer_momentum": 0.9}}
    with fake_world(0, RANKS), mock.patch("sdp_deepspeed.teams.team.MeetingPoint", _MeetingPoint):
        model = LlamaForCausalLM(LlamaConfig(**LLAMAS[arguments.model]))
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        team = sdp_deepspeed.join(model, block)
        gc.collect()
        team.start()
        seconds, sent = [], team.bytes_sent
        for _ in range(arguments.repeats):
            team.step()
            start = time.thread_time()
            team.step()
            seconds.append(time.thread_time() - start)
        row = {"teams": num_teams, "coverage": coverage, "parameters": num_parameters}
        return row | {"seconds": seconds, "sent": (team.bytes_sent - sent) // arguments.repeats}


if __name__ == "__main__":
    main()
