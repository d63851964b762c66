"""A small corpus of FineWeb's schema, the stream that its tokens make, and a writer that a test drives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.corpus import open_corpus
from sdp_deepspeed.data.growing import GrowingTokens, Writer
from sdp_deepspeed.data.parts import Part, in_stream_order
from sdp_deepspeed.data.stream_writer import StreamWriter, Wanted
from sdp_deepspeed.data.tokenize_part import SplitName, token_dtype
from sdp_deepspeed.data.tokenizer import SavedTokenizer, train_tokenizer
from sdp_deepspeed.data.worker import WorkerSetup
from sdp_deepspeed.data.workers import InThisProcess, WorkQueue
from tests.helpers.documents import text
from tests.helpers.fineweb import plain_ids, split, write_shard

FRACTION = 0.2
NUM_PAGES = 120
ROWS = 10


@cache
def small_tokenizer() -> Any:
    """Of Transformers."""
    return train_tokenizer([text(number) for number in range(40)], 300)


@dataclass(frozen=True)
class SmallStream:
    """Its parts, and all that a writer needs.

    Args:
        folder: of the shards and the tokenizer.
        parts: in their order.
    """

    folder: Path
    parts: list[Part]

    @property
    def setup(self) -> WorkerSetup:
        return WorkerSetup(SavedTokenizer.of(small_tokenizer(), self.folder / "tokenizer"), FRACTION)

    @property
    def vocab_size(self) -> int:
        return self.setup.tokenizer.vocab_size

    def documents(self) -> list[str]:
        """In the order of the stream."""
        return [text for part in self.parts for text in part.documents()]

    def expected(self, documents: list[str] | None = None) -> dict[SplitName, list[int]]:
        """Ids of both splits by the plain tokenizer, one document after the other."""
        texts = split(self.documents() if documents is None else documents, FRACTION)
        return {name: plain_ids(small_tokenizer(), texts[name]) for name in ("train", "validation")}

    def writer(self, target: Path, workers: WorkQueue | None = None, **settings: Any) -> StreamWriter:
        """Of a folder that is made if it is not there."""
        target.mkdir(exist_ok=True)
        workers = workers or InThisProcess(self.setup)
        return StreamWriter(target, self.parts, workers, vocab_size=self.vocab_size, **settings)

    def written(self, target: Path) -> dict[SplitName, list[int]]:
        """Ids that are in a folder."""
        dtype = token_dtype(self.vocab_size)
        names: tuple[SplitName, ...] = ("train", "validation")
        return {name: np.fromfile(target / f"{name}.bin", dtype=dtype).tolist() for name in names}


@dataclass(frozen=True)
class EndlessPart:
    """As slow as text over a bad network."""

    size: int = 1

    def documents(self) -> Iterator[str]:
        time.sleep(600)
        yield "text"


@dataclass(frozen=True)
class BadNetwork:
    """A part that cannot be read so many times."""

    fails: int
    notes: Path
    size: int = 1

    def documents(self) -> Iterator[str]:
        with self.notes.open("a") as notes:
            notes.write("read\n")
        if len(self.notes.read_text().splitlines()) <= self.fails:
            raise ConnectionError("no route")
        yield "text"


def small_stream(folder: Path, *, shards: int = 3) -> SmallStream:
    """Pages in shards of several row groups, each of which is a part when PART_BYTES is 1."""
    pages = [text(number) for number in range(NUM_PAGES)]
    for shard in range(shards):
        write_shard(folder / "mirror" / f"{shard:03d}.parquet", pages[shard::shards], rows=ROWS)
    small_tokenizer().save_pretrained(folder / "tokenizer")
    corpus = open_corpus(DataConfig(source="files", path=str(folder / "mirror")))
    return SmallStream(folder, in_stream_order(corpus.parts()))


class Demand:
    """What a reader told the writer last; `counted` are the parts that were tokenized."""

    def __init__(self, wanted: Wanted | None = None) -> None:
        self.wanted = wanted or Wanted(stop=0)
        self.told: list[Wanted] = []
        self.counted: list[int] = []
        self.stopped = False

    def __call__(self) -> Wanted:
        if self.stopped:
            raise Stopped
        return self.wanted

    def tell(self, wanted: Wanted) -> None:
        self.told.append(wanted)
        self.wanted = wanted

    def on_part(self, part: Part, result: Any) -> None:
        self.counted.append(result.place)


class Stopped(Exception):
    """How a test ends a writer, as a kill would."""


@contextmanager
def writing(stream: SmallStream, target: Path, **settings: Any) -> Iterator[tuple[GrowingTokens, Demand]]:
    """A writer in a thread, and a reader of what it writes."""
    demand = Demand()
    writer = stream.writer(target, **settings)

    def run() -> None:
        with suppress(Stopped):
            writer.write(demand, on_part=demand.on_part)

    thread = threading.Thread(target=run)
    thread.start()
    tokens = GrowingTokens(
        target.with_name("complete"),
        target,
        vocab_size=stream.vocab_size,
        writer=Writer(tell=demand.tell, look=lambda: _alive(thread)),
    )
    try:
        yield tokens, demand
    finally:
        demand.stopped = True
        thread.join()


def _alive(thread: threading.Thread) -> None:
    assert thread.is_alive(), "the writer has ended, and its reader waits"


def blocks_of(ids: list[int], sequence_length: int) -> npt.NDArray[Any]:
    """[N, T], without the rest."""
    count = len(ids) // sequence_length
    return np.array(ids[: count * sequence_length]).reshape(count, sequence_length)
