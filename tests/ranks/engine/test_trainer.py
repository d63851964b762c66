"""Under the Trainer of Transformers: train, evaluate and save the dense model, resume, change plans; what it says."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from sdp_deepspeed.engine import monitor
from tests.helpers.hosts import Row, batch_of, deepspeed_config, loaded, mean_loss, rows
from tests.helpers.models import MIXED, llama
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, gathered, refusal
from tests.reference.virtual_workers import Reference

pytestmark = pytest.mark.world(2)

OPTIONS: dict[str, Any] = {"lr_scheduler_type": "linear", "learning_rate": 5e-3}
SCHEDULE: list[dict[str, Any]] = [
    {"until": 0.5, "coverage": 0.5},
    {"until_step": 5, "coverage": 0.5, "regime": "backward", "strategy": "neuron"},
    {"coverage": 1.0},
]


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}


def trainer_of(folder: Path, block: Mapping[str, Any], *, config: Mapping[str, Any] = ADAMW, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given = {name: options.pop(name) for name in ("callbacks", "data_collator") if name in options}
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 1,  # a larger last batch would be filled up with rows that count twice
        "max_steps": 4,
        "lr_scheduler_type": "constant",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "deepspeed": deepspeed_config(block, **config),
    }
    data, evaluated = options.pop("data", rows(32)), options.pop("evaluated", rows(7))
    made = TrainingArguments(str(folder), **{**arguments, **options})
    return Trainer(llama(), made, train_dataset=data, eval_dataset=evaluated, **given)


def test_trains_and_resumes(rank: Rank) -> None:
    """Says the plan's table at the Trainer's default level, and counts the dense model's parameters. Refuses a
    checkpoint of a plain run before anything is changed."""
    import transformers.trainer as host
    from deepspeed.utils import logger

    from sdp_deepspeed.engine.engine import SubnetworkEngine

    block, level = {"assignment": "auto"}, logger.level
    with mock.patch.object(logger.getChild("announcements"), "handle") as handled:
        whole = trainer_of(rank.folder / "whole", block)
        whole.train()
    assert logger.level == logging.WARNING
    logger.setLevel(level)
    said = [call.args[0].getMessage() for call in handled.call_args_list]
    assert sum("1 holders each" in text for text in said) == (1 if rank.rank == 0 else 0)
    engine, plain_model = whole.model_wrapped, llama()
    counted = sum(parameter.numel() for parameter in plain_model.parameters())
    for model, trainable_only in itertools.product((engine, plain_model), (False, True)):
        assert host.get_model_param_count(model, trainable_only) == counted
    assert isinstance(engine, SubnetworkEngine)
    assert engine.plan.coverage == 0.5
    whole.save_model(str(rank.folder / "final"))
    gathered(None)  # rank 0 wrote it
    final = loaded(rank.folder / "final")
    assert_identical(final.state_dict(), dense_state(engine))
    evaluated = whole.evaluate()["eval_loss"]
    assert evaluated == pytest.approx(mean_loss(final, rows(7)), abs=1e-5)
    assert evaluated < mean_loss(llama(), rows(7))
    options: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no"}
    trainer_of(rank.folder / "plain", {"enabled": False}, **options).train()
    plain, refused = str(rank.folder / "plain" / "checkpoint-2"), trainer_of(rank.folder / "refused", block)
    refusal(ValueError, lambda: refused.train(resume_from_checkpoint=plain), "is a ZeRO checkpoint of DeepSpeed")
    again = trainer_of(rank.folder / "again", block)
    again.train(resume_from_checkpoint=str(rank.folder / "whole" / "checkpoint-2"))
    assert_identical(dense_state(again.model_wrapped), dense_state(engine))


def test_with_everything_at_once(rank: Rank) -> None:
    """The Trainer's own optimizer, accumulation, activation checkpointing, bf16, callbacks, the best model back, and
    a monitor whose losses are those that the Trainer logs."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def __init__(self) -> None:
            self.logs: list[dict[str, float]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.logs.append(dict(logs))

    recorder = Recorder()
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "bf16": True,
        "learning_rate": 5e-3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the best is not the last
        "callbacks": [recorder],
    }
    writes = {"csv_monitor": {"enabled": True, "output_path": str(rank.folder), "job_name": "csv"}}
    trainer = trainer_of(rank.folder, {"strategy": "neuron"}, config=writes, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "_DEFAULT_INTERVAL", 1)  # Accelerate overrides `steps_per_print`
        trainer.train()
    evaluations = [logs["eval_loss"] for logs in recorder.logs if "eval_loss" in logs]
    assert evaluations == sorted(evaluations, reverse=True)
    assert len(set(evaluations)) == 2
    assert trainer.state.best_model_checkpoint == str(rank.folder / "checkpoint-2")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluations[0], abs=1e-6)  # that one is back
    trainer.save_model(str(rank.folder / "final"))
    gathered(None)
    final = loaded(rank.folder / "final").eval()
    predicted = trainer.predict(rows(4))
    with torch.no_grad():
        expected = torch.cat([final(**batch_of(row)).logits for row in rows(4)])
    # Of the dense model, in bf16: 8 bits, after a few sums.
    torch.testing.assert_close(torch.tensor(predicted.predictions[0:4]), expected.float(), rtol=0.05, atol=0.05)
    steps = [logs for logs in recorder.logs if "subnetwork_loss" in logs]
    assert len(steps) == 4
    assert all("loss" not in logs and logs["coverage"] == trainer.model_wrapped.coverage for logs in steps)
    if rank.rank == 0:
        lines = (rank.folder / "csv" / "Train_Samples_subnetwork_loss.csv").read_text().splitlines()[1:]
        seen = [float(line.split(",")[1]) for line in lines]
        assert seen == pytest.approx([logs["subnetwork_loss"] for logs in steps], rel=1e-3)
    assert any("train_subnetwork_loss" in logs for logs in recorder.logs)


