"""What a run may go on with, and what makes it another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.config import KEY
from sdp_deepspeed.training.run_folder import RunFolder
from sdp_deepspeed.training.same_run import check_same_run

CONFIG: dict[str, Any] = {"model": {"hidden": 1}, "deepspeed_config": {}, "data": {}, "seed": 0, "num_ranks": 2}


def folder_with(path: Path, config: dict[str, Any]) -> RunFolder:
    folder = RunFolder(path, writes=True)
    folder.create()
    folder.write_json("config.json", config | {"steps": 5})
    return folder


def test_a_folder_goes_on_with_the_same_run_only(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CONFIG)
    check_same_run(folder, CONFIG | {"steps": 9})
    with pytest.raises(ValueError, match=r"model\.hidden: 1 then, 2 now; num_ranks: 2 then, 4 now.*--run-folder"):
        check_same_run(folder, CONFIG | {"model": {"hidden": 2}, "num_ranks": 4})


def test_a_run_with_the_block_goes_on_with_another_layout(tmp_path: Path) -> None:
    def config(num_ranks: int, holders: int, lr: float = 0.1) -> dict[str, Any]:
        deepspeed = {KEY: {"holders": holders}, "optimizer": {"lr": lr}}
        return CONFIG | {"deepspeed_config": deepspeed, "num_ranks": num_ranks}

    folder = folder_with(tmp_path, config(2, 1))
    moved = check_same_run(folder, config(4, 2))
    assert moved == {"num_ranks": (2, 4), f"deepspeed_config.{KEY}.holders": (1, 2)}
    with pytest.raises(ValueError, match=r"other settings \(deepspeed_config\.optimizer\.lr: 0\.1 then, 0\.2 now\)"):
        check_same_run(folder, config(4, 2, lr=0.2))
    with pytest.raises(ValueError, match=KEY):
        check_same_run(folder, CONFIG)
    elsewhere = config(2, 1) | {"host": "fsdp2"}
    assert check_same_run(folder, elsewhere) == {"host": ("deepspeed", "fsdp2")}


def test_plain_deepspeed_goes_on_by_itself_and_plain_fsdp2_on_any_layout(tmp_path: Path) -> None:
    """Only the first has checkpoints of its own."""
    plain = CONFIG | {"host": "deepspeed"}
    with pytest.raises(ValueError, match="host: 'deepspeed' then, 'fsdp2' now"):
        check_same_run(folder_with(tmp_path / "one", plain), CONFIG | {"host": "fsdp2"})
    folder = folder_with(tmp_path / "other", CONFIG | {"host": "fsdp2"})
    assert check_same_run(folder, CONFIG | {"host": "fsdp2", "num_ranks": 4}) == {"num_ranks": (2, 4)}
    with pytest.raises(ValueError, match="host: 'fsdp2' then, 'deepspeed' now"):
        check_same_run(folder, plain)


def test_other_steps_are_refused_where_the_schedule_ends_with_them(tmp_path: Path) -> None:
    def config(total: int, steps: int) -> dict[str, Any]:
        scheduler = {"scheduler": {"params": {"total_num_steps": total}}}
        return CONFIG | {"deepspeed_config": scheduler, "steps": steps}

    folder = RunFolder(tmp_path, writes=True)
    folder.create()
    folder.write_json("config.json", config(5, 5))
    check_same_run(folder, config(5, 9))  # a schedule of its own length
    with pytest.raises(ValueError, match=r'--steps was 5 .* is 9 now; .*schedule ends.*write "total_num_steps": 5'):
        check_same_run(folder, config(9, 9))
    with pytest.raises(ValueError, match=r"total_num_steps: 5 then, 7 now"):
        check_same_run(folder, config(7, 9))


def test_other_steps_are_refused_where_phases_end_at_fractions_of_them(tmp_path: Path) -> None:
    def config(steps: int, total: int | None = None, until: float = 0.5) -> dict[str, Any]:
        block: dict[str, Any] = {"schedule": [{"until": until, "coverage": 0.5}, {"coverage": 1.0}]}
        return CONFIG | {"deepspeed_config": {KEY: block | {"total_steps": total or steps}}, "steps": steps}

    folder = RunFolder(tmp_path, writes=True)
    folder.create()
    folder.write_json("config.json", config(5))
    assert check_same_run(folder, config(9, total=5)) == {}, "with the length written down"
    with pytest.raises(ValueError, match=r'--steps was 5 .* is 9 now; phases end at fr.*write "total_steps": 5 in the'):
        check_same_run(folder, config(9))
    other = check_same_run(folder, config(9, until=0.7))
    assert [path.rpartition(".")[2] for path in other] == ["schedule", "total_steps"], "another layout from here on"
    with pytest.raises(ValueError, match=r"seed: 0 then, 1 now"):
        check_same_run(folder, config(9) | {"seed": 1})
