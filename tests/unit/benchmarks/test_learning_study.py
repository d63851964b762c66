"""The learning study in small: what cells cost by formula and counted, what is trained on, and that it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from benchmarks import learning_study
from benchmarks.learning_study import cells, parse_arguments, work
from benchmarks.study import text
from benchmarks.study.cell import Cell, corpus_of, rate_share, run
from benchmarks.study.dropping import Dropping, Kind, dropped, with_dropout
from benchmarks.study.flops import dense_flops, kept_flops, plan_flops
from benchmarks.study.model import Size, build, losses_of_rows
from benchmarks.study.pause import Resources
from benchmarks.study.plans import Planner
from benchmarks.study.rates import TUNING_SEED, tuned_rate
from benchmarks.study.store import Store
from benchmarks.study.subjects import STUDIES, SUBJECTS, Study, Subject
from sdp_deepspeed.config import KEY, MODES, Mode, parse
from sdp_deepspeed.estimate.flops import FlopCounter
from sdp_deepspeed.plan.planner import plan_model
from tests.helpers.core_masks import masked

pytestmark = pytest.mark.slow

SIZE = Size(width=64, depth=2, length=16)  # as many heads as a quarter of four workers needs
STUDY = Study(num_workers=4, rows=2, num_validation_rows=4, points=2, reference=SIZE)
HALF = Subject(SIZE, {"schedule": [{"until": 0.5, "coverage": 0.5}, {"coverage": 1.0}]})
TINY = {"dense": Subject(SIZE), "half": HALF}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny subjects on a text of the test's own."""
    text_of = {f"{name}.py": bytes([100 + name]) * 100 for name in range(100)}
    monkeypatch.setattr(
        text, "source_files", lambda _: ((name, FakeFile(content)) for name, content in text_of.items())
    )
    for name, subject in TINY.items():
        monkeypatch.setitem(SUBJECTS, name, subject)
    monkeypatch.setitem(STUDIES, "tiny", STUDY)
    corpus_of.cache_clear()
    yield
    corpus_of.cache_clear()


class FakeFile:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def read_bytes(self) -> bytes:
        return self._content


def count(model: torch.nn.Module, rows: int = 4) -> float:
    """FLOPs per token of one forward and backward pass."""
    tokens = torch.zeros(rows, SIZE.length + 1, dtype=torch.long)
    with FlopCounter() as counter:
        losses_of_rows(model, tokens).mean().backward()
    return counter.total / (rows * SIZE.length)


def test_dense_steps_cost_what_is_counted() -> None:
    assert dense_flops(SIZE) == count(build(SIZE, seed=0))


