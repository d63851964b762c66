"""Save and load without an engine: one rank, what it trains, and a folder. More ranks: tests/ranks/checkpoint."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sdp_deepspeed.checkpoint.load import LoadOptions
from sdp_deepspeed.checkpoint.storage.names import COMMON, INDEX, rank_file
from sdp_deepspeed.folder_lock import LOCK
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.dense_checkpoints import forge
from tests.helpers.other_jobs import other_job
from tests.helpers.trained_states import Trained, checkpointer_of, names_in, one_rank
from tests.helpers.training import assert_identical

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which is what these tests want
ALL = LoadOptions()


def trained(num_steps: int = 2, **options: Any) -> Trained:
    state = one_rank(**options)
    for _ in range(num_steps):
        state.step()
    return state


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, dtype: torch.dtype, stage: int) -> None:
    saved, loaded = trained(dtype=dtype, stage=stage), trained(1, dtype=dtype, stage=stage)
    checkpointer_of(saved).save(tmp_path, None, {"position": 7})
    number = random.random()
    assert names_in(tmp_path) == ["global_step2", "latest"]
    assert checkpointer_of(loaded).load(tmp_path, None, ALL) == (str(tmp_path / "global_step2"), {"position": 7})
    assert random.random() == number
    assert (loaded.global_steps, loaded.micro_steps) == (2, 4)
    assert (saved.calls, loaded.calls) == (["save_checkpoint"], ["load_checkpoint", "before_restore(2)"])
    for state in (saved, loaded):
        state.step()
    assert_identical(saved.tensors(), loaded.tensors())


def test_another_layout_and_precision(tmp_path: Path) -> None:
    """Weights are rounded once, and buffers are those of a holder."""
    saved = trained(dtype=torch.float32)
    checkpointer_of(saved).save(tmp_path, "tag", {})
    other = trained(1, dtype=torch.bfloat16, stage=0, rows=(2, 1))
    checkpointer_of(other).load(tmp_path, "tag", ALL)
    for name, value in saved.module.state_dict().items():
        assert torch.equal(other.module.state_dict()[name], value.to(other.module.state_dict()[name].dtype)), name


def test_another_plan_of_the_same_units_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update that assigns otherwise; a config that was changed, such as its rules, needs no such words."""
    units = (Unit("a", (Piece("a"),)), Unit("b", (Piece("b"),)))
    first = Plan("forward", "block", 2, None, 0, units, ((0,), (0, 1)), (0, 1))
    others = [first, replace(first, holders=((1,), (0, 1))), replace(first, regime="backward")]
    others += [replace(first, holders=((0, 1), (0,)))]
    others += [replace(first, subnetwork_of_rank=(1, 0))]
    told: list[str] = []
    monkeypatch.setattr(Trained, "plan", first)
    checkpointer_of(trained()).save(tmp_path, "tag", {})
    for plan in others:
        monkeypatch.setattr(Trained, "plan", plan)
        loaded = trained(1)
        checkpointer_of(loaded).load(tmp_path, "tag", ALL)
        told += loaded.told
    (text,) = told
    assert f"under another plan of the same units (hash {first.hash[:12]}, now {others[1].hash[:12]})" in text
    assert f'copy {tmp_path / "tag" / "plan.json"} and give the copy as "assignment"' in text


def test_another_lr_scheduler_is_refused(tmp_path: Path) -> None:
    """It would go on from its beginning without a word."""
    saved, loaded = trained(), trained(1)
    saved.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(saved.optimizer.optimizer)
    loaded.lr_scheduler = mock.Mock(state_dict=lambda: {"last_batch_iteration": 0})
    checkpointer_of(saved).save(tmp_path, "tag", {})
    before = loaded.tensors()
    with pytest.raises(ValueError, match=r"its LR scheduler keeps .*base_lrs.*keeps 'last_batch_iteration'; train"):
        checkpointer_of(loaded).load(tmp_path, "tag", ALL)
    assert_identical(loaded.tensors(), before)
    checkpointer_of(loaded).load(tmp_path, "tag", LoadOptions(lr_scheduler_states=False))


