"""`sdp teams`, as its users type it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
import sdp_deepspeed

dist.init_process_group("gloo")
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=2))
team = sdp_deepspeed.join(model, {"coverage": 1.0, "local_steps": {"teams": 2, "every": 2}})
run = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
team.start()
for ids in torch.randint(0, 61, (6, 2, 8)):
    run(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if team.step():
        print("version", team.version, "present", team.present, sys.argv[1:])
        if (team.number, team.version, dist.get_rank()) == (1, 1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
team.leave()
"""

# Without torch: the last rank of team 1 is killed while the others of its team wait.
WAITS = """
import os, signal, socket, sys
from urllib.parse import urlsplit

place = [os.environ[name] for name in ("SDP_TEAM", "RANK", "WORLD_SIZE")]
address = urlsplit(os.environ["TORCHFT_LIGHTHOUSE"])
for host, port in ((address.hostname, address.port), (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])):
    socket.create_connection((host, int(port))).close()
print(*place, *sys.argv[1:])
if place == ["1", "1", "2"]:
    os.kill(os.getpid(), signal.SIGKILL)
if place[0] == "1":
    signal.pause()
"""


def test_each_rank_knows_its_place_and_a_team_ends_with_its_first_rank(tmp_path: Path) -> None:
    lines = run_teams(tmp_path, WAITS)
    assert {f"[team {k}.{r}] {k} {r} 2 --flag" for k in range(2) for r in range(2)} <= lines
    assert {"sdp teams: team 0 ended with 0", "sdp teams: team 1 ended with -9"} <= lines


@pytest.mark.slow
def test_a_team_whose_rank_is_killed_ends_and_the_others_go_on(tmp_path: Path) -> None:
    lines = run_teams(tmp_path, SCRIPT)
    for rank in (0, 1):
        assert f"[team 0.{rank}] version 1 present (0, 1) ['--flag']" in lines
        assert f"[team 0.{rank}] version 3 present (0,) ['--flag']" in lines
    assert "sdp teams: team 0 ended with 0" in lines


def run_teams(folder: Path, script: str) -> set[str]:
    """Run a program as two teams of two ranks, of which one fails; the lines that were printed."""
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "sdp_deepspeed", "teams", "2", "--nproc-per-node", "2", "--"]
    command += [str(folder / "train.py"), "--flag"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    return set(done.stdout.splitlines())
