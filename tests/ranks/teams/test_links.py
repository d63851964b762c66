"""Teams in network namespaces, whose links go down. On demand: as root, with iproute2, `pytest --full`."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.helpers.repository import ROOT

PATIENCE = 600.0  # seconds
PORT = 29510
LIGHTHOUSE = "10.204.0.254"

TEAM = """
import sys
from pathlib import Path
import torch
import sdp_deepspeed
from tests.helpers.models import batches, llama, loss_of

folder, teams, coverage = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
steps = {"teams": teams, "every": 2, "wait_timeout": 120.0, "exchange_timeout": 10.0}
model = llama()
team = sdp_deepspeed.join(model, {"coverage": coverage, "local_steps": steps})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
team.start()
log = (folder / f"log-{team.number}").open("a", buffering=1)
data = batches(1, 1)
stop = folder / "stop"  # holds the version after which all end
while not stop.exists() or team.version < int(stop.read_text() or 1e9):
    loss_of(model, next(data)[0][0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if team.step():
        print(team.version, *team.present, file=log)
torch.save(team.dense_state_dict(), folder / f"dense-{team.number}.pt")
team.leave()
"""


@dataclass
class Network:
    """Nodes that are joined by a switch, which runs the lighthouse."""

    folder: Path
    name: str = field(default_factory=lambda: f"sdp{os.getpid()}")
    programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=30)

    def node(self, number: int) -> str:
        return f"{self.name}n{number}"

    def build(self, num_nodes: int) -> None:
        self.command("netns", "add", self.name)
        self.command("-netns", self.name, "link", "add", "name", "switch", "type", "bridge")
        self.command("-netns", self.name, "address", "add", f"{LIGHTHOUSE}/24", "dev", "switch")
        self.command("-netns", self.name, "link", "set", "switch", "up")
        for number in range(num_nodes):
            node, port = self.node(number), f"port{number}"
            self.command("netns", "add", node)
            wire = ["link", "add", "name", "wire", "type", "veth", "peer", "name", port, "netns", self.name]
            self.command("-netns", node, *wire)
            self.command("-netns", self.name, "link", "set", port, "master", "switch", "up")
            self.command("-netns", node, "address", "add", f"10.204.0.{number + 1}/24", "dev", "wire")
            self.command("-netns", node, "link", "set", "lo", "up")
            self.command("-netns", node, "link", "set", "wire", "up")

    def remove(self) -> None:
        for program in self.programs:
            program.kill()
            program.wait()
        for number in itertools.count():
            if subprocess.run(["ip", "netns", "delete", self.node(number)], stderr=subprocess.DEVNULL).returncode:
                break
        subprocess.run(["ip", "netns", "delete", self.name], check=False)

    def start(self, namespace: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        own = {"PYTHONPATH": str(ROOT), "RUST_LOG": "error", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        output = (self.folder / f"output-{len(self.programs)}").open("w")
        self.programs.append(
            subprocess.Popen(
                ["ip", "netns", "exec", namespace, *command],
                env={**os.environ, **own, **environment},
                stdout=output,
                stderr=output,
                cwd=ROOT,
            )
        )
        return self.programs[-1]

    def start_lighthouse(self) -> subprocess.Popen[bytes]:
        program = str(Path(sys.executable).parent / "torchft_lighthouse")
        return self.start(self.name, [program, "--min_replicas", "1", "--bind", f"0.0.0.0:{PORT}"])

    def start_team(self, number: int, *arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", TEAM, str(self.folder), *map(str, arguments)]
        address = f"http://{LIGHTHOUSE}:{PORT}"
        return self.start(self.node(number), command, SDP_TEAM=str(number), TORCHFT_LIGHTHOUSE=address)

    def set_link(self, number: int, state: str) -> None:
        self.command("-netns", self.node(number), "link", "set", "wire", state)

    def last_meeting(self, team: int) -> list[int]:
        """Version, and teams."""
        log = self.folder / f"log-{team}"
        lines = log.read_text().rpartition("\n")[0].splitlines() if log.exists() else []
        return [int(word) for word in lines[-1].split()] if lines else [0]

    def wait_for_meeting(self, what: str, teams: list[int]) -> None:
        """Wait until these teams, and no others, have met after now."""
        before = max(self.last_meeting(team)[0] for team in teams) + 1
        self.wait(what, lambda: all(self.last_meeting(team)[0] > before for team in teams))
        self.wait(what, lambda: all(self.last_meeting(team)[1:] == teams for team in teams))

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"{what}: {self.output()}"
            time.sleep(0.2)

    def output(self) -> str:
        return "\n".join(file.read_text()[-2000:] for file in sorted(self.folder.glob("output-*")))


@contextmanager
def network(folder: Path, num_nodes: int) -> Iterator[Network]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    built = Network(folder)
    try:
        built.build(num_nodes)
        yield built
    finally:
        built.remove()


@pytest.mark.slow
@pytest.mark.parametrize(("num_nodes", "coverage"), [(2, 1.0), (4, 0.5)])
def test_links_go_down(num_nodes: int, coverage: float, tmp_path: Path) -> None:
    """A link is down for 30 s, the lighthouse is killed and started again, and a link is down until its team ends,
    and starts again."""
    everyone, lost = list(range(num_nodes)), num_nodes - 1
    others = everyone[:-1]
    with network(tmp_path, num_nodes) as run:
        light = run.start_lighthouse()
        teams = [run.start_team(number, num_nodes, coverage) for number in everyone]
        run.wait_for_meeting("all have started", everyone)

        run.set_link(lost, "down")
        began = time.monotonic()
        run.wait_for_meeting("a link is down", others)
        time.sleep(max(0.0, began + 30 - time.monotonic()))
        run.set_link(lost, "up")
        run.wait_for_meeting("the link is back", everyone)

        light.kill()
        light.wait()
        time.sleep(2)
        run.start_lighthouse()
        run.wait_for_meeting("the lighthouse is back", everyone)

        run.set_link(lost, "down")
        run.wait_for_meeting("a link is down for good", others)
        run.wait("its team ends", lambda: teams[lost].poll() is not None)
        run.set_link(lost, "up")
        teams[lost] = run.start_team(lost, num_nodes, coverage)
        run.wait_for_meeting("its team starts again", everyone)

        (tmp_path / "stop").write_text(f"{max(run.last_meeting(team)[0] for team in everyone) + 500}")
        run.wait("all end", lambda: all(team.poll() is not None for team in teams))
        assert [team.returncode for team in teams] == [0] * num_nodes, run.output()
    dense = [torch.load(tmp_path / f"dense-{number}.pt") for number in everyone]
    for other in dense[1:]:
        assert all(torch.equal(other[name], value) for name, value in dense[0].items())