def test_files_name_no_device(tmp_path: Path) -> None:
    """Whatever the tensors of the client, of buffers and random numbers are on, everybody can read them."""
    state = trained()
    mean = torch.ones(3)
    on_a_gpu = {mean.data_ptr(), *(buffer.data_ptr() for buffer in state.module.buffers())}

    def tag(storage: Any) -> str:
        return "cuda:1" if storage.data_ptr() in on_a_gpu else "cpu"

    with mock.patch("torch.serialization.location_tag", tag):
        checkpointer_of(state).save(tmp_path, "tag", {"average": {"of": [mean]}})
    assert torch.equal(torch.load(tmp_path / "tag" / COMMON)["client_state"]["average"]["of"][0], mean)
    assert set(torch.load(tmp_path / "tag" / rank_file(0))) == {"random", "buffers"}


def test_what_is_left_out(tmp_path: Path) -> None:
    saved = trained()
    checkpointer_of(saved).save(tmp_path, "tag", {})
    for options in (LoadOptions(module_only=True), LoadOptions(optimizer_states=False)):
        loaded = trained(1)
        before = loaded.tensors()
        checkpointer_of(loaded).load(tmp_path, "tag", options)
        after = loaded.tensors()
        assert_identical(dict(loaded.module.named_parameters()), dict(saved.module.named_parameters()))
        assert torch.equal(after["exp_avg.0"], before["exp_avg.0"])
        assert loaded.global_steps == (1 if options.module_only else 2)


class CountsInTheLast(torch.optim.Adam):
    """As DeepSpeed's FusedAdam, which counts steps in the last tensor of a group."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for tensor in group["params"][:-1]:
                self.state[tensor]["step"].zero_()


def test_steps_that_one_tensor_of_a_group_counts(tmp_path: Path) -> None:
    checkpointer_of(trained(3, kind=CountsInTheLast)).save(tmp_path, "tag", {})
    loaded = trained(1, kind=CountsInTheLast)
    checkpointer_of(loaded).load(tmp_path, "tag", ALL)
    counts = [int(state["step"]) for state in loaded.optimizer.state.values()]
    assert counts == [3] * len(counts)
    assert len(counts) > 1


@pytest.mark.parametrize("name", ["cut", "shared"])
def test_what_was_frozen_before_its_first_step(tmp_path: Path, name: str) -> None:
    """At stage 0 it has no state; the others' is saved, whether they come before it or after."""
    saved, loaded = one_rank(stage=0), one_rank(stage=0)
    for state in (saved, loaded):
        state.module.get_parameter(name).requires_grad_(False)
    for _ in range(2):
        saved.step()
    checkpointer_of(saved).save(tmp_path, "tag", {})
    checkpointer_of(loaded).load(tmp_path, "tag", ALL)
    for state in (saved, loaded):
        state.step()
    assert_identical(*(dict(state.module.state_dict()) for state in (saved, loaded)))


def test_how_to_step_is_no_checkpoints_business(tmp_path: Path) -> None:
    """One that was written where steps were fused leaves a choice here as it is, and the other way round."""
    chosen, open_to_all = trained(dtype=torch.bfloat16), trained(dtype=torch.bfloat16)
    for state, fused in ((chosen, False), (open_to_all, True)):
        assert state.optimizer.param_groups[0]["fused"] is True
        state.optimizer.param_groups[0]["fused"] = fused
        checkpointer_of(state).save(tmp_path, str(fused), {})
    for state, fused in ((chosen, False), (open_to_all, True)):
        state.optimizer.param_groups[0]["lr"] = 0.5
        checkpointer_of(state).load(tmp_path, str(not fused), ALL)
        assert (state.optimizer.param_groups[0]["fused"], state.optimizer.param_groups[0]["lr"]) == (fused, 0.1)
        state.step()