RATE = 0.5


def test_token_weighted_losses(rank: Rank) -> None:
    """Rows with few labels and rows with many: what comes out is the masked average of the gradients of the losses that
    the Trainer passes to backward, D / N times the sum over a rank's tokens, N tokens on D ranks.

    So each token of a unit's holders has the same weight, 1 / N times D / |holders|, whoever has it; for what all hold
    the average is that over all tokens. The sum here is written without the Trainer's and the model's own loss.
    """
    from transformers import default_data_collator

    seen: list[Row] = []

    def collate(features: Any) -> Any:
        seen.append(default_data_collator(features))
        return seen[-1]

    sgd = {"optimizer": {"type": "SGD", "params": {"lr": RATE}}}
    options: dict[str, Any] = {"max_steps": 1, "gradient_accumulation_steps": 2, "learning_rate": RATE}
    options |= {"eval_strategy": "no", "save_strategy": "no", "max_grad_norm": 0.0}
    options |= {"data": rows(16, ragged=True), "data_collator": collate}
    trainer = trainer_of(rank.folder, {"strategy": MIXED}, config=sgd, **options)
    trainer.train()
    engine = trainer.model_wrapped
    micro: Sequence[Sequence[Row]] = gathered(seen[:2])  # later ones were fetched ahead
    tokens = [sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in own) for own in micro]
    assert len(set(tokens)) == rank.size  # else this would show nothing

    def loss_of(worker: Any, batch: Row) -> torch.Tensor:
        logits = worker(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        total = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum")
        return total * rank.size / sum(tokens) * len(micro[0])  # the reference takes the mean over micro-batches

    dense = llama()
    reference = Reference(dense, engine.plan, lambda named: torch.optim.SGD(named.values(), lr=RATE), loss_of)
    reference.step(micro)
    found = dense_state(engine)
    for name, value in dense.state_dict().items():
        assert not torch.equal(value, llama().state_dict()[name]), name
        torch.testing.assert_close(found[name], value, msg=name)  # torch's tolerance for fp32


def test_a_schedule_ends_dense(rank: Rank) -> None:
    """Fractions of the Trainer's own steps; a run that is resumed inside a phase is the one without an interruption."""
    from transformers import TrainerCallback

    class Watches(TrainerCallback):
        def __init__(self) -> None:
            self.phases: list[int] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.phases.append(of_run[-1].model_wrapped.phase)

    options = OPTIONS | {"max_steps": 6, "gradient_accumulation_steps": 2, "logging_steps": 2, "eval_steps": 3}
    of_run: list[Any] = []
    seen = []
    for name, resumed in (("whole", None), ("again", str(rank.folder / "whole" / "checkpoint-4"))):
        watches = Watches()
        of_run.append(trainer_of(rank.folder / name, {"schedule": SCHEDULE}, callbacks=[watches], **options))
        of_run[-1].train(resume_from_checkpoint=resumed)
        seen.append(watches.phases)
    whole, again = of_run
    assert seen == [[0, 0, 1, 1, 2, 2], [2, 2]], "after each step that of the next one"
    engine, other = whole.model_wrapped, again.model_wrapped
    assert engine.plan.is_dense
    assert engine.plan == other.plan
    assert_identical(dense_state(engine), dense_state(other))
    logged = [[logs for logs in each.state.log_history if "phase" in logs] for each in of_run]
    assert logged[0] == logged[1], "those of before come with the checkpoint"
    assert ["subnetwork_loss" in logs for logs in logged[0]] == [True, True, False], (
        "one of two steps is enough, and an evaluation between them does not matter"
    )
    last = [each.state.log_history[-1] for each in of_run]
    assert ["train_subnetwork_loss" in logs for logs in last] == [True, False], "the mean of a process's own steps"
    assert whole.evaluate()["eval_loss"] == again.evaluate()["eval_loss"]


@pytest.mark.world(4)
def test_tensor_parallel(rank: Rank) -> None:
    """TP x DP: what is saved is whole in both directions."""
    config = {**ADAMW, "tensor_parallel": {"autotp_size": 2}}
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "no", "evaluated": rows(8)}
    trainer = trainer_of(rank.folder / "run", {}, config=config, **options)
    trainer.train()
    trainer.save_model(str(rank.folder / "final"))
    gathered(None)
    found = loaded(rank.folder / "final")
    assert_identical(found.state_dict(), dense_state(trainer.model_wrapped))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean_loss(found, rows(8)), abs=1e-5)
