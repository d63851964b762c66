"""Training on tokens that are made beside it: the program, its processes, and a run whose cache was lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.documents import text
from tests.helpers.fineweb import write_shard
from tests.helpers.launched_runs import Forked, launched, train_records
from tests.launcher.test_pretrain import DEEPSPEED, MODEL

STEPS, SAVED = 6, 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards, each of which is a part of seconds of work."""
    for shard in range(3):
        pages = [text(number) * 20 for number in range(shard, 3000, 3)]
        write_shard(tmp_path / "mirror" / f"{shard:03d}_00000.parquet", pages, rows=100)
    data: dict[str, Any] = {"source": "files", "path": str(tmp_path / "mirror"), "vocab_size": 300}
    data |= {"sequence_length": 32, "validation_fraction": 0.1, "validation_blocks": 4}
    data |= {"tokenize": "during", "shuffle_window": 16, "workers": 1, "cache_dir": str(tmp_path / "cache")}
    for name, content in (("model", MODEL), ("deepspeed", DEEPSPEED), ("data", data)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_a_run_goes_on_exactly_without_its_cache(folder: Path) -> None:
    steps = ("--steps", str(STEPS), "--save-interval", str(SAVED))
    with launched(folder, "run", *steps) as running:
        running.wait_for_step(folder / "run" / "metrics.jsonl", 1)
        processes = running.tree()
        names = [" ".join(process.cmdline()) for process in processes if process.is_running()]
        assert sum("sdp_deepspeed.data.background" in name for name in names) == 1, "one for the ranks of a machine"
        assert running.wait() == 0, running.explain()
        assert not psutil.wait_procs(processes, timeout=60)[1], "all end with the ranks"
    straight = train_records(folder, "run")
    assert list((folder / "cache").glob(".data-*.growing")), "it was only tokenized as far as it was read"
    for path in (folder / "cache").glob(".data-*"):
        shutil.rmtree(path)
    checkpoints = folder / "run" / "checkpoints"
    shutil.rmtree(checkpoints / f"step_{STEPS:08d}")
    (checkpoints / "latest").write_text(f"step_{SAVED:08d}")
    (folder / "run" / "report.json").unlink()
    settings = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps(settings | {"workers": 2}))  # on another machine
    with Forked(folder, "run", *steps) as again:
        codes, output = again.finish()
    assert codes == [0, 0], again.explain()
    assert f"resuming at step {SAVED}" in output
    assert "data: preparing files text" in output, "of the process that tokenizes"
    assert output.count("data: waiting for 4 held-out blocks") == 1, "of rank 0"
    resumed = train_records(folder, "run")
    for field in ("loss", "gradient_norm"):
        assert [record[field] for record in resumed.values()] == [record[field] for record in straight.values()]
