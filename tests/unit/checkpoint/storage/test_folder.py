"""A checkpoint's folder: what is written in which order, what is replaced, what is undone and what is pruned."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.checkpoint import save
from sdp_deepspeed.checkpoint.storage import folder as files
from sdp_deepspeed.checkpoint.storage.manifest import FORMAT, hashed_file


def test_order_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, manifest and folder are on the disk before the name is; `latest` follows; only then old ones go."""
    events: list[str] = []

    def name_of(handle: int) -> str:
        every = (tmp_path, *tmp_path.rglob("*"))
        return next(path.name for path in every if path.stat().st_ino == os.fstat(handle).st_ino)

    def logged(call: Callable[..., None]) -> Callable[..., None]:
        def write_down(source: Path, target: Path) -> None:
            events.append(f"{Path(source).name} -> {Path(target).name}")
            call(source, target)

        return write_down

    monkeypatch.setattr(os, "fsync", lambda handle: events.append(f"sync {name_of(handle)}"))
    monkeypatch.setattr(os, "rename", logged(os.rename))
    monkeypatch.setattr(os, "replace", logged(os.replace))
    for saved_at, tag in enumerate(("old", "new")):
        events.clear()
        records: dict[str, Any] = {}
        with hashed_file(files.open_staging(tmp_path, tag) / "data", records) as file:
            file.write(b"x")
        manifest = {"format": FORMAT, "global_steps": 0, "saved_at": saved_at, "files": records}
        save.publish(manifest, save.Target(tmp_path, tag, keep_last=1))
    folder = tmp_path.name
    assert events == [
        *("sync data", "sync manifest.json", "sync .new.writing", ".new.writing -> new", f"sync {folder}"),
        *("sync .latest.writing", ".latest.writing -> latest", f"sync {folder}", "old -> .old.removed"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "new"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_text("")
    with pytest.raises(ValueError, match="is not a checkpoint of sdp_deepspeed"):
        files.open_staging(tmp_path, "hf")
    (tmp_path / "hf" / "manifest.json").write_text("damaged")
    files.open_staging(tmp_path, "hf")


def test_a_replacement_that_was_cut_off_is_undone(tmp_path: Path) -> None:
    replaced = tmp_path / ".step_1.replaced"
    replaced.mkdir()
    files.restore_replaced(tmp_path)
    assert (tmp_path / "step_1").is_dir()
    assert not replaced.exists()


def test_a_replacement_that_fails_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if source.name == ".tag.writing":
            raise OSError(5, "Input/output error")
        rename(source, target)

    (files.open_staging(tmp_path, "tag") / "old").touch()
    files.publish(tmp_path, "tag", {}, latest=True)
    files.open_staging(tmp_path, "tag")
    monkeypatch.setattr(files.os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        files.publish(tmp_path, "tag", {}, latest=True)
    files.abort(tmp_path, "tag")
    assert (tmp_path / "tag" / "old").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "tag"]


def test_what_latest_names_is_not_pruned(tmp_path: Path) -> None:
    for step, tag in enumerate(["first", "second", "third"]):
        files.open_staging(tmp_path, tag)
        manifest = {"format": FORMAT, "global_steps": step, "saved_at": step}
        files.publish(tmp_path, tag, manifest, latest=tag == "first")
    files.prune(tmp_path, files.complete_tags(tmp_path), keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "latest", "third"]


def test_latest_that_may_be_cut_short_is_refused(tmp_path: Path) -> None:
    """Where its text begins another name; a line that ends is taken at its word, as is one that begins no other."""
    for saved_at, tag in enumerate(("step_1", "step_10")):
        files.open_staging(tmp_path, tag)
        files.publish(tmp_path, tag, {"format": FORMAT, "global_steps": 0, "saved_at": saved_at}, latest=True)
    pointer = tmp_path / "latest"
    assert pointer.read_text() == "step_10\n"
    for text, newest in (("step_10", "step_10"), ("step_1\n", "step_1"), ("step_10\n", "step_10"), ("step", "step_10")):
        pointer.write_text(text)
        assert files.candidates(tmp_path)[0][0] == newest
    pointer.write_text("step_1")
    with pytest.raises(ValueError, match=rf"{pointer} says 'step_1' without an end .* 'step_10': it may be cut short"):
        files.candidates(tmp_path)
    (tmp_path / "step_10" / "manifest.json").unlink()  # it may have been damaged since
    with pytest.raises(ValueError, match="'step_10': it may be cut short"):
        files.candidates(tmp_path)


def test_half_removed_ones_go_with_the_next(tmp_path: Path) -> None:
    """Folders of stock engines too, which have no manifest; what another thread has removed is no error."""
    for name in ("step_1", "step_2", ".step_0.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    files.prune(tmp_path, ["lost", "step_1", "step_2"], keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_a_checkpoint_is_found_by_its_folder_or_the_one_above(tmp_path: Path) -> None:
    for saved_at, tag in enumerate(("first", "second")):
        files.open_staging(tmp_path, tag)
        manifest = {"format": FORMAT, "global_steps": 0, "saved_at": saved_at}
        files.publish(tmp_path, tag, manifest, latest=tag == "first")
    assert files.find_checkpoint(tmp_path) == tmp_path / "first"
    assert files.find_checkpoint(tmp_path / "second") == tmp_path / "second"
    assert files.find_checkpoint(tmp_path, "second") == tmp_path / "second"
    (tmp_path / "empty").mkdir()
    for path, words in ((tmp_path / "lost", "no folder"), (tmp_path / "empty", "no complete checkpoint")):
        with pytest.raises(ValueError, match=words):
            files.find_checkpoint(path)
