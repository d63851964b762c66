"""Every place that writes a file is known: tests/fuzz/test_cut_files.py cuts its text anywhere, or here is why not."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.helpers.repository import PACKAGE
from tests.helpers.written_files import WRITTEN_FILES

WRITERS = ("write_text", "write_bytes", "save_file", "save_pretrained", "hashed_file", "pwrite", "copyfile")
OF_LIBRARIES = ("torch.save", "np.save", "json.dump", "pickle.dump")

EXEMPT = {
    # How others write.
    "atomic_files.py: write_text",
    "checkpoint/storage/manifest.py: hashed_file",
    "engine/dense_calls.py: DenseCalls.save_pretrained",
    "training/engines.py: save_pretrained",
    "training/session.py: run_session",
    # One line for Python, which reads it or not.
    "arming.py: arm",
    # No text.
    "checkpoint/interop/export.py: _write_weights",
    "checkpoint/interop/from_zero.py: _add_rest",
    "checkpoint/state/snapshot.py: _plain_bytes",
    "checkpoint/storage/signposts.py: _saved",
    "checkpoint/storage/chunk_files.py: SafetensorsWriter.write_data",
    "data/stream_writer.py: _open",
    "data/tokenize_part.py: PartTokenizer.run",
    # To another process.
    "data/background.py: BackgroundWriter._say",
    "data/worker.py: main",
    "data/workers.py: Workers._serve",
    "data/workers.py: _ask",
    # Copies for Transformers, which nobody here reads.
    "checkpoint/interop/export.py: export",
    "checkpoint/interop/export.py: _write_configs",
    # Standard output.
    "hosts/probe.py: main",
    # A document of the repository.
    "support/matrix.py: write_matrix",
}


def _is_write(call: ast.Call) -> bool:
    function, name = call.func, ast.unparse(call.func)
    last = function.attr if isinstance(function, ast.Attribute) else name
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    to_write = any(set(text) & set("wax+") and set(text) <= set("rwaxbt+") for text in texts)
    return last in WRITERS or name in OF_LIBRARIES or (last in ("open", "fdopen") and to_write)


def writers_in(node: ast.AST, *within: str) -> Iterator[str]:
    """Functions, with the classes and functions that they are in."""
    for child in ast.iter_child_nodes(node):
        inner = (*within, child.name) if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else within
        if isinstance(child, ast.Call) and _is_write(child):
            yield ".".join(within)
        yield from writers_in(child, *inner)


def test_writers_are_known() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {writer}"
        for path in PACKAGE.rglob("*.py")
        for writer in writers_in(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == {writer for file in WRITTEN_FILES for writer in file.writers} | EXEMPT


@pytest.mark.parametrize(
    "source",
    ["p.write_text('')", "open(p, 'w')", "p.open('ab')", "json.dump(a, b)", "open(p, mode='r+')", "os.pwrite(h)"],
)
def test_a_writer_is_found(source: str) -> None:
    assert list(writers_in(ast.parse(f"class A:\n  def b(self):\n    {source}"))) == ["A.b"]


@pytest.mark.parametrize("source", ["p.read_text()", "open(p)", "open(p, 'rb')", "torch.load(p)", "json.dumps(a)"])
def test_a_reader_is_not(source: str) -> None:
    assert not list(writers_in(ast.parse(source)))
