"""A folder in Hugging Face format: the names of its files, and how they come there all at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sdp_deepspeed.atomic_files import added_when_complete

CONFIG = "config.json"
WEIGHTS = "model.safetensors"  # if there is one file
WEIGHTS_INDEX = "model.safetensors.index.json"  # if there are several
# What the tokenizers of Transformers write.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja"),
)
# What an earlier export of other shards leaves, and would be loaded in place of the new ones.
_WEIGHT_FILE = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


@contextmanager
def new_model(folder: Path, *, variant: str | None = None) -> Iterator[Path]:
    """A folder to write a model to, whose files come to `folder` when all of them are complete.

    Args:
        folder: others' files in it stay; weights of an earlier export go.
        variant: of the weights, which then stand beside others.
    """

    def is_earlier(name: str) -> bool:
        return variant is None and _WEIGHT_FILE.fullmatch(name) is not None

    with added_when_complete(folder, last=CONFIG, replaces=is_earlier) as staging:
        yield staging
