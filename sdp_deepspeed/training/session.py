"""One run from process group to exported model, on one rank."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from sdp_deepspeed.data import PreparedDataError
from sdp_deepspeed.distributed.agreement import run_on_rank_0
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.training import engines, monitors
from sdp_deepspeed.training.host import Host, host_of
from sdp_deepspeed.training.loop import Run, resume, train
from sdp_deepspeed.training.model import may_defer
from sdp_deepspeed.training.options import Options
from sdp_deepspeed.training.progress import Progress
from sdp_deepspeed.training.report import write_report
from sdp_deepspeed.training.run_folder import RunFolder
from sdp_deepspeed.training.task import Task
from sdp_deepspeed.training.user_errors import RunFolderError, exit_on, exit_on_user_error, writing


def run_session(options: Options, folder: RunFolder, config: dict[str, Any], task: Task) -> int:
    """Train, export, report; every rank calls it. Returns the exit code."""
    host = host_of(options)
    with exit_on_user_error():
        host.start()
    _be_quiet(host.log)
    try:
        with exit_on_user_error(*host.user_errors, PreparedDataError, RunFolderError):
            run = _set_up(options, folder, host, task)
            run_on_rank_0(run.world, lambda: _record_settings(run, config))
        with (
            exit_on(RunFolderError, PreparedDataError),
            Progress(first=run.step, total=options.steps, show=folder.writes, items=task.items) as progress,
        ):
            progress.say(_introduction(run))
            if train(run, progress):
                task.before_export(run.engine, run.data)
                engines.save_pretrained(run.engine, folder.hf, task.preprocessor(run.data), run.world)
                if (text := task.exported(str(folder.hf))) is not None:
                    progress.say(text)
                write_report(run)
            engines.wait_for_checkpoint(run.engine)
    finally:
        host.close()
    return 0


def _be_quiet(log: logging.Logger) -> None:
    """Switch off what hosts print beside our bar that no user can act on."""
    disable_progress_bar()
    if dist.get_rank() > 0:  # rank 0 says the same
        log.setLevel(logging.ERROR)


def _record_settings(run: Run, config: dict[str, Any]) -> None:
    run.folder.write_json("config.json", config)
    if (plan := engines.plan_of(run.engine)) is not None:
        with writing(run.folder.plan):
            plan.save(run.folder.plan)


def _set_up(options: Options, folder: RunFolder, host: Host, task: Task) -> Run:
    """Model, engine and data, at the last checkpoint if there is one."""
    run_on_rank_0(Communicator(dist), folder.create)
    task.check()
    host.check()
    model = task.build_model(deferred=options.host == "fsdp2" or may_defer(options.deepspeed_config))
    engine, world = host.build(model)
    data = task.open_data(engine, world)
    for micro_batch in engines.micro_batches(engine):  # of phases to come
        data.train.check(micro_batch)
    events = monitors.step_events_of(engine, world)
    run = Run(options=options, engine=engine, data=data, folder=folder, world=world, events=events, task=task)
    resume(run)
    return run


def _introduction(run: Run) -> str:
    where = f"resuming at step {run.step}" if run.step else "starting"
    now = engines.present(run.engine)
    label = f"{now.label} ({now.where})" if now.where else now.label
    return (
        f"{where}: {label} on {run.world.size} ranks, {run.items_per_step} {run.task.items} per step, "
        f"{run.task.describe(run.data)}"
    )
