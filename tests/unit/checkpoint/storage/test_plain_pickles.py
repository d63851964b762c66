"""Pickles that are refused: what is said of them, and what is never said."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sdp_deepspeed.checkpoint.storage.plain_pickles import read_plain
from tests.helpers.foreign_code import Malicious


def _malicious(path: Path) -> None:
    torch.save({"a": Malicious(path.parent)}, path)


def _malicious_of_old_format(path: Path) -> None:
    torch.save({"a": Malicious(path.parent)}, path, _use_new_zipfile_serialization=False)


def _plain_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": Malicious(path.parent)}, protocol=2))


def _a_class(path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1), path)


def _cut(path: Path) -> None:
    torch.save({"a": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:-100])


def _strange_operations(path: Path) -> None:
    torch.save({"a": 1}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes().replace(b"}", b"\x95", 1))


@pytest.mark.parametrize(
    "make", [_malicious, _malicious_of_old_format, _plain_pickle, _a_class, _cut, _strange_operations, Path.touch]
)
def test_a_refusal_never_tells_how_to_switch_the_check_off(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "file.pt")
    with pytest.raises(ValueError, match=r"file\.pt") as caught:
        read_plain(tmp_path / "file.pt")
    said = str(caught.value).lower()
    for advice in ("weights_only", "safe_globals", "trust", "still be loaded", "torch.load"):
        assert advice not in said, said
    assert caught.value.__suppress_context__
    assert not (tmp_path / "ran").exists()


def test_what_was_found_is_named(tmp_path: Path) -> None:
    _malicious(tmp_path / "file.pt")
    with pytest.raises(ValueError, match=r"could run foreign code: it names posix\.mkdir$"):
        read_plain(tmp_path / "file.pt")


def test_plain_values_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "b": [1, "x", None]}, tmp_path / "file.pt")
    content = read_plain(tmp_path / "file.pt")
    assert content["b"] == [1, "x", None]
    assert torch.equal(content["a"], torch.ones(3))
