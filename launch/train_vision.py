"""Train an image classifier with Transformers' Trainer and subnetwork data parallelism.

    deepspeed --num_gpus 4 launch/train_vision.py configs/recipes/digits.yaml
    deepspeed --num_gpus 4 launch/train_vision.py configs/recipes/digits.yaml sdp=off    # plain ZeRO-1

`torchrun`, `accelerate launch` and `srun` work as well. The same command resumes a stopped run, and exports a finished
one again. Checkpoints and the exported model (`hf`) are written to `training.output_dir`.

The section `data` of a recipe is `Images` below. A model of timm is `model: {timm: vit_small_patch16_224, model_args:
{img_size: 64}}`; its export, Transformers' wrapper, loads with `AutoModelForImageClassification`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, load_dataset
from PIL import ImageOps
from PIL.Image import Image as Picture
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Sampler, Subset
from transformers import AutoModelForImageClassification, Trainer, set_seed
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

import sdp_deepspeed.small_image_resnet  # registers its model type
from callbacks import StopTogether
from output_folder import hold
from pretrain import SECTIONS, ResumableTrainer, run
from published_images import PUBLISHED, load_published
from recipe import Recipe, fail, initialization, model_config, own_part, read_recipe, section_of, training_arguments

STATISTICS_BATCHES = 16  # batches per rank to estimate the batch norm statistics of the dense model


@dataclass
class Images:
    """The section `data` of a recipe.

    Args:
        path: fashion_mnist, cifar10, cifar100, svhn or digits; or the argument of `load_dataset` (the name of a dataset
            on the hub, a folder of images or parquet files).
        size: height and width of the model's input, in pixels.
        folder: with the published files of the first four (CIFAR's for Python, packed or not). By default they are from
            the hub.
        name: configuration of another dataset on the hub.
        padding: black pixels added on each side before a random crop. None: a random resized crop, as for ImageNet.
        flip: whether to mirror half of the training images.
        mean, std: normalization of pixel values between 0 and 1.
    """

    path: str
    size: int
    folder: str | None = None
    name: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    image_column: str = "image"
    label_column: str = "label"
    padding: int | None = 4
    flip: bool = True
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.folder is not None and self.path not in PUBLISHED:
            raise ValueError(f"folder: got path {self.path!r}, expected one of {', '.join(PUBLISHED)}; remove folder")

    def load(self) -> tuple[Dataset, Dataset]:
        """Training and test images; exits with a message if they cannot be loaded."""
        try:
            if self.path in PUBLISHED:
                splits = load_published(self.path, self.folder)
            else:
                splits = digits() if self.path == "digits" else load_dataset(self.path, self.name)
        except (ValueError, OSError) as error:
            fail(f"data: {error}")
        return splits[self.train_split], splits[self.test_split]

    def processor(self) -> BitImageProcessorPil:
        """Preprocessing of test images, which is saved with the model."""
        edge = self.size * 8 // 7 if self.padding is None else self.size  # 256 for 224
        crop = {"height": self.size, "width": self.size}
        return BitImageProcessorPil(
            size={"shortest_edge": edge}, crop_size=crop, image_mean=[*self.mean], image_std=[*self.std]
        )


def digits() -> DatasetDict:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels, a fifth of them as test split."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(num_classes=10)})
    rows = Dataset.from_dict({"image": [*pixels], "label": found.target}, features=features)
    return rows.train_test_split(0.2, seed=0, stratify_by_column="label")


class Pixels(torch.utils.data.Dataset[dict[str, Any]]):
    """Dataset of model inputs. The key `index` gives a test image, the key `(epoch, index)` an augmented one.

    Augmentation depends on (seed, epoch, index) only, not on worker processes, number of ranks or resumption.
    """

    def __init__(self, rows: Dataset, data: Images, seed: int) -> None:
        self.rows, self.data, self.seed, self.processor = rows, data, seed, data.processor()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        row, is_test = self.rows[key if isinstance(key, int) else key[1]], isinstance(key, int)
        picture = row[self.data.image_column].convert("RGB")
        if isinstance(key, tuple):
            picture = self.augment(picture, np.random.default_rng((self.seed, *key)))
        pixels = self.processor(picture, do_resize=is_test, do_center_crop=is_test, return_tensors="pt")
        return {"pixel_values": pixels["pixel_values"][0], "labels": row[self.data.label_column]}

    def augment(self, picture: Picture, random: np.random.Generator) -> Picture:
        size = (self.data.size, self.data.size)
        if self.data.padding is None:  # 8% to 100% of the area with an aspect ratio of 3:4 to 4:3
            area = random.uniform(0.08, 1) * picture.width * picture.height
            ratio = math.exp(random.uniform(-1, 1) * math.log(4 / 3))
            width, height = min(math.sqrt(area * ratio), picture.width), min(math.sqrt(area / ratio), picture.height)
            left, top = random.random() * (picture.width - width), random.random() * (picture.height - height)
            picture = picture.resize(size, box=(left, top, left + width, top + height), reducing_gap=2)
        else:
            picture = ImageOps.expand(ImageOps.fit(picture, size), self.data.padding)
            left, top = random.integers(2 * self.data.padding + 1, size=2).tolist()
            picture = picture.crop((left, top, left + self.data.size, top + self.data.size))
        return ImageOps.mirror(picture) if self.data.flip and random.random() < 0.5 else picture


class EpochSampler(Sampler[tuple[int, int]]):
    """Sample keys `(epoch, index)` of full steps, in an order that depends on (seed, epoch) only."""

    def __init__(self, trainer: Trainer) -> None:
        args, self.trainer = trainer.args, trainer
        step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.length = len(trainer.train_dataset) // step * step
        if self.length == 0:
            found = len(trainer.train_dataset)
            fail(f"data: {found} images, but a step takes {step}; use more images or smaller batches")

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = int(self.trainer.state.epoch or 0)
        order = np.random.default_rng((self.trainer.args.seed, epoch)).permutation(len(self.trainer.train_dataset))
        yield from ((epoch, index) for index in order[: self.length].tolist())


class VisionTrainer(ResumableTrainer):
    """Re-estimates batch norm statistics before each evaluation, since training collects those of subnetworks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Image models accept any keyword, but return the mean over their images whatever the number of items is. The
        # Trainer would multiply it by the number of ranks.
        self.model_accepts_loss_kwargs = False

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        return EpochSampler(self)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        plan = getattr(self.model_wrapped, "plan", None)
        if plan and plan.trains_subnetworks and any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            batches = self.statistics_batches()
            sdp_deepspeed.reestimate_batch_norm(self.model_wrapped, batches, num_batches=STATISTICS_BATCHES)
        return super().evaluate(*arguments, **options)

    def statistics_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Training images of this rank, the same at each evaluation."""
        args, size = self.args, len(self.train_dataset)
        mine = np.random.default_rng(args.seed).permutation(size)[args.process_index :: args.world_size]
        keys: Any = [(0, index) for index in np.resize(mine, STATISTICS_BATCHES * args.train_batch_size).tolist()]
        for batch in DataLoader(Subset(self.train_dataset, keys), args.train_batch_size, generator=torch.Generator()):
            yield {"pixel_values": batch["pixel_values"].to(args.device, self.model.dtype)}


def top1(predictions: Any) -> dict[str, float]:
    return {"top1": float((predictions.predictions == predictions.label_ids).mean())}


def build_trainer(recipe: Recipe) -> VisionTrainer:
    """Lock the output folder; build data, model and Trainer of a run, on every rank."""
    data, args = section_of(Images, recipe.data, "data"), training_arguments(recipe)
    hold(args.output_dir)
    with args.main_process_first(local=args.save_on_each_node, desc="preparing the data"):
        train, test = data.load()
    labels = train.features[data.label_column]
    names = labels.names if isinstance(labels, ClassLabel) else [*map(str, range(max(train[data.label_column]) + 1))]
    config = model_config(recipe, id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
    set_seed(args.seed)
    with initialization(recipe):
        model = AutoModelForImageClassification.from_config(config)
    return VisionTrainer(
        model,
        args,
        train_dataset=Pixels(own_part(recipe, train), data, args.seed),
        eval_dataset=Pixels(test, data, args.seed),
        processing_class=data.processor(),
        compute_metrics=top1,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
        callbacks=[StopTogether(saves=recipe.num_teams is None)],
    )


def main() -> None:
    recipe = read_recipe(str(__doc__), SECTIONS)
    if recipe.prepare_only:
        section_of(Images, recipe.data, "data").load()
    else:
        run(build_trainer(recipe))


if __name__ == "__main__":
    main()
