"""How fast is text tokenized, beside the plain tokenizer on the same text?

    OMP_NUM_THREADS=1 python benchmarks/tokenize_speed.py --output benchmarks/results/tokenize_speed.json

The text is the standard library's source, written as a parquet file of FineWeb's columns; the tokenizer is a byte-level
BPE of 32,000 entries that is trained on it. Each contestant runs in a process of its own, all of them in every repeat:
the plain tokenizer on texts in memory (its bare batch call), and the way from the parquet file to ids on disk, with
worker processes of one thread or with one process whose tokenizer has threads. Time counts when everything has
started. CPU seconds of all processes are what compares on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.provenance import write_result
from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.corpus import open_corpus
from sdp_deepspeed.data.parts import documents_of, in_stream_order
from sdp_deepspeed.data.stream_writer import StreamWriter, Wanted
from sdp_deepspeed.data.tokenizer import SavedTokenizer, encode, load_tokenizer, train_tokenizer
from sdp_deepspeed.data.worker import WorkerSetup
from sdp_deepspeed.data.workers import InThisProcess, Workers, WorkQueue

VOCAB_SIZE = 32_000
BATCH = 256  # texts in a call of the plain tokenizer, some hundred kilobytes
# Contestant -> threads of the tokenizer, worker processes (0: none beside this one).
CONTESTANTS: dict[str, tuple[int, int]] = {
    "plain tokenizer, 1 thread": (1, 0),
    "plain tokenizer, 2 threads": (2, 0),
    "to disk, 1 worker": (1, 1),
    "to disk, 2 workers": (1, 2),
    "to disk, 1 process of 2 threads": (2, 0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=str, help="where the raw figures go, as JSON")
    parser.add_argument("--repeats", type=int, default=5, help="of every contestant (default 5)")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        print(json.dumps(_measure(arguments.contestant, arguments.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        size = _prepare(Path(temporary))
        load = os.getloadavg()
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        for _ in range(arguments.repeats):
            for name in CONTESTANTS:
                runs[name].append(_run(name, Path(temporary)))
                print(f"{name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    result = {"what": "tokenize_speed", "arguments": {"repeats": arguments.repeats}, "text_bytes": size, "runs": runs}
    write_result(arguments.output, result | {"load": {"before": load, "after": os.getloadavg()}})


def _prepare(folder: Path) -> int:
    """The parquet file and the tokenizer; returns the bytes of text."""
    texts = list(documents_of(open_corpus(DataConfig()).parts()))
    pq.write_table(pa.table({"text": texts}), folder / "text.parquet", row_group_size=40)
    train_tokenizer(texts, VOCAB_SIZE).save_pretrained(folder / "tokenizer")
    return sum(len(text.encode()) for text in texts)


def _run(name: str, folder: Path) -> dict[str, float]:
    threads, _ = CONTESTANTS[name]
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads)}
    environment["TOKENIZERS_PARALLELISM"] = "false" if threads == 1 else "true"
    command = [sys.executable, __file__, "--contestant", name, "--folder", str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(run.stdout)
    return found


def _measure(name: str, folder: Path) -> dict[str, float]:
    """Tokens, seconds and CPU seconds of one run."""
    return _plain(folder) if name.startswith("plain") else _to_disk(folder, CONTESTANTS[name][1])


def _plain(folder: Path) -> dict[str, float]:
    tokenizer = load_tokenizer(str(folder / "tokenizer")).backend_tokenizer
    texts = pq.read_table(folder / "text.parquet")["text"].to_pylist()
    encode(tokenizer, texts[:20])
    with _clock() as clock:
        tokens = sum(
            len(encoding) + 1
            for start in range(0, len(texts), BATCH)
            for encoding in tokenizer.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False)
        )
    return clock | {"tokens": tokens}


def _to_disk(folder: Path, num_workers: int) -> dict[str, float]:
    corpus = open_corpus(DataConfig(source="files", path=str(folder / "text.parquet")))
    setup = WorkerSetup(SavedTokenizer.of(load_tokenizer(str(folder / "tokenizer")), folder / "tokenizer"), 0.001)
    folders = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
    with folders[0] as elsewhere, folders[1] as target, _queue(setup, num_workers) as queue:
        parts = in_stream_order(corpus.parts())
        warm = StreamWriter(Path(elsewhere), parts[: max(1, num_workers)], queue, vocab_size=VOCAB_SIZE)
        warm.write(Wanted, on_part=lambda part, result: None)
        writer = StreamWriter(Path(target), parts, queue, vocab_size=VOCAB_SIZE)
        with _clock() as clock:
            writer.write(Wanted, on_part=lambda part, result: None)
        tokens = sum(count.tokens for count in writer.journal.counts().values())
    return clock | {"tokens": tokens}


@contextmanager
def _queue(setup: WorkerSetup, num_workers: int) -> Iterator[WorkQueue]:
    if not num_workers:
        yield InThisProcess(setup)
        return
    with Workers(setup, num_workers).running() as workers:
        yield workers


@contextmanager
def _clock() -> Iterator[dict[str, float]]:
    """Fills in seconds, and CPU seconds of this process and those that it has started."""
    found: dict[str, float] = {}
    family = [psutil.Process(), *psutil.Process().children()]
    started, cpu = time.perf_counter(), _cpu_seconds(family)
    yield found
    found |= {"seconds": time.perf_counter() - started, "cpu_seconds": _cpu_seconds(family) - cpu}


def _cpu_seconds(family: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in family))


if __name__ == "__main__":
    main()
