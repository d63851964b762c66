"""Commands on files that somebody got wrong: a result, or one line and exit code 2."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.__main__ import main
from sdp_deepspeed.command_parser import USER_ERROR_EXIT_CODE
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.hostile import refusal_of
from tests.helpers.properties import fuzzed


def assert_result_or_one_line(*arguments: object) -> None:
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main([str(argument) for argument in arguments])
    told = errors.getvalue()
    if code == 0:
        assert output.getvalue().strip()
    else:
        assert code == USER_ERROR_EXIT_CODE
        assert told.startswith("error: ")
        assert told.count("\n") == 1


@fuzzed()
@given(
    st.lists(
        st.sampled_from(
            ["--ranks", "--coverage", "--regime", "--dtype", "--accumulation", "--offload", "--accumulate-in-fp32"]
        )
        | st.sampled_from(["1", "0", "-3", "0.5", "1e400", "nan", "8", "backward", "bf16", "", "٣", "9" * 30]),
        max_size=6,
    )
)
def test_estimate(arguments: list[str]) -> None:
    assert_result_or_one_line("estimate", *arguments)


@pytest.mark.parametrize("depth", [500, 5_000, 200_000])
def test_nested_deeply(depth: int) -> None:
    """More than a parser of JSON takes, or than our own functions would."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        path.write_text('{"version": 1, "label": ' + "[" * depth + "]" * depth + "}")
        assert refusal_of(lambda: Plan.load(path))
