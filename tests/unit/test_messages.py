"""Who needs DeepSpeed, and how to install it."""

from __future__ import annotations

import tomllib

from sdp_deepspeed.messages import NEEDS_DEEPSPEED, lacks_deepspeed
from tests.helpers.repository import ROOT


def test_who_needs_deepspeed() -> None:
    assert lacks_deepspeed(ModuleNotFoundError("", name="deepspeed.runtime"))
    assert not lacks_deepspeed(ModuleNotFoundError("", name="deepspeed_kernels"))
    assert not lacks_deepspeed(ImportError("", name="deepspeed"))  # it is there, and broken
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert NEEDS_DEEPSPEED.endswith("pip install " + " ".join(f'"{wanted}"' for wanted in extra["deepspeed"]))
