"""Train an image classifier of Transformers with or without subnetworks: Transformers' Trainer on images.

    deepspeed --num_gpus 4 launch/train_vision.py configs/recipes/digits.yaml
    deepspeed --num_gpus 8 launch/train_vision.py configs/recipes/cifar10.yaml sdp=off training.output_dir=runs/zero1

SIGTERM and Ctrl-C save and stop; the same command resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, load_dataset
from PIL import ImageOps
from PIL.Image import Image as Picture
from PIL.Image import Resampling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Sampler, Subset
from transformers import AutoModelForImageClassification, Trainer, set_seed
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

import sdp_deepspeed.architectures.small_image_resnet  # registers its model type
from callbacks import StopTogether, last_checkpoint
from recipe import Recipe, fail, model_config, read_recipe, section_of, training_arguments

STATISTICS_BATCHES = 16  # of each rank, for the batch norms of the dense model


@dataclass
class Images:
    """The section `data`.

    Args:
        path: what `datasets.load_dataset` takes (a name on the hub, a folder of images or parquet files), or "digits".
        name: the configuration of the data set, if it has several.
        size: height and width of what the model sees, in pixels.
        crop: "padded": a window of the image after `padding` black pixels on each side; "resized": a random part of
            the image; "none".
        flip: whether half of the images are mirrored.
        mean, std: of pixels between 0 and 1, to normalize them.
    """

    path: str
    size: int
    name: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    image_column: str = "image"
    label_column: str = "label"
    crop: Literal["padded", "resized", "none"] = "padded"
    padding: int = 4
    flip: bool = True
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def processor(self) -> BitImageProcessorPil:
        """What test images go through; it is saved beside the model."""
        edge = self.size * 8 // 7 if self.crop == "resized" else self.size  # 256 for 224
        crop_size = {"height": self.size, "width": self.size}
        size = {"shortest_edge": edge}
        return BitImageProcessorPil(size=size, crop_size=crop_size, image_mean=[*self.mean], image_std=[*self.std])


def load_splits(data: Images) -> tuple[Dataset, Dataset]:
    """Training and test images."""
    splits = digits() if data.path == "digits" else load_dataset(data.path, data.name)
    return splits[data.train_split], splits[data.test_split]


def digits() -> DatasetDict:
    """Scikit-learn's 1797 handwritten digits of 8 x 8 pixels; a fifth for the test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(num_classes=10)})
    rows = Dataset.from_dict({"image": [*pixels], "label": found.target}, features=features)
    return rows.train_test_split(0.2, seed=0, stratify_by_column="label")


def crop_padded(picture: Picture, size: int, padding: int, random: np.random.Generator) -> Picture:
    padded = ImageOps.expand(ImageOps.fit(picture, (size, size)), padding)
    left, top = random.integers(2 * padding + 1, size=2).tolist()
    return padded.crop((left, top, left + size, top + size))


def crop_resized(picture: Picture, size: int, random: np.random.Generator) -> Picture:
    """8% to 100% of the area with an aspect ratio of 3:4 to 4:3, as usual for ImageNet."""
    area = random.uniform(0.08, 1) * picture.width * picture.height
    ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    width, height = min(math.sqrt(area * ratio), picture.width), min(math.sqrt(area / ratio), picture.height)
    left, top = random.uniform(0, picture.width - width), random.uniform(0, picture.height - height)
    box = (left, top, left + width, top + height)
    return picture.resize((size, size), Resampling.BILINEAR, box=box, reducing_gap=2)


