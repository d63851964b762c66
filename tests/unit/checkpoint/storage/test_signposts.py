"""Whoever opens a checkpoint as one of DeepSpeed's reads whose it is; DeepSpeed's own functions are the judges."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.state_dict_factory import SDLoaderFactory
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from sdp_deepspeed.checkpoint.storage.manifest import read_manifest
from sdp_deepspeed.checkpoint.storage.signposts import MODEL_FILE, signposts


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "global_step1"
    path.mkdir()
    for name, content in signposts().items():
        (path / name).write_bytes(content)
    (tmp_path / "latest").write_text("global_step1")
    return path


def test_plain_deepspeed_says_whose_it_is(checkpoint: Path) -> None:
    with pytest.raises(AssertionError, match=r"checkpoint of sdp_deepspeed: `import sdp_deepspeed`"):
        SDLoaderFactory.get_sd_loader([str(checkpoint / MODEL_FILE)], TorchCheckpointEngine())


def test_zero_to_fp32_points_to_export(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint of sdp_deepspeed: use `sdp checkpoint export"):
        get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent))


def test_a_checkpoint_of_deepspeeds_own_points_to_from_zero(tmp_path: Path) -> None:
    path = tmp_path / "global_step7"
    path.mkdir()
    (path / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(ValueError, match=rf"sdp checkpoint from-zero {tmp_path} <new folder> --tag global_step7"):
        read_manifest(path)
