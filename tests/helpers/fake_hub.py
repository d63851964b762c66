"""A hub on this machine, as far as parquet is streamed from it: its answers can be cut short, refused or lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "owner/name"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """One data set of a few files.

    Args:
        files: contents by path.
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files = files
        self.faults: list[str] = []  # of the next reads: "cut" (less than announced), "short", "empty" or a status
        self.reads: list[str] = []  # "whole", or the fault that a read got

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_hub(files: Mapping[str, bytes]) -> Iterator[FakeHub]:
    """Answers while the block lasts."""
    hub = FakeHub(files)
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Answers(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if f"/datasets/{REPOSITORY}" not in path:  # as the hub says it of what is not there, or private
            self._error(401, "RepoNotFound")
        elif path.startswith(f"/datasets/{REPOSITORY}/resolve/"):
            self._read(path.removeprefix(f"/datasets/{REPOSITORY}/resolve/").partition("/")[2])
        elif "/tree/" in path:
            self._json([self._entry(name) for name in self.server.files])
        else:
            siblings = [{"rfilename": name} for name in self.server.files]
            self._json({"id": REPOSITORY, "sha": _COMMIT, "private": False, "tags": [], "siblings": siblings})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        self._json([self._entry(name) for name in asked if name in self.server.files])

    def _entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "oid": "0" * 40, "size": len(self.server.files[name])}

    def _read(self, name: str) -> None:
        if name not in self.server.files:
            self._error(404, "EntryNotFound")
            return
        content, status = self.server.files[name], 200
        fault = "whole"
        if self.command == "GET":
            fault = self.server.faults.pop(0) if self.server.faults else "whole"
            self.server.reads.append(fault)
        if fault.isdigit():
            self._error(int(fault))
            return
        headers = {"ETag": '"0"', "X-Repo-Commit": _COMMIT, "Accept-Ranges": "bytes"}
        if (wanted := self.headers.get("Range")) is not None:
            first, last = (int(place) for place in wanted.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self._send(status, content, headers, fault)

    def _error(self, status: int, code: str = "") -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json", "X-Repo-Commit": _COMMIT})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str], fault: str = "whole") -> None:
        sent = content[: {"whole": len(content), "empty": 0}.get(fault, len(content) // 2)]
        length = len(content) if fault == "cut" else len(sent)
        self.send_response(status)
        for name, value in (dict(headers) | {"Content-Length": str(length)}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)
        self.close_connection = True