def test_another_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    checkpointer_of(trained()).save(tmp_path, "tag", {})
    loaded = trained(1, kind=torch.optim.Adagrad)
    before = loaded.tensors()
    with pytest.raises(ValueError, match="optimizer state is of Adam, and the optimizer here is Adagrad"):
        checkpointer_of(loaded).load(tmp_path, "tag", ALL)
    assert_identical(loaded.tensors(), before)
    assert loaded.global_steps == 1


def test_a_damaged_one_is_not_loaded(tmp_path: Path) -> None:
    state = trained()
    checkpointer = checkpointer_of(state)
    for tag in ("older", "newer"):
        checkpointer.save(tmp_path, tag, {"tag": tag})
    (tmp_path / "newer" / "tensors_00000.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"newer/tensors_00000\.safetensors is damaged: it has 0 bytes"):
        checkpointer.load(tmp_path, "newer", ALL)
    assert checkpointer.load(tmp_path, None, ALL) == (str(tmp_path / "older"), {"tag": "older"})
    (tmp_path / "older" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=f"{tmp_path} has no complete checkpoint"):
        checkpointer.load(tmp_path, None, ALL)
    assert checkpointer.load(tmp_path / "empty", None, ALL) == (None, None)


@pytest.mark.parametrize("key", ["weight/cut", "master/cut", "exp_avg/cut"])
def test_an_index_with_missing_chunks_is_not_loaded(tmp_path: Path, key: str) -> None:
    checkpointer_of(trained(dtype=torch.bfloat16)).save(tmp_path, "tag", {})
    forge(tmp_path / "tag" / INDEX, lambda index: index[key]["chunks"].pop())
    loaded = trained(1, dtype=torch.bfloat16)
    before = loaded.tensors()
    with pytest.raises(ValueError, match=f"{key}: its . chunks do not cover each element"):
        checkpointer_of(loaded).load(tmp_path, "tag", ALL)
    assert_identical(loaded.tensors(), before)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    """The buffer has no moments that would tell; the model does."""
    checkpointer_of(trained()).save(tmp_path, "tag", {})
    forge(tmp_path / "tag" / INDEX, lambda index: index["weight/num_seen"].update(dtype="I32"))
    with pytest.raises(ValueError, match=r"'num_seen' is of torch.int32 in it and torch.float32 in the model"):
        checkpointer_of(trained(1)).load(tmp_path, "tag", ALL)


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    state = trained(0)
    checkpointer = checkpointer_of(state, keep_last=2)
    for _ in range(4):
        state.step()
        checkpointer.save(tmp_path, None, {})
    assert names_in(tmp_path) == ["global_step3", "global_step4", "latest"]


def test_a_folder_that_another_job_has(tmp_path: Path) -> None:
    """Nothing of the other's is touched, neither what it writes nor what it replaces; reading needs no lock."""
    state = trained()
    checkpointer = checkpointer_of(state)
    checkpointer.save(tmp_path, "good", {})
    (tmp_path / LOCK).unlink()
    for name in (".theirs.writing", ".other.replaced"):
        (tmp_path / name).mkdir()
    with other_job(tmp_path):
        before = names_in(tmp_path)
        with pytest.raises(ValueError, match=r"is in use by process 1234 .*python other.py"):
            checkpointer.save(tmp_path, "mine", {})
        assert checkpointer.load(tmp_path, None, ALL)[0] == str(tmp_path / "good")
        assert names_in(tmp_path) == before
    checkpointer.load(tmp_path, None, ALL)
    assert names_in(tmp_path) == [".theirs.writing", "good", "latest", "other"]
    checkpointer.save(tmp_path, "mine", {})
    assert names_in(tmp_path) == ["good", "latest", "mine", "other"]


def test_tags_and_client_state_that_are_refused(tmp_path: Path) -> None:
    checkpointer = checkpointer_of(trained())
    for tag in ("a/b", ".hidden", "latest", ""):
        with pytest.raises(ValueError, match="must be the name of a folder"):
            checkpointer.save(tmp_path, tag, {})
    with pytest.raises(ValueError, match="client_state and the LR scheduler's state may hold tensors, numbers"):
        checkpointer.save(tmp_path, "tag", {"path": tmp_path})
    assert names_in(tmp_path) == []
