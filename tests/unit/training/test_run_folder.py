"""The folder of a run: what may go on in it, and what a failure leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.training.run_folder import RunFolder, RunFolderError

CONFIG: dict[str, Any] = {"model": {"hidden": 1}, "deepspeed_config": {}, "data": {}, "seed": 0, "num_ranks": 2}


def folder_with(path: Path, config: dict[str, Any]) -> RunFolder:
    folder = RunFolder(path, writes=True)
    folder.create()
    folder.write_json("config.json", config | {"steps": 5})
    return folder


def test_a_folder_goes_on_with_the_same_run_only(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CONFIG)
    folder.check_same_run(CONFIG | {"steps": 9})
    with pytest.raises(ValueError, match=r"model\.hidden: 1 then, 2 now; num_ranks: 2 then, 4 now.*--run-folder"):
        folder.check_same_run(CONFIG | {"model": {"hidden": 2}, "num_ranks": 4})


def test_a_run_with_the_block_goes_on_with_another_layout(tmp_path: Path) -> None:
    def config(num_ranks: int, holders: int, lr: float = 0.1) -> dict[str, Any]:
        deepspeed = {"subnetwork_data_parallel": {"holders": holders}, "optimizer": {"lr": lr}}
        return CONFIG | {"deepspeed_config": deepspeed, "num_ranks": num_ranks}

    folder = folder_with(tmp_path, config(2, 1))
    moved = folder.check_same_run(config(4, 2))
    assert moved == {"num_ranks": (2, 4), "deepspeed_config.subnetwork_data_parallel.holders": (1, 2)}
    with pytest.raises(ValueError, match=r"other settings \(deepspeed_config\.optimizer\.lr: 0\.1 then, 0\.2 now\)"):
        folder.check_same_run(config(4, 2, lr=0.2))
    with pytest.raises(ValueError, match="subnetwork_data_parallel"):
        folder.check_same_run(CONFIG)


def test_other_steps_are_refused_where_the_schedule_ends_with_them(tmp_path: Path) -> None:
    def config(total: int, steps: int) -> dict[str, Any]:
        scheduler = {"scheduler": {"params": {"total_num_steps": total}}}
        return CONFIG | {"deepspeed_config": scheduler, "steps": steps}

    folder = RunFolder(tmp_path, writes=True)
    folder.create()
    folder.write_json("config.json", config(5, 5))
    folder.check_same_run(config(5, 9))  # a schedule of its own length
    with pytest.raises(ValueError, match=r'--steps was 5 .* is 9 now; .*schedule ends.*write "total_num_steps": 5'):
        folder.check_same_run(config(9, 9))
    with pytest.raises(ValueError, match=r"total_num_steps: 5 then, 7 now"):
        folder.check_same_run(config(7, 9))


@pytest.mark.parametrize(("path", "reason"), [("file", "there is a file"), ("file/below", "Not a directory")])
def test_a_folder_that_cannot_be_made(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / path, writes=True)
    assert folder.read_json("config.json") is None
    with pytest.raises(ValueError, match=f"--run-folder: cannot make {tmp_path / path}: {reason}.*; choose another"):
        folder.create()


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CONFIG)
    for name in ("metrics.jsonl", ".report.json.writing"):
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match=r"cannot write .*report\.json: No space left on device; make it possible"):
        folder.write_json("report.json", {"steps": 1})
    folder.raise_problem()
    folder.append_metrics({"step": 1})
    assert folder.failed, "kept until the ranks have agreed on it"
    with pytest.raises(RunFolderError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        folder.raise_problem()


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    first, second = folder_with(tmp_path, CONFIG), RunFolder(tmp_path, writes=True)
    with pytest.raises(ValueError, match="is in use"):
        second.create()
    del first
    second.create()


def test_metrics_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CONFIG)
    for step in range(5):
        folder.append_metrics({"step": step, "loss": float("nan") if step == 1 else 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a crash in the middle of a line
    folder.drop_metrics_after(2)
    assert folder.metrics() == [{"step": 0, "loss": 0.5}, {"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CONFIG)
    for step in (9, 10, 100):
        (folder.checkpoints / f"step_{step:08d}").mkdir(parents=True)
    folder.prune_checkpoints(2)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step_00000010", "step_00000100"]
    (folder.checkpoints / "latest").write_text("step_00000010")  # resumed from there, and saved again
    folder.prune_checkpoints(1)
    assert (folder.checkpoints / "step_00000010").exists()


def test_ranks_that_do_not_write_leave_no_trace(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", writes=False)
    folder.create()
    folder.write_json("config.json", {})
    folder.append_metrics({"step": 1})
    folder.drop_metrics_after(0)
    assert not (tmp_path / "run").exists()
