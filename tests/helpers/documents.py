"""Documents that tell which they are, so that a test knows them again in a batch."""

from __future__ import annotations

import re

NUM_DOCUMENTS = 300


def text(number: int) -> str:
    """One to three lines that all have the number."""
    return f"<{number}> document {number} says <{number}> again: naïve café {number * 7919}\n" * (1 + number % 3)


def numbers(text: str) -> set[int]:
    """Of the documents that a stretch of text comes from; with both brackets, since a block's edge may cut a number."""
    return {int(number) for number in re.findall(r"<(\d+)>", text)}