class Pixels(torch.utils.data.Dataset[dict[str, Any]]):
    """Inputs of the model. Key `index` gives an image as it is tested; key `(epoch, index)` augments it, with random
    numbers of (seed, epoch, index) alone: no worker process, number of ranks or resumption changes them."""

    def __init__(self, rows: Dataset, data: Images, seed: int) -> None:
        self.rows, self.data, self.seed, self.processor = rows, data, seed, data.processor()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        row = self.rows[key if isinstance(key, int) else key[1]]
        picture, label = row[self.data.image_column].convert("RGB"), row[self.data.label_column]
        cut = isinstance(key, tuple) and self.data.crop != "none"
        if isinstance(key, tuple):
            picture = self.augment(picture, np.random.default_rng((self.seed, *key)))
        options = {"do_resize": not cut, "do_center_crop": not cut, "return_tensors": "pt"}
        return {"pixel_values": self.processor(picture, **options)["pixel_values"][0], "labels": label}

    def augment(self, picture: Picture, random: np.random.Generator) -> Picture:
        if self.data.crop == "padded":
            picture = crop_padded(picture, self.data.size, self.data.padding, random)
        elif self.data.crop == "resized":
            picture = crop_resized(picture, self.data.size, random)
        return ImageOps.mirror(picture) if self.data.flip and random.random() < 0.5 else picture


class EpochSampler(Sampler[tuple[int, int]]):
    """Keys `(epoch, index)` of whole global batches, in an order of (seed, epoch) alone. The epoch is where the Trainer
    stands: its own sampler loses it when a run is resumed."""

    def __init__(self, trainer: Trainer, num_images: int, global_batch: int) -> None:
        if num_images < global_batch:
            raise ValueError(f"{num_images} training images are less than a global batch of {global_batch}: lower it")
        self.trainer, self.num_images, self.length = trainer, num_images, num_images // global_batch * global_batch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = int(self.trainer.state.epoch or 0)
        order = np.random.default_rng((self.trainer.args.seed, epoch)).permutation(self.num_images)
        yield from ((epoch, index) for index in order[: self.length].tolist())


class VisionTrainer(Trainer):
    """Fixes the order of images, and evaluates with batch norms of the dense model."""

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        args = self.args
        global_batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return EpochSampler(self, len(self.train_dataset), global_batch)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        engine = self.model_wrapped
        plan = getattr(engine, "plan", None)
        if plan and plan.trains_subnetworks and any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            sdp_deepspeed.reestimate_batch_norm(engine, self.training_batches(), num_batches=STATISTICS_BATCHES)
        return super().evaluate(*arguments, **options)

    def training_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Some for this rank, the same at each evaluation."""
        args, size = self.args, len(self.train_dataset)
        chosen = np.random.default_rng(args.seed).permutation(size)[args.process_index :: args.world_size]
        keys = [(0, int(index)) for index in np.resize(chosen, STATISTICS_BATCHES * args.train_batch_size)]
        loader = DataLoader(Subset(self.train_dataset, keys), args.train_batch_size, generator=torch.Generator())
        for batch in loader:
            yield {"pixel_values": batch["pixel_values"].to(args.device, next(self.model.parameters()).dtype)}


def top1(predictions: Any) -> dict[str, float]:
    return {"top1": float((predictions.predictions == predictions.label_ids).mean())}


def build_trainer(recipe: Recipe) -> VisionTrainer:
    """Data, model and Trainer of a run; every rank calls it."""
    data, args = section_of(Images, recipe.data, "data"), training_arguments(recipe)
    with args.main_process_first(desc="preparing the data"):
        try:
            train, test = load_splits(data)
        except (ValueError, OSError) as error:
            fail(error)
    labels = train.features[data.label_column]
    names = labels.names if isinstance(labels, ClassLabel) else sorted(map(str, train.unique(data.label_column)))
    config = model_config(recipe, id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
    set_seed(args.seed)
    return VisionTrainer(
        AutoModelForImageClassification.from_config(config),
        args,
        train_dataset=Pixels(train, data, args.seed),
        eval_dataset=Pixels(test, data, args.seed),
        processing_class=data.processor(),
        compute_metrics=top1,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
        callbacks=[StopTogether()],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    recipe = read_recipe(str(__doc__), ("model", "data", "training", "deepspeed"), arguments)
    trainer = build_trainer(recipe)
    folder = trainer.args.output_dir
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    if trainer.state.global_step >= trainer.state.max_steps:
        metrics = trainer.evaluate()  # of the dense model
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        trainer.save_model(f"{folder}/hf")
    elif trainer.is_world_process_zero():
        print(f"stopped after step {trainer.state.global_step}; the same command resumes the run", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
