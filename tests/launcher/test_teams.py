"""`sdp teams`, as its users type it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.helpers.programs import ended, exported
from tests.helpers.repository import ROOT

# Without torch: the last rank of team 1 is killed while the other of its team waits.
WAITS = """
import os, signal, socket, sys, time
from pathlib import Path
from urllib.parse import urlsplit

place = [os.environ[name] for name in ("SDP_TEAM", "RANK", "WORLD_SIZE")]
address = urlsplit(os.environ["TORCHFT_LIGHTHOUSE"])
for host, port in ((address.hostname, address.port), (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])):
    socket.create_connection((host, int(port))).close()
print(*place, os.environ["OMP_NUM_THREADS"], *sys.argv[1:], flush=True)
waits = Path(__file__).with_name("waits")
if place == ["1", "0", "2"]:
    waits.touch()
    signal.pause()
if place == ["1", "1", "2"]:
    while not waits.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_each_rank_knows_its_place_and_a_team_ends_with_its_first_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    lines = set(teams([str(tmp_path / "train.py"), "--flag"], "--nproc-per-node", "2", code=1))
    assert {f"[team {k}.{r}] {k} {r} 2 1 --flag" for k in range(2) for r in range(2)} <= lines
    assert {"sdp teams: team 0 ended with 0", "sdp teams: team 1 ended with -9"} <= lines


def test_the_example(tmp_path: Path) -> None:
    lines = teams(["launch/examples/with_teams.py", str(tmp_path), "--teams", "2", "--steps", "10"])
    losses = {line.rpartition(": ")[2] for line in lines if "loss of the dense model: " in line}
    assert len(losses) == 1, "of both teams"
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    rows = torch.tensor(list(Path(argparse.__file__).read_bytes())).split(64)[-9:-1]
    ids = torch.stack(rows)
    with torch.no_grad():
        assert f"{model(input_ids=ids, labels=ids).loss.item():.4f}" in losses


@pytest.mark.slow  # ranks/teams has what the Trainer does with teams
def test_a_recipe(tmp_path: Path) -> None:
    """Each team has a folder, and its part of the data; evaluations are of the same model. A finished run, given once
    more, exports the same."""
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} to {n * n % 97}"}) + "\n" for n in range(4000))
    )
    sources = f"data.sources=[{{path: json, data_files: {tmp_path / 'text.jsonl'}}}]"
    block = "sdp={coverage: 1.0, local_steps: {teams: 2, every: 2}}"
    sizes = ["model.num_hidden_layers=2", "model.hidden_size=32", "data.vocab_size=300", "data.sequence_length=32"]
    training = [f"training.{key}" for key in ("max_steps=4", "logging_steps=1", f"output_dir={tmp_path / 'run'}")]
    command = ["launch/pretrain.py", "configs/recipes/quickstart.yaml", sources, block, *sizes, *training]
    weights: list[bytes] = []
    for _ in range(2):
        teams(command)
        folders = [tmp_path / "run" / f"team{number}" for number in range(2)]
        found = [json.loads((folder / "eval_results.json").read_text())["eval_loss"] for folder in folders]
        assert found[0] == pytest.approx(found[1], rel=1e-6)
        weights += map(exported, folders)
    assert len(set(weights)) == 1
    histories = [
        json.loads((folder / "checkpoint-4/trainer_state.json").read_text())["log_history"] for folder in folders
    ]
    losses = [[logs["subnetwork_loss"] for logs in history if "subnetwork_loss" in logs] for history in histories]
    assert losses[0] != losses[1]


def teams(command: list[str], *options: str, code: int = 0) -> list[str]:
    """Run a program as two teams, on CPUs; the lines that were printed."""
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    as_users = ["env", "-u", "OMP_NUM_THREADS", sys.executable, "-m", "sdp_deepspeed", "teams", "2"]
    done = ended([*as_users, *options, "--", *command], code=code, DS_ACCELERATOR="cpu", PYTHONPATH=str(ROOT))
    return done.stdout.splitlines()