@pytest.mark.parametrize("coverage", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_steps_of_a_plan_cost_what_the_masked_modules_do(mode: Mode, coverage: float) -> None:
    """Those that the engine trains, one for each worker."""
    model = build(SIZE, seed=0)
    block = parse({KEY: {"coverage": coverage, **mode._asdict()}})
    assert block is not None
    plan, _ = plan_model(model, block, 4)
    counted = [count(masked(model, plan, rank)[0]) for rank in range(4)]
    assert plan_flops(model, SIZE, plan) == pytest.approx(sum(counted) / 4, rel=1e-12)


def test_dropped_branches_are_not_computed() -> None:
    """Half of four rows, whatever is drawn."""
    model = build(SIZE, seed=0)
    with dropped(model, Dropping(0.5), progress=0.0, num_rows=4, seed=1):
        assert count(model) == kept_flops(SIZE, 0.5)
    assert count(model) == dense_flops(SIZE)


def test_what_a_dropped_branch_adds_counts_for_more() -> None:
    model = build(SIZE, seed=0)
    rows = torch.randint(256, (8, SIZE.length + 1))

    def added(dropping: Dropping | None) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        with dropped(model, dropping, 0.0, 8, seed=1) if dropping else nullcontext():
            first = model.get_submodule("model.layers.0.self_attn")
            hook = first.register_forward_hook(lambda *call: outputs.append(call[2][0]))
            losses_of_rows(model, rows)
            hook.remove()
        return outputs[0].detach()

    whole, some = added(None), added(Dropping(0.25))
    lacking = [row for row in range(8) if not some[row].any()]
    assert len(lacking) == 2
    held = [row for row in range(8) if row not in lacking]
    torch.testing.assert_close(some[held], whole[held] / 0.75)


def test_dropout_of_elements() -> None:
    """Of the embeddings and of each branch, and none of it afterward."""
    model = build(SIZE, seed=0)
    rows = torch.randint(256, (4, SIZE.length + 1))
    plain = losses_of_rows(model, rows)
    seen: list[float] = []
    with with_dropout(model, 0.5):
        names = ["model.embed_tokens", "model.layers.0.self_attn", "model.layers.1.mlp"]
        for name in names:
            model.get_submodule(name).register_forward_hook(
                lambda _, __, output: seen.append(
                    float(((output[0] if isinstance(output, tuple) else output) == 0).float().mean())
                )
            )
        assert not torch.equal(losses_of_rows(model, rows), plain)
    assert seen == pytest.approx([0.5] * 3, abs=0.05)
    assert torch.equal(losses_of_rows(model, rows), plain)


def test_rates_of_dropping() -> None:
    """Alike, growing with depth, and growing with depth and time."""
    rates = {kind: Dropping(0.4, kind) for kind in get_args(Kind)}
    assert [rates["branch"].of_layer(layer, 2, 0.0) for layer in (0, 1)] == [0.4, 0.4]
    assert [rates["depth"].of_layer(layer, 2, 0.0) for layer in (0, 1)] == [0.2, 0.4]
    assert rates["progressive"].of_layer(1, 2, 0.0) == 0.0
    assert 0.39 < rates["progressive"].of_layer(1, 2, 1.0) < 0.4
    assert rates["depth"].mean(2, 0.5) == pytest.approx(0.3)


@pytest.mark.parametrize("name", ["dense", "half"])
def test_a_budget_is_spent_and_not_more(name: str, tiny: None) -> None:
    result = run(Cell("tiny", name, 0, 20, 1e-3), STUDY, TINY[name])
    assert result is not None
    budget = 20 * STUDY.tokens() * dense_flops(SIZE)
    assert result["flops"] == pytest.approx(budget, rel=0.03)  # whole steps
    assert (result["steps"] == 20) == (name == "dense")
    assert result["tokens"] == result["steps"] * STUDY.tokens()
    assert [point["step"] for point in result["curve"]] == [round(result["steps"] / 2), result["steps"]]


def test_the_blocks_own_schedule_decides() -> None:
    plans = list(Planner(HALF, STUDY).plans(10))
    assert [plan.is_whole for _, plan in plans] == [False] * 5 + [True] * 5
    assert len({id(plan) for _, plan in plans}) == 2  # nothing is planned anew in between
    drawn = Planner(Subject(SIZE, {"coverage": 0.5, "redraw_interval": 2}), STUDY)
    hashes = [plan.hash for _, plan in drawn.plans(6)]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3] != hashes[4]


def test_all_subjects_can_run() -> None:
    """Blocks are of the product's language."""
    for subject in SUBJECTS.values():
        Planner(subject, STUDIES["text"]).check()
        assert json.loads(json.dumps(subject.described()))
    with pytest.raises(ValueError, match="coverage"):
        Planner(Subject(block={"schedule": [{"until": 0.5, "coverage": 0.5}, {"coverage": 2}]}), STUDY).check()


def test_a_cell_is_the_same_each_time(tiny: None) -> None:
    def figures(seed: int) -> dict[str, Any]:
        result = run(Cell("tiny", "half", seed, 3, 1e-3), STUDY, HALF)
        assert result is not None
        assert all(result.pop(key) >= 0 for key in ("cpu_seconds", "seconds"))
        return result

    assert figures(0) == figures(0)
    assert figures(0)["curve"] != figures(1)["curve"]


def test_no_text_is_on_both_sides(tiny: None) -> None:
    corpus = text.read_corpus("any")
    trained, validated = ({*side.tolist()} for side in (corpus.train, corpus.validation))
    assert trained
    assert validated
    assert not trained & validated
    assert trained | validated == {*range(100, 200)}
    assert {100 + name for name in range(100) if text.is_validation(f"{name}.py")} == validated


