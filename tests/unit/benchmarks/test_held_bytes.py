"""Bytes of tensors, wherever they are held."""

from __future__ import annotations

import torch

from benchmarks.common.held_bytes import storage_bytes, tensors_in


def test_each_storage_counts_once() -> None:
    whole = torch.zeros(10)
    empty = torch.zeros(5)
    empty.untyped_storage().resize_(0)
    assert storage_bytes([whole, whole[2:4], whole.view(2, 5), empty]) == 40
    assert storage_bytes([whole[:1]], {whole.untyped_storage().data_ptr()}) == 0


def test_tensors_are_found_in_nested_containers() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    assert list(tensors_in({"a": [one, None, 3], "b": {"c": (two,)}, "d": "text"})) == [one, two]
