"""What one host says of itself: `sdp hosts` starts this there over ssh, and asks.

A question is a line of JSON, `[name, arguments]`; so is the answer, `["ok", value]` or `["error", text]`. The process
ends with its input.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.version import __version__

_HOSTS = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "tokenizers")
_CONNECT_SECONDS = 5.0
_SEEING_SECONDS = 35.0  # network file systems remember for up to half a minute what a folder has


class Probe:
    """Answers; each public method is a question."""

    def __init__(self) -> None:
        self._listening: dict[str, socket.socket] = {}
        self._mark: Path | None = None

    def clock(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def versions(self) -> dict[str, str]:
        """What must be the same on all hosts, by name."""
        found = {"python": platform.python_version(), "sdp_deepspeed": __version__, "its files": _own_files()}
        for name in _HOSTS:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "none"
        return found

    def devices(self) -> dict[str, Any]:
        """Kind and number of what ranks run on; any number of ranks may share a CPU."""
        if os.environ.get("DS_ACCELERATOR") != "cpu":
            import torch

            if torch.cuda.is_available() and (count := torch.cuda.device_count()):
                return {"kind": "GPU", "count": count}
        return {"kind": "core", "count": len(os.sched_getaffinity(0))}

    def settings(self, options: list[str], slots: list[int]) -> dict[str, str]:
        """Digests of what the options of launch/pretrain.py mean on this host, and the folder of the run.

        Args:
            slots: of all hosts, in order.

        Raises:
            ValueError: what a file that they name has wrong here.
        """
        from sdp_deepspeed.training.options import parse_options

        read = parse_options(options)
        config = {name: value for name, value in vars(read).items() if name != "run_folder"}
        found = {"config": _digest(config), "run folder": str(read.run_folder.resolve())}
        plan = _plan_hash(read.model, read.deepspeed_config, slots)
        return found if plan is None else found | {"plan": plan}

    def mark(self, folder: str, nonce: str) -> str:
        """Leave an entry of this name where the run's folder will be, or is; returns the folder that is there."""
        place = next(path for path in (Path(folder), *Path(folder).parents) if path.is_dir())
        self._mark = place / f".sdp-hosts-{nonce}"
        self._mark.mkdir()
        return str(place)

    def see(self, folder: str, nonces: list[str]) -> list[str]:
        """Which of these entries are not to be seen here."""
        until = time.monotonic() + _SEEING_SECONDS
        while True:
            there = {path.name for path in Path(folder).iterdir()} if Path(folder).is_dir() else set()
            missing = [nonce for nonce in nonces if f".sdp-hosts-{nonce}" not in there]
            if not missing or time.monotonic() > until:
                return missing
            time.sleep(0.5)

    def way(self, host: str, port: int) -> list[str]:
        """Addresses of a host as this one knows it, and of this one on the way there."""
        family, kind, _, _, address = socket.getaddrinfo(host, port or 29500, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            return [str(address[0]), str(probe.getsockname()[0])]

    def own_name(self) -> list[str]:
        """This host's own name and the address that it stands for here; what gloo tells others by itself."""
        name = socket.gethostname()
        told = os.environ.get("GLOO_SOCKET_IFNAME", "")
        try:
            return [name, socket.getaddrinfo(name, None)[0][4][0], told]  # type: ignore[list-item]
        except OSError:
            return [name, "", told]

    def listen(self, port: int, word: str) -> int:
        """Say a word to whoever connects; returns the port, of which 0 asks for any.

        Raises:
            ValueError: something listens there already.
        """
        try:
            listening = socket.create_server(("", port), backlog=1024)
        except OSError as error:
            raise ValueError(f"port {port}: {os.strerror(error.errno or 0)}") from None
        self._listening[word] = listening
        threading.Thread(target=_say, args=(listening, word.encode()), daemon=True).start()
        return int(listening.getsockname()[1])

    def reach(self, places: Mapping[str, Sequence[Any]]) -> dict[str, str]:
        """Why places (address, port) do not answer with their own word."""
        return {word: why for word, (address, port) in places.items() if (why := _reach(address, port, word))}

    def close(self) -> None:
        """Leave nothing behind."""
        for listening in self._listening.values():
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # who waits for a connection would keep it open
            listening.close()
        if self._mark is not None:
            self._mark.rmdir()
            self._mark = None


def _own_files() -> str:
    """A digest of the package's source."""
    package = Path(__file__).parents[1]
    texts = {str(path.relative_to(package)): regular(path).read_bytes() for path in sorted(package.rglob("*.py"))}
    return _digest({name: hashlib.sha256(text).hexdigest() for name, text in texts.items()})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _plan_hash(shape: Mapping[str, Any], config: Mapping[str, Any], slots: Sequence[int]) -> str | None:
    """Of the plan that the run will make; None without subnetworks, or under tensor parallelism."""
    from sdp_deepspeed.config import parse

    block = parse(config)
    if block is None or "tensor_parallel" in config:
        return None
    import torch

    from sdp_deepspeed.plan.planner import plan_model
    from sdp_deepspeed.training.model import build_model

    with torch.device("meta"):
        model = build_model(shape, seed=0)
    nodes = tuple(node for node, count in enumerate(slots) for _ in range(count))
    plan, _ = plan_model(model, block, len(nodes))
    return plan.hash


def _say(listening: socket.socket, word: bytes) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # closed
            return
        with connection:
            connection.sendall(word)


def _reach(address: str, port: int, word: str) -> str | None:
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
            said = connection.recv(1024).decode("utf-8", "replace")
    except OSError as error:
        return error.strerror or "timed out"
    return None if said == word else "another program answers"


def main() -> int:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    probe = Probe()
    try:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            try:
                answer = ["ok", getattr(probe, name)(**arguments)]
            except Exception as error:  # of any kind: who asked tells it in a line
                kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
                answer = ["error", f"{kind}{error}"]
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        probe.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
