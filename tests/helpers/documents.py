"""Blocks of code in README.md and docs/guide.md, as they are printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import CodeType

from tests.helpers.repository import ROOT

DOCUMENTS = ("README.md", "docs/guide.md")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Args:
        heading: of its section.
        line: number of its first line.
        language: "python", "diff", "bash", "json" or "text".
    """

    document: str
    heading: str
    line: int
    language: str
    text: str

    @property
    def code(self) -> CodeType:
        """Of Python, or of a diff of Python after the change; with the document's line numbers."""
        lines = self.text.splitlines()
        if self.language == "diff":
            lines = [line[1:] for line in lines if not line.startswith("-")]
        return compile("\n" * (self.line - 1) + "\n".join(lines), str(ROOT / self.document), "exec")


def blocks_of(*languages: str) -> list[Block]:
    """All blocks in some languages, in order."""
    blocks = []
    for document in DOCUMENTS:
        heading, start, language = "", 0, ""
        lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            if line.startswith("```") and not start:
                start, language = number + 1, line.removeprefix("```")
            elif line.startswith("```"):
                blocks.append(Block(document, heading, start, language, "\n".join(lines[start - 1 : number - 1])))
                start = 0
            elif not start and (match := re.match(r"## (.*)", line)):
                heading = match[1]
    return [block for block in blocks if block.language in languages]