def test_copies_of_a_file_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One name is of the validation text, others are not."""
    names = [f"{name}.py" for name in range(40)]
    assert len({text.is_validation(name) for name in names}) == 2
    files = [(name, FakeFile(b"x" * 7)) for name in names]
    monkeypatch.setattr(text, "source_files", lambda _: iter(files))
    with pytest.raises(ValueError, match="no file is on one of its sides"):
        text.read_corpus("any")
    other = next(name for name in names if text.is_validation(name) != text.is_validation(min(names, key=text._digest)))
    files[names.index(other)] = (other, FakeFile(b"y" * 5))
    corpus = text.read_corpus("any")
    assert sorted([len(corpus.train), len(corpus.validation)]) == [5, 7]


def test_corpora_that_are_there() -> None:
    for name, ending in (("stdlib", ".py"), ("headers", ".h"), ("python", ".py")):
        files = [own for own, _ in text.source_files(name)]
        assert len(files) > 100
        assert all(own.endswith(ending) for own in files)
        assert not any("site-packages" in own for own in files)
        assert ("torch/nn/functional.py" in files) == (name == "python")
    with pytest.raises(ValueError, match='expected "stdlib", "headers" or "python"'):
        list(text.source_files("other"))


def test_rows_are_the_same_for_all_subjects_and_change_with_step_and_seed() -> None:
    content = torch.arange(200, dtype=torch.uint8)
    rows = text.training_rows(content, 1, 5, 3, 8)
    assert rows.shape == (3, 9)
    assert (rows[:, 1:] - rows[:, :-1] == 1).all()
    assert torch.equal(rows, text.training_rows(content, 1, 5, 3, 8))
    assert not torch.equal(rows, text.training_rows(content, 1, 6, 3, 8))
    assert not torch.equal(rows, text.training_rows(content, 2, 5, 3, 8))
    assert text.validation_rows(content, 2, 8)[:, [0, -1]].tolist() == [[0, 8], [191, 199]]


def test_the_learning_rate_rises_and_falls() -> None:
    shares = [rate_share(step, 100, 0.05) for step in range(100)]
    assert shares[0] == pytest.approx(0.2)
    assert shares[4] == shares[5] == max(shares) == 1.0
    assert shares[-1] == pytest.approx(1 / 95)


def done(path: Path, minutes: float, *arguments: str) -> list[dict[str, Any]]:
    """Cells in the file after a run with one thread."""
    options = parse_arguments(["--output", str(path), "--study", "tiny", "--budgets", "2", *arguments])
    store = Store(path)
    with ThreadPoolExecutor(1) as pool:
        end = datetime.now(tz=UTC) + timedelta(minutes=minutes)
        work(list(cells(options, store)), store, pool, num_processes=1, resources=Resources(end=end))
    return Store(path).cells


def test_it_goes_on_where_it_stopped(tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.json"
    ran: list[Cell] = []

    def recorded(cell: Cell, *rest: Any) -> dict[str, Any] | None:
        ran.append(cell)
        return run(cell, *rest)

    monkeypatch.setattr(learning_study, "run", recorded)
    assert done(path, 0, "--only", "dense") == []  # out of time
    first = done(path, 9, "--only", "dense")
    both = done(path, 9, "--only", "dense", "half")
    assert [cell.subject for cell in ran] == ["dense", "half"]
    assert {cell["subject"] for cell in both} == {"dense", "half"}
    assert first[0] in both
    assert {"what", "cells", "provenance"} == json.loads(path.read_text(encoding="utf-8")).keys()
    monkeypatch.setitem(SUBJECTS, "half", Subject(SIZE, {"coverage": 0.5}))  # changed: done again, in its place
    again = done(path, 9, "--only", "dense", "half")
    assert [cell.subject for cell in ran] == ["dense", "half", "half"]
    assert len(again) == 2


def test_cells_beside_one_that_fails_are_kept(tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.json"

    def failing(cell: Cell, *rest: Any) -> dict[str, Any] | None:
        if cell.subject == "half":
            raise RuntimeError("out of memory")
        return run(cell, *rest)

    monkeypatch.setattr(learning_study, "run", failing)
    options = parse_arguments(
        ["--output", str(path), "--study", "tiny", "--budgets", "2", "4", "--only", "half", "dense"]
    )
    store = Store(path)
    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="half, seed 0, budget 2: out of memory"):
        work(list(cells(options, store)), store, pool, num_processes=2, resources=Resources())
    assert [(cell["subject"], cell["budget"]) for cell in Store(path).cells] == [("dense", 2)]


def test_rates_are_tuned_on_a_seed_that_no_figure_has(tmp_path: Path, tiny: None) -> None:
    path = tmp_path / "study.json"
    tried = done(path, 9, "--only", "dense", "--tune")
    assert [cell["seed"] for cell in tried] == [TUNING_SEED] * 3
    assert sorted(cell["rate"] for cell in tried) == [2e-3, 4e-3, 8e-3]
    best = min(tried, key=lambda cell: cell["loss"])["rate"]
    assert (tuned_rate(tried, "tiny", "dense"), tuned_rate(tried, "tiny", "half")) == (best, None)
    assert [cell["rate"] for cell in done(path, 9, "--only", "dense") if cell["seed"] == 0] == [best]
    given = done(path, 9, "--only", "dense", "--rates", "0.003")
    assert {cell["rate"] for cell in given if cell["seed"] == 0} == {best, 3e-3}
