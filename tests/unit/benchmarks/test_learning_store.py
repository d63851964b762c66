"""The study's file: what is in it stays, whoever writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.learning_study import main
from benchmarks.study.store import Store


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    stores = [Store(path), Store(path)]

    def add(seed: int) -> None:
        names = {"study": "tiny", "subject": "dense", "seed": seed, "budget": 2, "rate": 1e-3}
        stores[seed % 2].add(names)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add, range(20)))
    assert [cell["seed"] for cell in Store(path).cells] == [*range(20)]


def test_a_file_of_something_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"what": "scaling"}', encoding="utf-8")
    with pytest.raises(SystemExit, match=r"error: --output: .*other\.json is not of this study, but of 'scaling'"):
        main(["--output", str(path)])
    path.write_text('{"what": "learning_study"}', encoding="utf-8")
    with pytest.raises(SystemExit, match=r"error: --output: .*other\.json has no list of cells"):
        main(["--output", str(path)])
    path.write_text('{"what": "scaling"}', encoding="utf-8")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"error: .*file"):
        main(["--output", str(tmp_path / "file" / "study.json")])
    assert path.read_text(encoding="utf-8") == '{"what": "scaling"}'
