"""Pre-train a causal language model with Transformers' Trainer and subnetwork data parallelism.

    deepspeed --num_gpus 4 launch/pretrain.py configs/recipes/quickstart.yaml
    deepspeed --num_gpus 4 launch/pretrain.py configs/recipes/quickstart.yaml sdp=off    # plain ZeRO-1

`torchrun`, `accelerate launch` and `srun` work as well. The same command resumes a stopped run, and exports a finished
one again. Checkpoints, tokenizer and the exported model (`hf`) are written to `training.output_dir`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments, set_seed

import sdp_deepspeed  # noqa: F401  # makes DeepSpeed honor the block
from callbacks import StopTogether
from data import Blocks, Data, Stream, collate, load_blocks
from output_folder import check_resumable, hold, last_checkpoint
from recipe import Recipe, fail, initialization, model_config, own_part, read_recipe, section_of, training_arguments
from sdp_deepspeed.config import parse

SECTIONS = ("model", "data", "training", "deepspeed")


class ResumableTrainer(Trainer):
    """A Trainer that trains no further step when it resumes a finished run; Transformers' trains one. It always saves
    the last step, whose checkpoint tells a finished run."""

    saved_step = 0  # of this process's last checkpoint

    def _run_epoch(self, *arguments: Any, **options: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*arguments, **options)
        if self.state.max_steps <= self.state.global_step != self.saved_step:  # "best" and "no" need not save it
            self._save_checkpoint(self.model, trial=None)
            self.callback_handler.on_save(self.args, self.state, self.control)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.saved_step = self.state.global_step


class StreamTrainer(ResumableTrainer):
    """A Trainer for streams; each checkpoint contains the position in the stream."""

    def __init__(self, *arguments: Any, train_dataset: IterableDataset, **options: Any) -> None:
        super().__init__(*arguments, train_dataset=train_dataset, **options)
        self.stream = Stream(train_dataset, self.args.process_index, self.args.world_size)

    def get_train_dataloader(self) -> Any:
        return self.stream.loader(self.args.per_device_train_batch_size)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        self.stream.save(folder)
        super()._save_checkpoint(model, trial)  # writes trainer_state.json last, which completes the checkpoint


def build_model(recipe: Recipe, blocks: Blocks, data: Data) -> PreTrainedModel:
    """Build a randomly initialized model with the recipe's sizes and the tokenizer's vocabulary."""
    tokenizer = blocks.tokenizer
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = model_config(recipe, vocab_size=len(tokenizer), **special)
    if config.vocab_size < len(tokenizer):
        fail(f"model.vocab_size: got {config.vocab_size}, but the tokenizer has {len(tokenizer)} tokens")
    if getattr(config, "max_position_embeddings", data.sequence_length) < data.sequence_length:
        positions = config.max_position_embeddings
        fail(f"data.sequence_length: got {data.sequence_length}, but the model has {positions} positions")
    return AutoModelForCausalLM.from_config(config)


def whole_steps(blocks: Dataset, args: TrainingArguments) -> Dataset:
    """Drop the blocks that do not fill a step, so that an epoch is the same on any number of ranks."""
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if len(blocks) < batch:
        fail(f"data: {len(blocks)} blocks, but a step needs {batch}; use more text or smaller batches")
    return blocks.select(range(len(blocks) // batch * batch))


def prepare(data: Data, seed: int, folder: str | Path) -> Blocks:
    """Call `load_blocks`; exit with its error message if it fails."""
    try:
        return load_blocks(data, seed, Path(folder))
    except (ValueError, TypeError, OSError) as error:
        fail(f"data: {error}")


def build_trainer(recipe: Recipe) -> ResumableTrainer:
    """Lock the output folder; build data, model and Trainer of a run, on every rank."""
    data, args = section_of(Data, recipe.data, "data"), training_arguments(recipe)
    hold(args.output_dir)
    with args.main_process_first(local=args.save_on_each_node, desc="preparing the data"):
        blocks = prepare(data, args.seed, args.output_dir)
    blocks.train = own_part(recipe, blocks.train)
    if data.streaming:
        args.ignore_data_skip = True  # the stream restores its own position
        if args.max_steps <= 0:
            fail("training.max_steps: required with data.streaming")
    else:
        blocks.train = whole_steps(blocks.train, args)
    set_seed(args.seed)
    with initialization(recipe):
        model = build_model(recipe, blocks, data)
    return (StreamTrainer if data.streaming else ResumableTrainer)(
        model,
        args,
        data_collator=collate,
        train_dataset=blocks.train,
        eval_dataset=blocks.validation,
        processing_class=blocks.tokenizer,
        callbacks=[StopTogether(saves=recipe.num_teams is None)],
    )


def run(trainer: ResumableTrainer) -> None:
    """Train from the last checkpoint, then evaluate and export the dense model; a finished run only does the latter."""
    args, checkpoint = trainer.args, last_checkpoint(trainer.args.output_dir)
    if checkpoint is not None:
        block = parse(args.deepspeed or {})  # checkpoints of teams are plain DeepSpeed's
        check_resumable(checkpoint, has_subnetworks=block is not None and block.local_steps is None)
    if checkpoint is not None and isinstance(trainer, StreamTrainer):
        try:
            trainer.stream.load(checkpoint)
        except ValueError as error:
            fail(error)
    trainer.train(resume_from_checkpoint=checkpoint)
    team = getattr(trainer.model_wrapped, "team", None)
    if team is not None and not team.has_started:  # the run had finished
        team.start()
    state = trainer.state
    if state.global_step >= state.max_steps:
        if checkpoint is not None and checkpoint.endswith(f"-{state.global_step}") and trainer.is_world_process_zero():
            print(f"the run had finished at step {state.global_step}; exporting the same model again", flush=True)
        evaluated = [logs for logs in state.log_history if "eval_loss" in logs and logs["step"] == state.global_step]
        trainer.save_metrics("eval", evaluated[-1] if evaluated else trainer.evaluate())
        trainer.save_model(os.path.join(args.output_dir, "hf"))
    elif trainer.is_world_process_zero():
        print(f"stopped after step {state.global_step}; the same command resumes the run", flush=True)
    if team is not None:
        team.leave()
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    assert __doc__ is not None
    recipe = read_recipe(__doc__, SECTIONS)
    if recipe.prepare_only:
        data, seed = section_of(Data, recipe.data, "data"), recipe.training.get("seed", 42)
        prepare(data, seed, recipe.training.get("output_dir", "trainer_output"))
    else:
        run(build_trainer(recipe))


if __name__ == "__main__":
    main()
