"""What is patched of the Trainer, where that is still there."""

from __future__ import annotations

import pytest
import transformers.trainer

from sdp_deepspeed.engine.trainer_hook import patch_trainer


def test_a_trainer_of_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook runs in programs that have nothing to do with this package."""
    log = transformers.trainer.Trainer.log
    monkeypatch.delattr(transformers.trainer, "get_model_param_count")
    patch_trainer()
    assert transformers.trainer.Trainer.log is log
