"""The example with a model written by hand: its branches are right in all modes."""

from __future__ import annotations

import runpy

import torch

import sdp_deepspeed
from sdp_deepspeed import check_description
from tests.helpers.repository import ROOT


def test_the_model_of_the_example() -> None:
    gpt = runpy.run_path(str(ROOT / "launch/examples/with_own_model.py"), run_name="with_own_model")["GPT"]
    torch.manual_seed(0)
    model = gpt(width=16, num_layers=2, num_heads=4, length=8)
    sdp_deepspeed.trace(model, torch.zeros(2, 8, dtype=torch.long))
    compared = check_description(model, torch.randint(0, 256, (2, 8)))
    assert compared == ["forward x block", "forward x neuron", "backward x block", "backward x neuron"]
