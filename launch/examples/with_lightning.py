"""Lightning's Trainer with subnetworks: `torchrun --nproc-per-node 4 launch/examples/with_lightning.py runs/lightning`.

`DeepSpeedStrategy` needs GPUs. Without the import and the block it is an ordinary script.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import sdp_deepspeed  # noqa: F401  (the import)

CONFIG = {
    "zero_optimization": {"stage": 1},
    "subnetwork_data_parallel": {"coverage": [{"coverage": 0.5, "whole_ends": 1}]},  # the block
}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


class Llama(lightning.LightningModule):
    def __init__(self, output: str) -> None:
        super().__init__()
        self.output, self.model = output, LlamaForCausalLM(LlamaConfig(vocab_size=256, **SHAPE))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss  # of this rank's subnetwork

    def validation_step(self, batch: Tensor, _: int) -> None:
        loss = self.model(input_ids=batch, labels=batch).loss  # of the dense model
        self.log("dense_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def on_train_end(self) -> None:  # later, Lightning has moved the weights
        self.print(f"loss of the dense model: {self.trainer.callback_metrics['dense_loss']:.4f}")
        with self.trainer.model.dense():  # the engine; on all ranks
            if self.trainer.is_global_zero:
                self.model.save_pretrained(f"{self.output}/hf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="folder for checkpoints and the model")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    rows = torch.tensor(list(Path(argparse.__file__).read_bytes())).split(64)[:-1]  # some text, byte by byte
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        strategy=DeepSpeedStrategy(config=CONFIG),
        devices="auto",
        max_steps=options.steps,
        val_check_interval=options.steps,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        callbacks=ModelCheckpoint(options.output, every_n_train_steps=options.steps, save_top_k=0, save_last=True),
        default_root_dir=options.output,
    )
    loaders = DataLoader(rows[:-64], 8, shuffle=True), DataLoader(rows[-64:], 8)
    trainer.fit(Llama(options.output), *loaders, ckpt_path="last")


if __name__ == "__main__":
    main()
