"""What the training program's command line says, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.config import KEY
from sdp_deepspeed.training.options import Options, parse_options


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


@pytest.mark.parametrize("given", [{}, {"total_steps": "auto"}])
def test_phases_that_end_at_fractions_get_the_number_of_steps(files: dict[str, Path], given: dict[str, Any]) -> None:
    block = {"schedule": [{"until": 0.5, "coverage": 0.5}, {"coverage": 1.0}]} | given
    files["deepspeed"].write_text(json.dumps({KEY: block}))
    assert parse(files).deepspeed_config == {KEY: block | {"total_steps": 7}}
    assert parse(files, "--baseline").deepspeed_config == {}


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
        ("[" * 100_000, "not JSON that can be read: maximum recursion depth"),
        ('{"a": ' + "1" * 5000 + "}", "not JSON that can be read: Exceeds the limit"),
        ('{"model_type": 3}', 'has no "model_type"'),
        ('{"model_type": "llama", "max_position_embeddings": null}', "max_position_embeddings: got None, expected a w"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "num_attention_heads: got 0, expected a whole number"),
        ('{"model_type": "llama", "hidden_size": 1e3}', "hidden_size: got 1000.0, expected a whole number"),
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


@pytest.mark.parametrize("scheduler", [None, {"type": "WarmupLR", "params": None}, []])
def test_a_scheduler_of_another_shape(files: dict[str, Path], scheduler: object) -> None:
    files["deepspeed"].write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "scheduler": scheduler}))
    with pytest.raises(ValueError, match=r"scheduler(\.params)?: got (None|\[\]), expected an object"):
        parse(files)


def test_sizes_that_follow_from_others_may_be_null(files: dict[str, Path]) -> None:
    derived = {"head_dim": None, "num_key_value_heads": None}
    files["model"].write_text(json.dumps({"model_type": "llama"} | derived))
    assert parse(files).model == {"model_type": "llama"} | derived
