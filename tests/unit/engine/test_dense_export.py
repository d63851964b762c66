"""A module's own `save_pretrained`, on one pretended rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

from sdp_deepspeed.engine.dense_export import DenseExport


def test_a_state_dict_that_was_given_is_written_by_whoever_has_it() -> None:
    """Also by a function that takes it among others (PEFT's); no other rank is asked."""
    applied = mock.Mock(dense_view=mock.Mock(is_whole=False, is_collective=True))
    resident = mock.Mock(side_effect=AssertionError("a collective"))
    export = DenseExport(mock.Mock(), applied, mock.Mock(), resident)
    written: list[dict[str, Any]] = []

    def save(folder: str, **options: Any) -> None:
        written.append(options)

    export.save_by_itself(save, "hf", state_dict={"a": 1})
    assert written == [{"state_dict": {"a": 1}}]
    assert not resident.called
