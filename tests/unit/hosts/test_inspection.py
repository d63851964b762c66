"""One verdict for each host: what it lacks beside the others."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.__main__ import main
from sdp_deepspeed.hosts import probe as probe_module
from sdp_deepspeed.hosts import remote
from sdp_deepspeed.hosts.hostfile import Host
from sdp_deepspeed.hosts.inspection import Inspection, Rendezvous
from sdp_deepspeed.hosts.probe import Probe
from sdp_deepspeed.hosts.remote import HostError
from tests.helpers.ports import free_port

SETTINGS = {"config": "c0ffee", "plan": "deadbeef"}


class Answering:
    """A host whose probe is in this process.

    Args:
        said: answers in place of the probe's own, by question; an error is raised.
    """

    def __init__(self, said: dict[str, Any]) -> None:
        self.probe, self._said = Probe(), said

    def ask(self, what: str, *, seconds: float = 0.0, **arguments: Any) -> Any:
        said = self._said.get(what)
        if isinstance(said, HostError):
            raise said
        try:
            return getattr(self.probe, what)(**arguments) if said is None else said
        except (ValueError, OSError) as error:
            raise HostError(str(error)) from None


Inspect = Callable[..., Inspection]


@pytest.fixture
def inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inspect]:
    """Inspects hosts a, b, ... that share a folder; each argument replaces answers of one."""
    monkeypatch.setattr(probe_module, "_SEEING_SECONDS", 0.0)
    probes: list[Probe] = []

    def inspect(*said: dict[str, Any], port: int | None = None) -> Inspection:
        hosts = [Host("abc"[index], 2) for index in range(len(said))]
        usual: dict[str, Any] = {"own_name": ["name", "127.0.0.1", "lo"]}  # looking it up may take seconds
        usual |= {"devices": {"kind": "GPU", "count": 2}, "settings": SETTINGS | {"run folder": str(tmp_path)}}
        remotes: Any = {host.name: Answering(usual | own) for host, own in zip(hosts, said, strict=True)}
        probes.extend(remote.probe for remote in remotes.values())
        inspection = Inspection(hosts, remotes, Rendezvous("127.0.0.1", port or free_port()))
        inspection.run(["--model", "m.json"])
        return inspection

    yield inspect
    for probe in probes:
        probe.close()


def problems(inspection: Inspection) -> dict[str, list[str]]:
    return {name: verdict.problems for name, verdict in inspection.verdicts.items() if verdict.problems}


def test_nothing_is_wrong_and_nothing_is_left_behind(inspect: Inspect, tmp_path: Path) -> None:
    inspection = inspect({}, {}, {})
    assert problems(inspection) == {}
    for verdict in inspection.verdicts.values():
        assert re.fullmatch(
            r"ok +2 slots, 2 GPUs; clock [+-]0\.\d s; config c0ffee, plan deadbeef; address 127\.0\.0\.1.*",
            str(verdict),
        )
    assert len(list(tmp_path.iterdir())) == 3
    for answering in inspection._remotes.values():
        answering.probe.close()  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


VERSIONS = Probe().versions()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"versions": VERSIONS | {"torch": "1.0"}}, ["torch 1.0 (a: ", "install the same versions"]),
        ({"versions": VERSIONS | {"its files": "0"}}, ["sdp_deepspeed's files 0 (a: "]),
        ({"versions": HostError("not reachable by ssh: No route to host")}, ["not reachable by ssh: No route to host"]),
        ({"devices": {"kind": "GPU", "count": 1}}, ["2 slots, but 1 GPUs: lower slots"]),
        ({"settings": HostError("--model: cannot read m.json")}, ["--model: cannot read m.json"]),
        (
            {"settings": {"config": "0", "plan": "1", "run folder": "/"}},
            ["config, model or data 0 (a: c0ffee), plan 1"],
        ),
        ({"clock": 0.0}, ["its clock differs by -", "NTP"]),
        ({"reach": {}, "mark": HostError("Permission denied: '/shared'")}, ["Permission denied: '/shared'"]),
        ({"listen": HostError("out of sockets")}, ["out of sockets"]),
    ],
)
def test_a_host_that_differs_is_the_only_one_with_a_problem(
    inspect: Inspect, answers: dict[str, Any], words: list[str]
) -> None:
    found = problems(inspect({}, answers, {}))
    assert list(found) == ["b"]
    assert all(word in found["b"][0] for word in words), found


def test_a_folder_that_is_not_shared(inspect: Inspect, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    settings = SETTINGS | {"run folder": str(tmp_path / "own")}
    found = problems(inspect({}, {"settings": settings}))
    assert found["a"] == [
        f"--run-folder: {tmp_path} is not shared: what b wrote there is not to be seen; choose a folder that all hosts "
        "share"
    ]
    assert "what a wrote there" in found["b"][0]


def test_a_port_that_something_uses(inspect: Inspect) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        found = problems(inspect({}, {}, port=port))
    assert found == {"a": [f"port {port}: Address already in use: end what uses it, or choose another --master_port"]}


def test_addresses_that_do_not_reach_a_host_are_told(inspect: Inspect) -> None:
    gone = free_port()
    found = problems(inspect({}, {"listen": gone}))
    assert f"cannot reach b at 127.0.0.1:{gone}: " in found["a"][0]
    assert "refused" in found["a"][0]


def test_a_name_that_stands_for_the_host_itself_is_told(inspect: Inspect) -> None:
    inspection = inspect({"own_name": ["node-a", "127.0.1.1", ""]}, {"own_name": ["node-b", "127.0.1.1", "eth0"]})
    one, other = map(str, inspection.verdicts.values())
    assert "its own name node-a stands for 127.0.1.1 there: runs on CPUs need GLOO_SOCKET_IFNAME" in one
    assert "stands for" not in other


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ssh for which this machine is host "here"; it reaches no other."""
    script = tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\n"
        '[ "$1" = here ] || { echo "ssh: connect to host $1: No route to host" >&2; exit 255; }\n'
        'exec sh -c "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def command(folder: Path, hosts: str) -> list[str]:
    (folder / "hosts").write_text(hosts)
    return ["hosts", "--master_port", str(free_port()), str(folder / "hosts")]


@pytest.mark.usefixtures("ssh")
def test_the_command_tells_a_line_for_each_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # "here" is a name for ssh alone: ranks meet at an address.
    assert main([*command(tmp_path, "here slots=4\n"), "--master_addr", "127.0.0.1"]) == 0
    assert re.fullmatch(r"here  ok +4 slots, \d+ cores?; clock .*; address 127\.0\.0\.1\n", capsys.readouterr().out)


@pytest.mark.usefixtures("ssh")
def test_the_command_names_the_hosts_that_cannot_take_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "probe_command", lambda: "exec /nowhere/python -m sdp_deepspeed.hosts.probe")
    assert main(command(tmp_path, "here slots=4\nthere slots=4\n")) == 2
    output = capsys.readouterr()
    here, there = output.out.splitlines()
    assert re.match(r"here   FAILED  .*python\S* with sdp_deepspeed does not run there, in .*not found", here)
    assert there == "there  FAILED  not reachable by ssh: ssh: connect to host there: No route to host"
    assert output.err == "error: 2 of 2 hosts cannot take part: here, there\n"


@pytest.mark.usefixtures("ssh")
def test_a_host_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "probe_command", lambda: "exec sleep 60")
    with (
        remote.Remote(remote.ssh_command("here", None)) as host,
        pytest.raises(HostError, match=r"no answer \(clock\) within 0 seconds"),
    ):
        host.ask("clock", seconds=0.2)
