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
from sdp_deepspeed.training.mistakes import MISTAKE_EXIT_CODE, reported_mistakes
from sdp_deepspeed.training.options import Options, parse_options
from sdp_deepspeed.training.run_folder import RunFolder, RunFolderError

ROOT = Path(__file__).parents[1]


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


CONFIG: dict[str, Any] = {"model": {"hidden": 1}, "deepspeed_config": {}, "data": {}, "seed": 0, "num_ranks": 2}


def folder_with(path: Path, config: dict[str, Any]) -> RunFolder:
    folder = RunFolder(path, writes=True)
    folder.create()
    folder.write_json("config.json", config | {"steps": 5})
    return folder


def test_a_folder_goes_on_with_the_same_run_only(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CONFIG)
    folder.check_same_run(CONFIG | {"steps": 9})
    with pytest.raises(ValueError, match=r"model\.hidden: 1 then, 2 now; num_ranks: 2 then, 4 now.*--run-folder"):
        folder.check_same_run(CONFIG | {"model": {"hidden": 2}, "num_ranks": 4})


def test_other_steps_are_refused_where_the_schedule_ends_with_them(tmp_path: Path) -> None:
    def config(total: int, steps: int) -> dict[str, Any]:
        scheduler = {"scheduler": {"params": {"total_num_steps": total}}}
        return CONFIG | {"deepspeed_config": scheduler, "steps": steps}

    folder = RunFolder(tmp_path, writes=True)
    folder.create()
    folder.write_json("config.json", config(5, 5))
    folder.check_same_run(config(5, 9))  # a schedule of its own length
    with pytest.raises(ValueError, match=r'--steps was 5 .* is 9 now; .*schedule ends.*write "total_num_steps": 5'):
        folder.check_same_run(config(9, 9))
    with pytest.raises(ValueError, match=r"total_num_steps: 5 then, 7 now"):
        folder.check_same_run(config(7, 9))


@pytest.mark.parametrize(("path", "reason"), [("file", "there is a file"), ("file/below", "Not a directory")])
def test_a_folder_that_cannot_be_made(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / path, writes=True)
    assert folder.read_json("config.json") is None
    with pytest.raises(ValueError, match=f"--run-folder: cannot make {tmp_path / path}: {reason}.*; choose another"):
        folder.create()


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CONFIG)
    for name in ("metrics.jsonl", "report.json.tmp"):
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match=r"cannot write .*report\.json: No space left on device; make it possible"):
        folder.write_json("report.json", {"steps": 1})
    folder.raise_problem()
    folder.append_metrics({"step": 1})
    assert folder.failed, "kept until the ranks have agreed on it"
    with pytest.raises(RunFolderError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        folder.raise_problem()


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    first, second = folder_with(tmp_path, CONFIG), RunFolder(tmp_path, writes=True)
    with pytest.raises(ValueError, match="is in use"):
        second.create()
    del first
    second.create()


def test_metrics_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CONFIG)
    for step in range(5):
        folder.append_metrics({"step": step, "loss": float("nan") if step == 1 else 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a crash in the middle of a line
    folder.drop_metrics_after(2)
    assert folder.metrics() == [{"step": 0, "loss": 0.5}, {"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CONFIG)
    for step in (9, 10, 100):
        (folder.checkpoints / f"step_{step:08d}").mkdir(parents=True)
    for killed in (".step_00000005.writing", ".step_00000009.replaced"):
        (folder.checkpoints / killed).mkdir()
    (folder.checkpoints / ".latest.writing").touch()
    folder.prune_checkpoints(2)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step_00000010", "step_00000100"]


def test_ranks_that_do_not_write_leave_no_trace(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", writes=False)
    folder.create()
    folder.write_json("config.json", {})
    folder.append_metrics({"step": 1})
    folder.drop_metrics_after(0)
    assert not (tmp_path / "run").exists()


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
    from sdp_deepspeed.support import refuse_unsupported

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
