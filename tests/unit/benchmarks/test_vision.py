"""Who is measured on images, what the classifier is, and the table of small figures."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.systems.images import COVERAGES, image_subjects, shape_of
from benchmarks.tables.vision import vision
from benchmarks.vision import MODEL
from sdp_deepspeed.config import MODES


def test_who_is_measured() -> None:
    halves = {f"{mode} + ZeRO-1 C=0.5" for mode in MODES}
    quarters = {f"{mode} + ZeRO-1 C=0.25" for mode in MODES if mode.regime == "forward"}
    assert set(COVERAGES) == {mode.regime for mode in MODES}
    for num_ranks, ours in ((4, halves | quarters), (2, halves), (1, set())):
        names = [subject.name for subject in image_subjects(num_ranks)]
        assert names[:2] == ["DDP", "ZeRO-1"]
        assert len(names) == 2 + len(ours)
        assert set(names[2:]) == ours


def test_the_shapes_are_those_of_a_whole_resnet_18() -> None:
    """With ten classes, and the stem of small images."""
    shapes = image_subjects(4)[0].dense_shapes(shape_of(json.loads(MODEL.read_text(encoding="utf-8")), 32))
    assert [shape for shape in shapes.values() if len(shape) == 2] == [(10, 512)]
    assert shapes["resnet.embedder.embedder.convolution.weight"] == (64, 3, 3, 3)


def figures(scale: float, *, seconds: list[float]) -> dict[str, Any]:
    """Of two ranks; the second has twice as much of everything."""
    sizes = {"weights": 1, "gradients": 2, "optimizer": 3, "activations": 4, "peak": 8}
    ranks = [
        {name: times * scale * size * 2**20 for name, size in sizes.items()}
        | {"sent": 1e6 * times, "bound": 8e5 * times, "flops": 100 * scale * times}
        for times in (1, 2)
    ]
    return {"ranks": ranks, "seconds": seconds}


def test_the_table_by_hand() -> None:
    """A step of 500 ms, half of DDP's and a quarter of ZeRO-1's of the same repeat."""
    subjects = {
        "DDP": figures(1, seconds=[1.0, 2.0, 1.0]),
        "ZeRO-1": figures(1, seconds=[2.0, 4.0, 2.0]),
        "forward x block + ZeRO-1 C=0.5": figures(0.5, seconds=[0.5, 1.0, 0.5]),
    }
    arguments = {"micro_batch": 8, "size": 32, "bucket": 2e6, "repeats": 3}
    model = {"name": "resnet18", "num_parameters": 11_170_000}
    facts = {"ranks": 2, "device": "CPU", "baseline": "DDP", "load": 0.25, "provenance": {"cores": 2}}
    lines = vision(facts | {"model": model, "arguments": arguments, "subjects": subjects}).splitlines()
    assert lines[0].startswith("resnet18, 11.2M parameters in fp32, 2 ranks on 2 cores, 8 random images of 32 x 32 per")
    assert lines[4].endswith(
        "| 2.0 | 4.0 | 6.0 | 12.0 | 8.0 | 16.0 | 2.00 | 1.250 | 1.00 | 1000 | 1 | 0.50 (0.50 to 0.50) |"
    )
    shares = "0.50 (0.50 to 0.50) | 0.25 (0.25 to 0.25) |"
    ours = "| forward x block + ZeRO-1, C = 1/2 | 1.0 | 2.0 | 3.0 | 6.0 | 4.0 | 8.0 | 2.00 | 1.250 | 0.50 | 500 |"
    assert lines[-1] == f"{ours} {shares}"
