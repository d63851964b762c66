"""Commands on files that somebody got wrong: a result, or one line and exit code 2."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.cli import main
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.hostile import refusal_of
from tests.helpers.properties import fuzzed
from tests.helpers.repository import ROOT


def assert_result_or_one_line(*arguments: object) -> None:
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main([str(argument) for argument in arguments])
    told = errors.getvalue()
    if code == 0:
        assert output.getvalue().strip()
    else:
        assert code == 2
        assert told.startswith("error: ")
        assert told.count("\n") == 1


_KEYS = ["sdp.coverage", "sdp", "sdp.schedule", "model.hidden_size", "model.num_hidden_layers", "model", "data"]
_KEYS += ["training.bf16", "training.per_device_train_batch_size", "deepspeed.zero_optimization", "deepspeed"]
_VALUES: tuple[str, ...] = (
    "1",
    "0",
    "-3",
    "0.5",
    "1e400",
    "nan",
    "null",
    "true",
    "{}",
    "[]",
    "[1]",
    "{a: 1}",
    "auto",
    "",
    "٣",
    "9" * 30,
)


@fuzzed()
@given(st.lists(st.tuples(st.sampled_from(_KEYS), st.sampled_from(_VALUES)), max_size=3), st.sampled_from(["2", "7"]))
def test_estimate_and_plan(overrides: list[tuple[str, str]], ranks: str) -> None:
    for command in ("estimate", "plan"):
        arguments = [f"{key}={value}" for key, value in overrides]
        assert_result_or_one_line(command, ROOT / "configs/recipes/quickstart.yaml", *arguments, "--ranks", ranks)


@pytest.mark.parametrize("depth", [500, 5_000, 200_000])
def test_nested_deeply(depth: int) -> None:
    """More than a parser of JSON takes, or than our own functions would."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        path.write_text('{"version": 1, "label": ' + "[" * depth + "]" * depth + "}")
        assert refusal_of(lambda: Plan.load(path))
