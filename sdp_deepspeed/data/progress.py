"""What is told while text is tokenized: a line in the log now and then, or a bar."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from sdp_deepspeed.data.journal import Journal
from sdp_deepspeed.data.parts import Part
from sdp_deepspeed.data.tokenize_part import TokenizedPart

_LOG_SECONDS = 60.0
log = logging.getLogger(__name__)


def show_log() -> None:
    """Lines of this room on stderr, unless the program has a log of its own; Python shows none below a warning."""
    room = logging.getLogger(__package__)
    if room.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("data: %(message)s"))
    room.addHandler(handler)
    room.setLevel(logging.INFO)


class LogProgress(ExitStack):
    """Hears of the parts of one source. A line in the log every minute: large corpora take hours."""

    def __init__(self) -> None:
        super().__init__()
        self._started = self._logged = time.monotonic()
        self._total = self._done = self._tokens = 0

    def start(self, parts: Sequence[Part], journal: Journal) -> None:
        """All parts, of which some may be done."""
        journal.refresh()
        self._total = sum(part.size for part in parts)
        self._done = sum(part.size for number, part in enumerate(parts) if number in journal)

    def part(self, part: Part, result: TokenizedPart) -> None:
        """One more is done."""
        self._done += part.size
        self._tokens += sum(count.tokens for count in result.counts.values())
        if time.monotonic() - self._logged > _LOG_SECONDS:
            self._logged = time.monotonic()
            rate = self._tokens / (self._logged - self._started)
            log.info("%.1f %% of the text tokenized, %.0f tokens/s", 100 * self._done / max(1, self._total), rate)


class BarProgress(LogProgress):
    """A bar over bytes of text, with tokens per second."""

    def start(self, parts: Sequence[Part], journal: Journal) -> None:
        from tqdm import tqdm

        super().start(parts, journal)
        interval = 0.5 if sys.stderr.isatty() else 10.0
        bar = tqdm(
            total=self._total, initial=self._done, unit="B", unit_scale=True, mininterval=interval, dynamic_ncols=True
        )
        self._bar = self.enter_context(bar)

    def part(self, part: Part, result: TokenizedPart) -> None:
        self._tokens += sum(count.tokens for count in result.counts.values())
        rate = self._tokens / max(1e-9, time.monotonic() - self._started)
        self._bar.set_postfix({"tokens": f"{self._tokens:,}", "tokens/s": f"{rate:,.0f}"}, refresh=False)
        self._bar.update(part.size)
