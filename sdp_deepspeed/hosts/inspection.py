"""Asks all hosts of a run the same questions at the same time, and finds what they do not have in common."""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sdp_deepspeed.hosts.hostfile import Host
from sdp_deepspeed.hosts.remote import HostError, Remote
from sdp_deepspeed.messages import listed

MAX_CLOCK_SECONDS = 300.0  # folder_lock.py believes clocks that differ by less than twice that
_START_SECONDS = 120.0  # of Python on a network file system, and of what it imports
_WORDS = {"its files": "sdp_deepspeed's files", "config": "config, model or data", "plan": "plan"}


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks meet: an address of the first host."""

    address: str
    port: int


@dataclass
class Verdict:
    """What was found on a host.

    Args:
        host: of the hostfile.
        notes: what is good to know.
        problems: why the run would fail there.
    """

    host: Host
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{'FAILED' if self.problems else 'ok':<6}  {'; '.join(self.problems or self.notes)}"


class Inspection:
    """Of hosts whose probes run.

    Args:
        remotes: by the host's name, in the order of the hostfile.
        where: the ranks are to meet.
    """

    def __init__(self, hosts: Sequence[Host], remotes: Mapping[str, Remote], where: Rendezvous) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._remotes = remotes
        self._where = where
        self._nonce = secrets.token_hex(4)
        self.verdicts = {host.name: Verdict(host) for host in hosts}

    def run(self, options: Sequence[str]) -> None:
        """All checks.

        Args:
            options: of launch/pretrain.py; none checks no settings and no folder.
        """
        self._versions()
        self._devices()
        self._clocks()
        if options:
            self._settings(list(options))
        self._addresses()

    def _ask(self, what: str, arguments: Callable[[str], Mapping[str, Any]] = lambda name: {}) -> dict[str, Any]:
        """Answers of the hosts that have no problem so far; those that cannot answer have one from now on."""
        names = [name for name, verdict in self.verdicts.items() if not verdict.problems]
        with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
            asked = {
                name: pool.submit(self._remotes[name].ask, what, seconds=_START_SECONDS, **arguments(name))
                for name in names
            }
            answers = {}
            for name, answer in asked.items():
                try:
                    answers[name] = answer.result()
                except HostError as error:
                    self._problem(name, str(error))
        return answers

    def _problem(self, name: str, text: str) -> None:
        self.verdicts[name].problems.append(text)

    def _compare(self, answers: Mapping[str, Mapping[str, str]], advice: str) -> None:
        """With the first host's."""
        if not answers:
            return
        first, expected = next(iter(answers.items()))
        for name, found in answers.items():
            other = [
                f"{_WORDS.get(key, key)} {found.get(key, 'none')} ({first}: {expected[key]})"
                for key in expected
                if found.get(key) != expected[key]
            ]
            if other:
                self._problem(name, f"{listed(other)}: {advice}")

    def _versions(self) -> None:
        self._compare(self._ask("versions"), "install the same versions on all hosts")

    def _devices(self) -> None:
        for name, found in self._ask("devices").items():
            slots, kind, count = self._hosts[name].slots, found["kind"], found["count"]
            if kind == "GPU" and count < slots:
                self._problem(name, f"{slots} slots, but {count} GPUs: lower slots in the hostfile")
            else:
                self.verdicts[name].notes.append(f"{slots} slots, {count} {kind}{'s' if count > 1 else ''}")

    def _clocks(self) -> None:
        """Each host by itself, as the answer's way counts."""
        for name, verdict in self.verdicts.items():
            if verdict.problems:
                continue
            before = time.time()
            try:
                there = float(self._remotes[name].ask("clock"))
            except HostError as error:
                self._problem(name, str(error))
                continue
            difference = there - (before + time.time()) / 2
            if abs(difference) > MAX_CLOCK_SECONDS:
                self._problem(name, f"its clock differs by {difference:+.0f} s: synchronize clocks (NTP)")
            else:
                verdict.notes.append(f"clock {difference:+.1f} s")

    def _settings(self, options: list[str]) -> None:
        slots = [host.slots for host in self._hosts.values()]
        answers = self._ask("settings", lambda name: {"options": options, "slots": slots})
        folders = {name: settings["run folder"] for name, settings in answers.items()}
        found = {name: {key: settings[key] for key in _WORDS if key in settings} for name, settings in answers.items()}
        self._compare(found, "give all hosts the same files, or a shared folder")
        if len(folders) > 1:
            self._shared_folder(folders)
        for name in self._healthy(found):
            plan = found[name].get("plan")
            self.verdicts[name].notes.append(
                f"config {found[name]['config']}" + (f", plan {plan[:12]}" if plan else "")
            )

    def _shared_folder(self, folders: Mapping[str, str]) -> None:
        """Each host leaves an entry that all others must see."""
        index = {name: f"{self._nonce}-{number}" for number, name in enumerate(self._hosts)}
        places = self._ask("mark", lambda name: {"folder": folders[name], "nonce": index[name]})
        marks = [index[name] for name in places]
        for name, missing in self._ask("see", lambda name: {"folder": places[name], "nonces": marks}).items():
            others = [other for other in places if index[other] in missing]
            if others:
                self._problem(
                    name,
                    f"--run-folder: {places[name]} is not shared: what {listed(others)} wrote there is not to be "
                    "seen; choose a folder that all hosts share",
                )

    def _healthy(self, answers: Mapping[str, Any]) -> list[str]:
        return [name for name in answers if not self.verdicts[name].problems]

    def _addresses(self) -> None:
        """All hosts connect to the place where ranks meet, and to each other's addresses on the way there."""
        first = next(iter(self._hosts))
        ways = self._ask("way", lambda name: {"host": self._where.address, "port": self._where.port})
        word = f"{self._nonce}-rendezvous"
        if first in ways:
            self._listen_at_rendezvous(first, word)
        words = {name: f"{self._nonce}-{number}" for number, name in enumerate(self._hosts)}
        ports = self._ask("listen", lambda name: {"port": 0, "word": words[name]})
        outward = self._outward(ways)
        places = {words[name]: [outward[name], port] for name, port in ports.items() if name in outward}
        if not self.verdicts[first].problems:
            places[word] = [self._where.address, self._where.port]
        for name, unreached in self._ask("reach", lambda name: {"places": places}).items():
            if unreached:
                owners = {**{words[other]: other for other in ports}, word: f"{first} (master)"}
                told = [
                    f"{owners[other]} at {':'.join(map(str, places[other]))}: {why}" for other, why in unreached.items()
                ]
                self._problem(
                    name, f"cannot reach {listed(told, separator='; ')}; see the firewall, /etc/hosts and --master_addr"
                )
        self._own_names(outward)

    def _listen_at_rendezvous(self, first: str, word: str) -> None:
        try:
            self._remotes[first].ask("listen", port=self._where.port, word=word)
        except HostError as error:
            self._problem(first, f"{error}: end what uses it, or choose another --master_port")

    def _outward(self, ways: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Addresses by which hosts are to be reached; the first may know itself by one of its own alone."""
        others = [known for known, own in ways.values() if not _is_loopback(known)]
        known = others[0] if others else self._where.address
        return {name: known if _is_loopback(own) else own for name, (_, own) in ways.items()}

    def _own_names(self, outward: Mapping[str, str]) -> None:
        for name, (own, address, interface) in self._ask("own_name").items():
            verdict = self.verdicts[name]
            verdict.notes.append(f"address {outward[name]}")
            if not interface and len(self._hosts) > 1 and (not address or _is_loopback(address)):
                verdict.notes.append(
                    f"its own name {own} stands for {address or 'nothing'} there: runs on CPUs need GLOO_SOCKET_IFNAME"
                )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
