"""Lists that stay short, and names that were meant."""

from __future__ import annotations

import tomllib

from sdp_deepspeed.messages import NEEDS_DEEPSPEED, did_you_mean, lacks_deepspeed, listed, nearest, quoted
from tests.helpers.repository import ROOT


def test_long_lists_are_cut() -> None:
    assert listed([]) == ""
    assert listed(range(5)) == "0, 1, 2, 3, 4"
    assert listed(range(8)) == "0, 1, 2, 3, 4, +3 more"
    assert listed("abc", limit=1, separator="; ") == "a; +2 more"
    assert quoted(["a", 1]) == "'a', 1"


def test_names_that_were_meant() -> None:
    known = ("coverage", "holders")
    assert nearest("covrage", known) == "coverage"
    assert nearest("covrage", known, cutoff=0.99) is None
    assert did_you_mean("holder", known) == "did you mean 'holders'?"
    assert did_you_mean("xyz", known) == "known: coverage, holders"


def test_who_needs_deepspeed() -> None:
    assert lacks_deepspeed(ModuleNotFoundError("", name="deepspeed.runtime"))
    assert not lacks_deepspeed(ModuleNotFoundError("", name="deepspeed_kernels"))
    assert not lacks_deepspeed(ImportError("", name="deepspeed"))  # it is there, and broken
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert NEEDS_DEEPSPEED.endswith("pip install " + " ".join(f'"{wanted}"' for wanted in extra["deepspeed"]))
