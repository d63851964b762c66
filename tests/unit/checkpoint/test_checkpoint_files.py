"""A folder of checkpoints: complete or absent after a kill at any moment, one job at a time, damage that is named."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from sdp_deepspeed.checkpoint import atomic_folder, files
from sdp_deepspeed.checkpoint.dcp_planners import Boxes, LoadPlanner, add_box


def save(folder: Path, tag: str, content: str, **options: Any) -> None:
    """As rank 0 of one does."""
    writer = files.Writer(atomic_folder.create_unfinished(folder, tag))
    for name in ("data.distcp", files.INDEX):
        with writer.fs.create_stream(Path(writer.path) / name, "wb") as stream:
            stream.write(content.encode())
    atomic_folder.publish(folder, tag, writer.checksums, **{"latest": True, "keep_last": None} | options)


def content_of(folder: Path) -> str:
    """Of the checkpoint that a run would resume from."""
    path = atomic_folder.path_of(folder, atomic_folder.tags_to_try(folder)[0])
    found = files.read_checksums(path)["files"]
    assert set(found) == {"data.distcp", files.INDEX}
    assert [files.problem_of(path / name, expected) for name, expected in found.items()] == [None, None]
    return (path / "data.distcp").read_text()


def kill_at(number: int) -> None:
    """Kill this process before the `number`th time that it changes the disk, from 1."""
    counter = itertools.count(1)
    changes = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")  # and opening to write

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in changes or (event == "open" and "w" in str(arguments[1]))
        if is_change and next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


@pytest.mark.parametrize("tags", [("a", "b", "c"), ("a", "a", "a"), ("a", "b", "a")])
def test_killed_at_any_moment(tmp_path: Path, tags: tuple[str, ...]) -> None:
    """The last one that was saved is there, or the one that was being saved; the next save works."""
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        for index, tag in enumerate(tags[:2]):
            save(folder, tag, str(index), keep_last=2)
        if os.fork() == 0:
            kill_at(number)
            lock = atomic_folder.lock_folder(folder)
            save(folder, tags[2], "2", keep_last=2)
            assert lock is not None
            os._exit(0)
        _, status = os.wait()
        assert content_of(folder) in ("1", "2")
        if not os.WIFSIGNALED(status):
            assert content_of(folder) == "2"
            break
        atomic_folder.lock_folder(folder)  # what the killed one left goes
        save(folder, "next", "3", keep_last=2)
        assert content_of(folder) == "3"
        assert not [path.name for path in folder.iterdir() if path.suffix in (".tmp", ".old")]
        assert len(atomic_folder.complete_tags(folder)) == 2
    assert number > 5


def test_newest_and_kept(tmp_path: Path) -> None:
    for tag in ("1", "2", "3"):
        save(tmp_path, tag, tag, latest=tag == "1")
    assert atomic_folder.tags_to_try(tmp_path) == ["1", "3", "2"]
    save(tmp_path, "4", "4", latest=False, keep_last=1)
    assert atomic_folder.tags_to_try(tmp_path) == ["1", "4"]
    (tmp_path / "latest").unlink()
    assert atomic_folder.tags_to_try(tmp_path) == ["4", "1"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    with pytest.raises(ValueError, match="is not a checkpoint, and would be replaced"):
        atomic_folder.create_unfinished(tmp_path, "hf")
    for tag in ("a/b", ".hidden", "latest", "", "a.tmp"):
        with pytest.raises(ValueError, match="expected the name of a folder"):
            atomic_folder.check_tag(tag)


def test_damaged_checksums_are_named(tmp_path: Path) -> None:
    save(tmp_path, "tag", "abc")
    for text in ("{", "[]", json.dumps({"format": 2, "files": {"../x": [0, 0]}}), json.dumps({"format": 2})):
        (tmp_path / "tag" / files.CHECKSUMS).write_text(text)
        with pytest.raises(ValueError, match=r"checksums.json is damaged"):
            files.read_checksums(tmp_path / "tag")


def test_a_long_file_is_checked_to_its_end(tmp_path: Path) -> None:
    content = "a" * (5 << 19)  # more than is read at once
    save(tmp_path, "tag", content)
    file, expected = tmp_path / "tag" / "data.distcp", files.read_checksums(tmp_path / "tag")["files"]["data.distcp"]
    assert files.problem_of(file, expected) is None
    file.write_text(content[:-1] + "b")
    assert "checksum" in str(files.problem_of(file, expected))


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files, "FORMAT", 1)
        patch.setattr(files, "_hash_of", lambda _: 0)  # its checksums were others, too
        save(tmp_path, "tag", "abc")
    with pytest.raises(ValueError, match="has format 1, expected 2"):
        files.read_checksums(tmp_path / "tag")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.distcp").symlink_to("/dev/full")
    with (
        pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'data.distcp'}'"),
        files.Writer(tmp_path).fs.create_stream(tmp_path / "data.distcp", "wb") as stream,
    ):
        torch.save(torch.zeros(10**5), stream)  # type: ignore[arg-type]


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_no_pickle_of_strangers_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / files.INDEX).write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ValueError, match=r"\.metadata is damaged: it names posix\.system"):
        files.Reader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


class Member:
    """As Python 3.11.2 pickles the member of an enum."""

    def __init__(self, kind: Any, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> Any:
        return getattr, (self.kind, self.name)


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (Member(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"), "has no attribute 'storage_data'"),  # it was read
        (Member(torch.Size, "numel"), "it names 'numel' of"),
    ],
)
def test_of_classes_only_members_of_enums_are_reached(tmp_path: Path, member: Member, words: str) -> None:
    (tmp_path / files.INDEX).write_bytes(pickle.dumps(member))
    with pytest.raises(ValueError, match=rf"\.metadata is damaged: .*{words}"):
        files.Reader(tmp_path).read_metadata()


def test_what_is_nowhere_is_not_left_as_it_is() -> None:
    """DCP fills what its index has; here an index that lost a chunk."""
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    stored = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4, 3]), [chunk])
    state: dict[str, Boxes] = {}
    add_box(state, "weight/x", (4, 3), (1, 0), torch.zeros(2, 3))
    planner = LoadPlanner()
    planner.set_up_planner(state, Metadata({"weight/x": stored}))
    with pytest.raises(ValueError, match="'weight/x': the checkpoint has 3 of the 6 elements needed"):
        planner.create_local_plan()
