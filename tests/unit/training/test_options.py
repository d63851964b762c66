"""The training program's parts that need no ranks: command line, run folder, mistakes, stop requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.config import KEY
from sdp_deepspeed.training.options import Options, parse_options
from sdp_deepspeed.training.user_errors import MISTAKE_EXIT_CODE, reported_mistakes

ROOT = Path(__file__).parents[3]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A model JSON and a DeepSpeed JSON that are right."""
    contents: dict[str, dict[str, Any]] = {
        "model": {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 64},
        "deepspeed": {"scheduler": {"params": {"total_num_steps": "auto"}}, KEY: {"coverage": 0.5}},
    }
    paths = {name: tmp_path / f"{name}.json" for name in contents}
    for name, path in paths.items():
        path.write_text(json.dumps(contents[name]))
    return paths


def parse(files: dict[str, Path], *extra: str) -> Options:
    fixed = ["--model", str(files["model"]), "--deepspeed_config", str(files["deepspeed"])]
    return parse_options([*fixed, "--run-folder", "runs/x", "--steps", "7", *extra])


def test_what_the_command_line_decides_is_filled_in(files: dict[str, Path]) -> None:
    options = parse(files, "--local_rank=3")
    assert options.deepspeed_config["scheduler"]["params"]["total_num_steps"] == 7
    assert options.data == {"sequence_length": 64, "vocab_size": 300}
    assert options.deepspeed_config[KEY] == {"coverage": 0.5}


def test_the_baseline_differs_by_the_block_alone(files: dict[str, Path]) -> None:
    ours, theirs = parse(files), parse(files, "--baseline")
    assert theirs.deepspeed_config == {key: value for key, value in ours.deepspeed_config.items() if key != KEY}


def test_a_data_file_keeps_what_it_says(files: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"source": "files", "path": "x.txt", "tokenizer": "gpt2", "sequence_length": 32}))
    options = parse(files, "--data", str(data))
    assert options.data == {"source": "files", "path": "x.txt", "tokenizer": "gpt2", "sequence_length": 32}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read .*: No such file"),
        ("{\n  'a': 1}", "model.json:2:3: not JSON"),
        ("[1]", "holds a list: expected a JSON object"),
        ("{}", 'has no "model_type"'),
        (b"\xff\xfe\x00", "is not text"),
    ],
)
def test_a_model_file_that_is_wrong(files: dict[str, Path], content: str | bytes | None, words: str) -> None:
    if content is None:
        files["model"].unlink()
    else:
        files["model"].write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words):
        parse(files)


@pytest.mark.parametrize("extra", [["--steps", "0"], ["--steps", "many"], ["--stepps", "3"], ["--eval-interval=-1"]])
def test_options_that_are_wrong(files: dict[str, Path], extra: list[str]) -> None:
    with pytest.raises(ValueError, match="--help lists the options"):
        parse(files, *extra)


def test_a_mistake_is_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "launch/pretrain.py", "--model", "nowhere.json"]
    result = subprocess.run(
        [*command, "--deepspeed_config", "configs/quickstart.json", "--run-folder", "runs/never", "--steps", "1"],
        cwd=ROOT,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == MISTAKE_EXIT_CODE
    assert result.stderr == "error: --model: cannot read nowhere.json: No such file or directory\n"


def test_other_ranks_let_rank_0_speak(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waited: list[float] = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(SystemExit) as end, reported_mistakes(KeyError):
        raise KeyError("a host's own error")
    assert end.value.code == MISTAKE_EXIT_CODE
    assert waited
    assert "error on rank 3: " in capsys.readouterr().err


def test_our_own_bugs_keep_their_traceback() -> None:
    with pytest.raises(KeyError), reported_mistakes():
        raise KeyError("bug")


def test_signals_ask_once_and_leave_no_handler_behind() -> None:
    from sdp_deepspeed.training.stopping import STOP_SIGNALS, StopRequest

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopRequest() as stop:
        assert not stop.requested
        for number in (*STOP_SIGNALS, *STOP_SIGNALS):
            os.kill(os.getpid(), number)
        assert stop.requested
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_launcher_that_is_gone_asks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from sdp_deepspeed.training.stopping import StopRequest

    with StopRequest() as stop:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert stop.requested


def test_the_quickstart_takes_no_arguments() -> None:
    result = subprocess.run(
        ["bash", "launch/quickstart.sh", "test"], cwd=ROOT, capture_output=True, text=True, timeout=9
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: quickstart.sh takes no arguments, got: test;")
    assert not result.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "models").glob("*.json")), ids=lambda path: path.stem)
def test_model_files_have_the_size_that_they_say(path: Path) -> None:
    import torch

    from sdp_deepspeed.training.model import build_model

    sizes = {"tiny": 2.1e6, "134M": 134e6, "500M": 500e6, "1B": 1.1e9}
    with torch.device("meta"):
        model = build_model(json.loads(path.read_text()), seed=0)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == pytest.approx(sizes[path.stem], rel=0.01)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_files_are_accepted(path: Path) -> None:
    from sdp_deepspeed.config import parse
    from sdp_deepspeed.support.refusals import refuse_unsupported

    config = json.loads(path.read_text())
    block = parse(config)
    assert block is not None
    refuse_unsupported(block, config)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "data").glob("*.json")), ids=lambda path: path.stem)
def test_data_files_are_accepted(path: Path) -> None:
    from sdp_deepspeed.data import DataConfig

    assert DataConfig.from_dict(json.loads(path.read_text()))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"model_type": "no_such_model"}, "Transformers cannot build 'no_such_model'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "Transformers cannot build 'llama'.*hidden_size"),
        ({"model_type": "llama", "hiden_size": 64}, "unknown key 'hiden_size', did you mean 'hidden_size'"),
    ],
)
def test_models_that_cannot_be_built(shape: dict[str, Any], words: str) -> None:
    from sdp_deepspeed.training.model import build_model

    with pytest.raises(ValueError, match=words):
        build_model(shape, seed=0)


def test_a_tokenizer_or_sequence_too_large_for_the_model() -> None:
    from transformers import LlamaConfig

    from sdp_deepspeed.training.model import check_fits

    config = LlamaConfig(vocab_size=300, max_position_embeddings=64)
    check_fits(config, num_tokens=300, sequence_length=64)
    with pytest.raises(ValueError, match="has 301 entries, the model's vocab_size is 300"):
        check_fits(config, num_tokens=301, sequence_length=64)
    with pytest.raises(ValueError, match="sequence_length is 65, the model's max_position_embeddings 64"):
        check_fits(config, num_tokens=300, sequence_length=65)
