"""The data's settings: every mistake is told with its value and what to do, every key has a reader."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.data import DataConfig


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sequence_length": 1}, "sequence_length is 1, expected at least 2"),
        ({"sequence_length": "128"}, "sequence_length is '128', expected a valid integer"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0, expected 0 <= fraction < 1"),
        ({"validation_fraction": float("nan")}, "validation_fraction is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"vocab_size": 100}, "vocab_size is 100, expected at least 257"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, expected at most 1048576"),
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"validation_blocks": 0}, "validation_blocks is 0"),
        ({"validation_blocks": 3, "validation_fraction": 0}, "validation_blocks has no effect"),
        ({"source": "web"}, "source is 'web', expected 'stdlib', 'files' or 'hub'"),
        ({"source": "files"}, "source 'files' needs path"),
        ({"source": "hub"}, "source 'hub' needs path"),
        ({"path": "x"}, "path has no effect with source 'stdlib'"),
        ({"text_column": "x"}, "text_column has no effect with source 'stdlib'"),
        (
            {"source": "files", "path": "x", "subset": "y"},
            "subset has no effect with source 'files': drop it, or use hub",
        ),
        ({"source": "files", "path": "x", "streaming": True}, "streaming has no effect"),
        ({"source": "hub", "path": "x", "text_documents": "line"}, "text_documents has no effect"),
        ({"tokenizer": "gpt2", "vocab_size": 300}, "vocab_size has no effect with tokenizer 'gpt2'"),
        ({"shuffle_window": 5}, 'shuffle_window has no effect unless tokenize is "during"'),
        (
            {"tokenize": "during", "validation_blocks": 1, "shuffle_window": 0},
            "shuffle_window is 0, expected at least 1",
        ),
        ({"tokenize": "during"}, 'tokenize "during" needs validation_blocks'),
        ({"tokenize": "after"}, "tokenize is 'after', expected 'before' or 'during'"),
        ({"workers": 0}, "workers is 0, expected at least 1"),
        ({"workers": 10**6}, "workers is 1000000, expected at most 1024"),
        ({"sequence_lenght": 64}, "unknown key 'sequence_lenght' (did you mean 'sequence_length'?)"),
    ],
)
def test_mistakes_are_told(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="data: ") as error:
        DataConfig.from_dict(values)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"sequence_length.*seed"):
        DataConfig(sequence_length=0, seed=-3)


def test_defaults_and_json() -> None:
    assert DataConfig.from_dict({}) == DataConfig()
    assert DataConfig.from_dict({"sequence_length": 64, "validation_fraction": 0}).sequence_length == 64
