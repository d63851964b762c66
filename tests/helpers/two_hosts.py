"""Two hosts on one machine: network namespaces joined by a link, each with a name, an address and an sshd of its own.

Nothing of the machine is changed: files of /etc are replaced for the hosts' processes alone (mount namespaces), ssh
gets its configuration by an option, and programs that are missing are unpacked into a temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

NAMES = ("node-a", "node-b")
ADDRESSES = ("10.204.0.1", "10.204.0.2")
_PACKAGES = ("openssh-server", "openssh-client", "libwrap0", "pdsh", "libgenders0")
_SECONDS = 20.0  # until an sshd answers


class Impossible(Exception):
    """This machine does not permit it, or lacks a program that cannot be had; says which."""


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise Impossible(f"{shlex.join(map(str, command))}: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout


@dataclass(frozen=True)
class Tools:
    """Programs, and where their libraries are.

    Args:
        root: of the unpacked packages; None where all are installed.
    """

    root: Path | None

    @classmethod
    def find(cls, folder: Path) -> Tools:
        if os.geteuid() != 0:
            raise Impossible("network namespaces need root")
        for tool in ("ip", "unshare", "mount", "ssh", "ssh-keygen"):
            if shutil.which(tool) is None:
                raise Impossible(f"{tool} is not installed")
        if shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") and shutil.which("pdsh"):
            return cls(None)
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            raise Impossible("sshd or pdsh is not installed, and there is no apt-get")
        downloads, root = folder / "packages", folder / "root"
        downloads.mkdir()
        done = subprocess.run(
            ["apt-get", "download", *_PACKAGES], cwd=downloads, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise Impossible(f"sshd or pdsh is not installed, and apt-get cannot download it: {done.stderr[-300:]}")
        for package in downloads.glob("*.deb"):
            _run("dpkg", "-x", package, root)
        return cls(root)

    @property
    def sshd(self) -> str:
        return str(self._unpacked("usr/sbin/sshd") or shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"))

    @property
    def pdsh(self) -> Path | None:
        """The program, which wants to be called so; None where it is installed."""
        return self._unpacked("usr/bin/pdsh.bin")

    @property
    def mount_libraries(self) -> str:
        """A shell's command: what was unpacked is beside the machine's own."""
        if self.root is None:
            return "true"
        modules = next(self.root.rglob("sshcmd.so")).parent  # of pdsh, which looks for them in one folder only
        place = f"/{modules.parent.relative_to(self.root)}"
        return f"mount -t overlay overlay -o lowerdir={modules.parent}:{place} {place}"

    def _unpacked(self, path: str) -> Path | None:
        return None if self.root is None else self.root / path


class TwoHosts:
    """Both of them, from `start` to `stop`.

    Args:
        folder: for keys, configurations and logs.
        environment: of what ssh starts.
    """

    def __init__(self, folder: Path, tools: Tools, environment: Mapping[str, str]) -> None:
        self._folder, self._tools, self._environment = folder, tools, environment
        self._namespaces = [f"sdp{os.getpid()}{letter}" for letter in "ab"]
        self._sshds: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Raises Impossible where that is not permitted."""
        for namespace in self._namespaces:
            _run("ip", "netns", "add", namespace)
        first, second = self._namespaces
        wire = ("wire", "type", "veth", "peer", "name", "wire", "netns", second)
        _run("ip", "-netns", first, "link", "add", "name", *wire)
        for namespace, address in zip(self._namespaces, ADDRESSES, strict=True):
            _run("ip", "-netns", namespace, "address", "add", f"{address}/24", "dev", "wire")
            _run("ip", "-netns", namespace, "link", "set", "lo", "up")
            _run("ip", "-netns", namespace, "link", "set", "wire", "up")
        self._write_files()
        for host in range(len(NAMES)):
            command = [self._tools.sshd, "-D", "-e", "-f", f"{self._folder}/sshd_config"]
            with (self._folder / f"sshd_{NAMES[host]}.log").open("wb") as log:
                self._sshds.append(self.popen(host, command, stdout=log, stderr=log))
        self._wait_for_sshds()

    def stop(self) -> None:
        """With everything that still runs on the hosts."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for sshd in self._sshds:
            sshd.wait()
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)

    def set_link(self, state: str) -> None:
        """ "up" or "down", of the second host; up when it can be reached again."""
        _run("ip", "-netns", self._namespaces[1], "link", "set", "wire", state)
        if state == "up":
            self._wait_for_sshds()

    def popen(self, host: int, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        """A process on a host, in a session of its own."""
        steps = [f"hostname {NAMES[host]}", self._tools.mount_libraries]
        steps += [f"mount --bind {self._folder}/{name} /etc/{name}" for name in ("hosts", "passwd", "nsswitch.conf")]
        steps += ["mount -t tmpfs none /run", "mkdir /run/sshd", f"exec {shlex.join(command)}"]
        inside = " && ".join(steps)
        enter = ["ip", "netns", "exec", self._namespaces[host], "unshare", "--mount", "--uts", "bash", "-c", inside]
        return subprocess.Popen(
            enter, env={**os.environ, **self._environment}, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )  # type: ignore[call-overload]

    def processes(self, host: int | None = None) -> list[psutil.Process]:
        """All that run on a host, or on both; its sshd is the first."""
        namespaces = self._namespaces if host is None else [self._namespaces[host]]
        pids = [
            int(pid)
            for namespace in namespaces
            for pid in subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
        ]
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def python_processes(self) -> list[str]:
        """Launchers and ranks that still run, as their commands."""
        commands = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words and "python" in Path(words[0]).name:
                    commands.append(shlex.join(words))
        return commands

    def _write_files(self) -> None:
        folder = self._folder
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
        home = folder / "home"
        home.mkdir()
        lines = [f"{address} {name}" for name, address in zip(NAMES, ADDRESSES, strict=True)]
        variables = " ".join(f'"{name}={value}"' for name, value in self._environment.items())
        files = {
            "hosts": ["127.0.0.1 localhost", *lines],
            "nsswitch.conf": ["passwd: files", "group: files", "hosts: files"],
            "passwd": [f"root:x:0:0::{home}:/bin/bash", "sshd:x:65533:65534::/run/sshd:/bin/false"],
            "sshd_config": [
                f"HostKey {folder}/key",
                f"AuthorizedKeysFile {folder}/key.pub",
                "PermitRootLogin yes",
                "StrictModes no",
                "PidFile none",
                "MaxStartups 100",
                f"SetEnv {variables}",
            ],
            "ssh_config": [
                f"IdentityFile {folder}/key",
                "StrictHostKeyChecking no",
                f"UserKnownHostsFile {folder}/known_hosts",
                "LogLevel ERROR",
            ],
        }
        for name, content in files.items():
            (folder / name).write_text("\n".join(content) + "\n")
        programs = folder / "bin"
        programs.mkdir()
        (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        (programs / "ssh").chmod(0o755)
        if self._tools.pdsh is not None:
            shutil.copy(self._tools.pdsh, programs / "pdsh")

    def _wait_for_sshds(self) -> None:
        until = time.monotonic() + _SECONDS
        for name in NAMES:
            while True:
                tried = self.popen(
                    0, [f"{self._folder}/bin/ssh", name, "true"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
                said, _ = tried.communicate(timeout=60)
                if tried.returncode == 0:
                    break
                if time.monotonic() > until:
                    log = (self._folder / f"sshd_{name}.log").read_text()
                    raise Impossible(f"no ssh to {name}: {said.decode()} {log[-500:]}")
                time.sleep(0.2)


@contextmanager
def two_hosts(folder: Path, environment: Mapping[str, str]) -> Iterator[TwoHosts]:
    """Raises Impossible, with the reason."""
    folder.mkdir()
    hosts = TwoHosts(folder, Tools.find(folder), environment)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
