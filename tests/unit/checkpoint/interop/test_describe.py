"""`sdp checkpoint inspect`: what it calls complete, and what it says of `latest`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdp_deepspeed.__main__ import main as sdp
from sdp_deepspeed.checkpoint.storage.manifest import read_manifest, write_manifest
from sdp_deepspeed.checkpoint.storage.names import INDEX, LATEST, PLAN
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.dense_checkpoints import forge, forge_manifest, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, {"weight/w": torch.ones(2, 3)})
    return tmp_path


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code, and the last line."""
    code = sdp(["checkpoint", "inspect", str(path)])
    return code, capsys.readouterr().out.splitlines()[-1]


def test_a_complete_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (folder, folder / "tag"):
        assert inspected(path, capsys) == (0, "complete: sizes and hashes of all files are right")


@pytest.mark.parametrize("content", [None, "lost", "", "x" * 300, "../tag"])
def test_a_broken_latest_is_told(folder: Path, capsys: pytest.CaptureFixture[str], content: str | None) -> None:
    (folder / LATEST).unlink()
    if content is not None:
        (folder / LATEST).write_text(content)
    code, line = inspected(folder, capsys)
    assert code == 1
    assert line.startswith(f"{folder / LATEST} ")
    assert line.endswith("this is the newest complete one")
    assert inspected(folder / "tag", capsys)[0] == 0  # which was not asked for


def test_a_manifest_without_files_is_not_complete(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_manifest(folder / "tag", read_manifest(folder / "tag") | {"files": {}})
    assert inspected(folder, capsys) == (1, "damaged")


def test_an_index_with_missing_chunks_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forge(folder / "tag" / INDEX, lambda index: index["weight/w"].update(chunks=[]))
    assert inspected(folder, capsys) == (1, "damaged")


@pytest.mark.parametrize(
    ("holders", "words"),
    [(((0, 1), (1, 2), (0, 2)), "2 holders each"), (((0, 1, 2), (0,), (2,)), "1 to 3 holders, 5 in all")],
)
def test_how_many_hold_units(
    folder: Path, capsys: pytest.CaptureFixture[str], holders: tuple[tuple[int, ...], ...], words: str
) -> None:
    number = 2 if words.startswith("2") else None
    units = tuple(Unit(name, (Piece(name),)) for name in "abc")
    Plan("forward", "block", 3, number, 0, units, holders, (0, 1, 2)).save(folder / "tag" / PLAN)
    forge_manifest(folder / "tag", folder / "tag" / PLAN)
    assert sdp(["checkpoint", "inspect", str(folder)]) == 0
    assert f": forward regime, block strategy, 3 subnetworks, 3 units with {words}\n" in capsys.readouterr().out


@pytest.mark.parametrize("plan", ["", "[]", "{}", "[" * 100_000])
def test_a_plan_that_is_none_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str], plan: str) -> None:
    (folder / "tag" / PLAN).write_text(plan)
    forge_manifest(folder / "tag", folder / "tag" / PLAN)
    assert inspected(folder, capsys) == (1, "damaged")
