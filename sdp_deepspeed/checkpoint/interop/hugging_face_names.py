"""Names of the files in a folder in Hugging Face format."""

from __future__ import annotations

CONFIG = "config.json"
WEIGHTS = "model.safetensors"  # if there is one file
WEIGHTS_INDEX = "model.safetensors.index.json"  # if there are several
# What the tokenizers of Transformers write.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja"),
)
