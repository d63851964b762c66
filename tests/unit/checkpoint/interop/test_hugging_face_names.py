"""A model comes to its folder when all of its files are there, and what an earlier export left does not mix with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_deepspeed.checkpoint.interop.hugging_face_names import new_model
from tests.helpers.checkpointed_runs import names_in

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
SHARDED = ("config.json", *SHARDS)


def write(folder: Path, *names: str, variant: str | None = None) -> None:
    with new_model(folder, variant=variant) as staging:
        for name in names:
            (staging / name).touch()


def test_weights_of_an_earlier_export_go_and_all_else_stays(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    write(folder, *SHARDED)
    for name in ("README.md", "tokenizer.json", "model.onnx", "adapter_model.safetensors"):
        (folder / name).touch()
    theirs = {"README.md", "adapter_model.safetensors", "config.json", "model.onnx", "tokenizer.json"}
    write(folder, "config.json", "model.safetensors")
    assert set(names_in(folder)) == theirs | {"model.safetensors"}
    write(folder, "config.json", "model.fp16.safetensors", variant="fp16")
    assert set(names_in(folder)) == theirs | {"model.safetensors", "model.fp16.safetensors"}
    write(folder, *SHARDED)  # Transformers would load model.safetensors in place of the shards
    assert set(names_in(folder)) == theirs | {"model.fp16.safetensors", *SHARDS}


@pytest.mark.parametrize("is_there", [False, True])
def test_a_full_disk_leaves_no_config_without_weights(tmp_path: Path, *, is_there: bool) -> None:
    folder = tmp_path / "hf"
    if is_there:
        folder.mkdir()
        (folder / "README.md").touch()

    def fail() -> None:
        with new_model(folder) as staging:
            (staging / "config.json").touch()
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert [names_in(path) for path in tmp_path.iterdir()] == ([["README.md"]] if is_there else [])
