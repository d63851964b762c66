"""DeepSpeed's hostfile: what is read, and what is wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_deepspeed.hosts.hostfile import Host, read_hostfile


def written(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_hosts_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "# two nodes\n\nnode-b slots=8\n  10.0.0.1\tslots=4   # the old one\n"
    assert read_hostfile(written(tmp_path, text)) == (Host("node-b", 8), Host("10.0.0.1", 4))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node-a slots=8\nnode-b\n", "hosts:2: got 'node-b', expected a host and its slots"),
        ("node-a slots=0\n", "hosts:1: got 'node-a slots=0'"),
        ("node-a slots=8 more\n", "hosts:1: got 'node-a slots=8 more'"),
        ("-oProxyCommand=x slots=8\n", "hosts:1: got"),
        ("node-a slots=8\nnode-a slots=4\n", "hosts:2: node-a is there twice"),
        ("# nothing\n", "names no host"),
    ],
)
def test_what_is_wrong_is_told_by_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match="hostfile: ") as caught:
        read_hostfile(written(tmp_path, text))
    assert words in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hostfile: cannot read .*: No such file or directory"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"hostfile: cannot read .*: it is not text"):
        read_hostfile(tmp_path / "binary")
