"""The command line `sdp`: its verbs, and how it tells mistakes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import sdp_deepspeed
from sdp_deepspeed.__main__ import VERBS, main
from sdp_deepspeed.command_parser import Parser, read_json, run_command


def one_line(text: str) -> str:
    assert text.startswith("error: ")
    assert text.count("\n") == 1, text
    return text


@pytest.mark.parametrize("words", [[], *([verb] for verb in VERBS), ["checkpoint", "export"]], ids=" ".join)
def test_help_is_for_people(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    printed = capsys.readouterr()
    assert end.value.code == 0
    assert not printed.err
    assert printed.out.startswith(f"usage: {' '.join(['sdp', *words])} ")
    assert max(map(len, printed.out.splitlines())) <= 120
    if not words:
        text = " ".join(printed.out.split())
        assert all(f"{verb} {purpose}" in text for verb, (_, purpose) in VERBS.items())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"sdp_deepspeed {sdp_deepspeed.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "required: VERB (sdp --help"),
        ("estimat", "invalid choice: 'estimat'"),
        ("--verbose", "(sdp --help lists the options)"),
        ("estimate --rank 8", "unrecognized arguments: --rank"),
        ("checkpoint", "required: ACTION (sdp checkpoint --help"),
        ("checkpoint inspect nowhere", "nowhere"),
        ("checkpoint export nowhere", "required: out (sdp checkpoint export --help"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert words in one_line(printed.err)
    assert not printed.out


def outcome(error: BaseException | None = None) -> int:
    """The exit code of a command that raises `error`, or returns 7."""

    def run(options: argparse.Namespace) -> int:
        if error is not None:
            raise error
        return 7

    parser = Parser(prog="sdp")
    parser.set_defaults(run=run)
    return run_command(parser, [])


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome() == 7
    for error in (ValueError("a\n  b"), OSError("a b"), RuntimeError("a b")):
        assert outcome(error) == 2
        assert one_line(capsys.readouterr().err) == "error: a b\n"
    assert outcome(KeyboardInterrupt()) == 130
    with pytest.raises(KeyError):
        outcome(KeyError("a bug of ours keeps its traceback"))


def test_files_that_are_no_json_object(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    contents = {"{\n  'a': 1}": r"a\.json:2:3: not JSON", "[1]": "holds a list: expected a JSON object"}
    for content, words in contents.items():
        path.write_text(content)
        with pytest.raises(ValueError, match=rf"^--model: .*{words}"):
            read_json(path, "--model")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a\.json is not text"):
        read_json(path, "--model")
