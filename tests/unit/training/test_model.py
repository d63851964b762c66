"""Models that are built from a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.repository import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "models").glob("*.json")), ids=lambda path: path.stem)
def test_model_files_have_the_size_that_they_say(path: Path) -> None:
    import torch

    from sdp_deepspeed.training.model import build_model

    sizes = {"tiny": 2.1e6, "134M": 134e6, "500M": 500e6, "1B": 1.1e9}
    with torch.device("meta"):
        model = build_model(json.loads(path.read_text()), seed=0)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == pytest.approx(sizes[path.stem], rel=0.01)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"model_type": "no_such_model"}, "Transformers cannot build 'no_such_model'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "Transformers cannot build 'llama'.*hidden_size"),
        ({"model_type": "llama", "num_attention_heads": 0}, "ZeroDivisionError"),
        ({"model_type": "llama", "hidden_size": None}, "Transformers cannot build 'llama'"),
        ({"model_type": "llama", "hiden_size": 64}, "unknown key 'hiden_size', did you mean 'hidden_size'"),
    ],
)
def test_models_that_cannot_be_built(shape: dict[str, Any], words: str) -> None:
    from sdp_deepspeed.training.model import build_model

    with pytest.raises(ValueError, match=words):
        build_model(shape, seed=0)


def data_of(*, entries: int, num_ids: int, length: int) -> Any:
    """What is asked of a `DataBundle`."""
    prepared, train = SimpleNamespace(vocab_size=num_ids), SimpleNamespace(sequence_length=length)
    return SimpleNamespace(tokenizer=range(entries), prepared=prepared, train=train)


def test_a_tokenizer_or_sequence_too_large_for_the_model() -> None:
    from transformers import LlamaConfig

    from sdp_deepspeed.training.model import check_fits

    config = LlamaConfig(vocab_size=300, max_position_embeddings=64)
    check_fits(config, data_of(entries=300, num_ids=300, length=64))
    with pytest.raises(ValueError, match="needs 301 ids, the model's vocab_size is 300"):
        check_fits(config, data_of(entries=301, num_ids=301, length=64))
    with pytest.raises(ValueError, match=r"needs 401 ids \(it has 300 and leaves gaps\), the model's"):
        check_fits(config, data_of(entries=300, num_ids=401, length=64))
    with pytest.raises(ValueError, match="sequence_length is 65, the model's max_position_embeddings 64"):
        check_fits(config, data_of(entries=300, num_ids=300, length=65))
