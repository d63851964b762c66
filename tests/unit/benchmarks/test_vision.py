"""Who is measured on images, and what the classifier is."""

from __future__ import annotations

from benchmarks.systems.images import COVERAGES, RESNET_18, image_subjects
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
    shapes = image_subjects(4)[0].dense_shapes(RESNET_18)
    assert [shape for shape in shapes.values() if len(shape) == 2] == [(10, 512)]
    assert shapes["resnet.embedder.embedder.convolution.weight"] == (64, 3, 3, 3)
