"""An export over an older one: `from_pretrained` finds the older weights, none, or the new ones, never a mixture."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from sdp_deepspeed.checkpoint.hf_folder import save_pretrained
from tests.helpers.models import SPECIMENS

SIZES = {"whole": "1GB", "few shards": "20KB", "many shards": "10KB"}
OLD, NEW, STALE = 0.5, 0.25, 0.125  # values of all weights
BOTH = "whole, beside shards"  # as Transformers leaves a folder; it reads the whole one


class Faults:
    """The `number`th change of a file fails (from 1), as does every later one."""

    def __init__(self, number: int) -> None:
        self._left, self.happened = number, False

    def before(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left <= 0:
                self.happened = True
                raise OSError("no more changes")
            return change(*arguments, **options)

        return call


def model(value: float) -> Any:
    result: Any = SPECIMENS["llama"].build()
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.fill_(value)
    result.config.initializer_range = value
    return result


def values_in(folder: Path) -> set[float]:
    """Values of weights and in the config; empty if the folder has no model."""
    try:
        found = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return set()
    values = {float(value) for tensor in found.state_dict().values() for value in tensor.unique()}
    return values | {found.config.initializer_range}


@pytest.mark.parametrize(
    ("old", "new"),
    [("whole", "many shards"), ("many shards", "whole"), ("few shards", "many shards"), (BOTH, "many shards")],
)
def test_all_moments(old: str, new: str, tmp_path: Path) -> None:
    older, folder = tmp_path / "older", tmp_path / "out"
    model(OLD).save_pretrained(older, max_shard_size=SIZES["whole" if old == BOTH else old])
    if old == BOTH:
        model(STALE).save_pretrained(older, max_shard_size=SIZES["few shards"])
        model(OLD).config.save_pretrained(older)
    (older / "notes.txt").write_text("kept")
    seen: list[set[float]] = []
    left: list[set[str]] = []  # files of weights when none can be loaded
    faults = Faults(0)
    while not seen or faults.happened:
        shutil.copytree(older, folder)
        faults = Faults(len(seen) + 1)
        with (
            mock.patch("os.replace", faults.before(os.replace)),
            mock.patch("os.unlink", faults.before(os.unlink)),
            mock.patch("os.fsync"),
            suppress(OSError),
        ):
            save_pretrained(model(NEW), folder, max_shard_size=SIZES[new])
        seen.append(values_in(folder))
        if not seen[-1]:
            left.append({path.name for path in folder.rglob("*.safetensors")})
        assert (folder / "notes.txt").is_file()
        shards = {path.name for path in folder.glob("*.safetensors")}
        shutil.rmtree(folder)
    assert seen[0] == {OLD}
    assert seen[-1] == {NEW}
    assert all(values in ({OLD}, {NEW}, set()) for values in seen)
    model(NEW).save_pretrained(folder, max_shard_size=SIZES[new])
    assert shards == {path.name for path in folder.glob("*.safetensors")}
    assert left
    assert all(names >= shards for names in left), "an interrupted export is lost"


def test_an_error_keeps_the_older_export(tmp_path: Path) -> None:
    save_pretrained(model(OLD), tmp_path, max_shard_size="10KB")
    with pytest.raises(AttributeError):
        save_pretrained(model(NEW), tmp_path, object(), max_shard_size="10KB")
    assert values_in(tmp_path) == {OLD}
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(AttributeError):
        save_pretrained(model(NEW), tmp_path / "new", object())
    assert not (tmp_path / "new").exists(), "nothing is left"


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    save_pretrained(model(NEW), Path(".."))
    assert values_in(tmp_path) == {NEW}


def test_other_weights_are_kept(tmp_path: Path) -> None:
    save_pretrained(model(OLD), tmp_path, variant="fp16", max_shard_size="10KB")
    save_pretrained(model(NEW), tmp_path)
    assert values_in(tmp_path) == {NEW}
    found = AutoModelForCausalLM.from_pretrained(tmp_path, variant="fp16", local_files_only=True)
    assert {float(value) for value in found.state_dict()["lm_head.weight"].unique()} == {OLD}
