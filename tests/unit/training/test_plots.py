"""Plots of losses: what is drawn, and what is said where nothing can be."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from sdp_deepspeed.training.curves import Curve
from sdp_deepspeed.training.plots import loss_figure

CURVE = Curve("mine", losses=(6.0, 5.0), amounts=(0, 100), seconds=(0.0, 7200.0), flops=(0, 50))


def test_each_panel_has_its_axis() -> None:
    other = replace(CURVE, label="no FLOPs", flops=None, losses=(6.0, 5.5))
    panels = loss_figure([CURVE, other]).axes
    lines = [[line.get_xydata().tolist() for line in panel.get_lines()] for panel in panels]
    assert lines[0] == [[[0, 6], [100, 5]], [[0, 6], [100, 5.5]]]
    assert lines[1] == [[[0, 6], [50, 5]]]
    assert lines[2] == [[[0, 6], [2, 5]], [[0, 6], [2, 5.5]]]
    assert [panel.get_xlabel() for panel in panels] == ["tokens", "FLOPs of all ranks", "hours of training"]
    assert [text.get_text() for text in panels[0].get_legend().get_texts()] == ["mine", "no FLOPs"]
    assert "dense" in panels[0].get_ylabel()
    colors = [{line.get_label(): line.get_color() for line in panel.get_lines()} for panel in panels]
    assert len({panel["mine"] for panel in colors}) == 1, "a run has one color"


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r'--plot needs matplotlib: pip install "sdp_deepspeed\[plot\]"'):
        loss_figure([CURVE])


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="no run has an evaluation yet"):
        loss_figure([replace(CURVE, losses=(), amounts=(), seconds=(), flops=())])
