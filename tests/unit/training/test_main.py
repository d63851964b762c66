"""The training program before anything heavy is imported: mistakes, and runs that have ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sdp_deepspeed.messages import NEEDS_DEEPSPEED
from sdp_deepspeed.training.main import main
from tests.helpers.repository import ROOT


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A command line that is right."""
    files = [
        "--model",
        str(ROOT / "configs/models/tiny.json"),
        "--deepspeed_config",
        str(ROOT / "configs/quickstart.json"),
    ]
    return [*files, "--run-folder", str(tmp_path / "run"), "--steps", "7"]


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend that the launcher started this process."""

    def start(rank: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")

    return start


def test_it_needs_the_launcher(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: start this with the launcher: deepspeed --num_gpus <ranks>")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--host", "fsdp2"], "error: --host fsdp2: subnetwork_data_parallel.schedule: "),
        (["--host", "fsdp"], "error: argument --host: invalid choice: 'fsdp'"),
        ([], f"error: --host deepspeed {NEEDS_DEEPSPEED}, or take --host fsdp2"),
    ],
)
def test_a_host_that_cannot_do_it_is_a_mistake(
    arguments: list[str],
    as_rank: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    words: str,
) -> None:
    as_rank(0)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SystemExit) as end:
        main([*arguments, *extra])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(words)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_has_its_steps_is_not_trained_again(
    arguments: list[str], as_rank: Callable[[int], None], rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.json").write_text(json.dumps({"steps": 7}))
    as_rank(rank)
    assert main(arguments) == 0
    said = f"{tmp_path / 'run'} has its 7 steps already; remove it to train again\n"
    assert capsys.readouterr().out == ("" if rank else said)


def test_another_run_in_the_folder_is_a_mistake(
    arguments: list[str], as_rank: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"seed": 1}))
    as_rank(0)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "holds a run with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("report.json", {}, "report.json has no number of steps"),
        ("report.json", {"steps": None}, "report.json has no number of steps"),
        ("report.json", [1], "report.json holds a list, not a JSON object"),
        ("config.json", 3, "config.json holds a int, not a JSON object"),
        ("config.json", {"deepspeed_config": 3}, "holds a run with other settings"),
    ],
)
def test_records_of_another_shape_are_a_mistake(
    arguments: list[str],
    as_rank: Callable[[int], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: object,
    words: str,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text(json.dumps(content))
    as_rank(0)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert words in capsys.readouterr().err
