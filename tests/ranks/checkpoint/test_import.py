"""Starts from folders in Hugging Face format, as a user has them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import load_file, save_file

import sdp_deepspeed
from tests.helpers.checkpointed_runs import settings_of, stepped
from tests.helpers.models import SPECIMENS, llama, scrambled
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

pytestmark = pytest.mark.world(2)


def saved(model: Any, folder: Path, rank: Rank, **options: Any) -> Path:
    if rank.rank == 0:
        model.save_pretrained(folder, **options)
    dist.barrier()
    return folder


def test_all_digits_are_taken(rank: Rank) -> None:
    """Of a folder in several files: masters of bf16 weights too; moments stay. Also a model without weights starts, of
    which no rank ever has all."""
    folder = saved(llama(seed=5), rank.folder / "in", rank, max_shard_size="10KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    expected = llama(seed=5).state_dict()
    with sdp_deepspeed.Init():
        without_weights = llama()
    for strategy, model in (("neuron", llama()), ("block", without_weights)):
        engine = engine_of(settings_of(1, "bf16", strategy=strategy), model)
        train(engine, num_steps=1)
        before = stepped(engine)
        engine.load_pretrained(folder)
        assert_identical(dense_state(engine), {name: value.bfloat16() for name, value in expected.items()})
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(parameter), expected[name]), name
        moments = [{n: v for n, v in found.items() if "exp_avg" in n} for found in (before, stepped(engine))]
        assert_identical(*moments)


def test_tied(rank: Rank) -> None:
    """The second name is in the file or not, and the model ties or not."""
    both = saved(llama(tied=True, seed=5), rank.folder / "both", rank)
    rewrite(both, rank, lambda state: {"lm_head.weight": state["model.embed_tokens.weight"].clone()} | state)
    head = saved(llama(tied=True, seed=5), rank.folder / "head", rank)
    rewrite(head, rank, lambda state: {renamed_head(name): value for name, value in state.items()})
    engine, expected = engine_of(settings_of(), llama(tied=True)), llama(tied=True, seed=5).state_dict()
    for folder in (both, head):
        engine.load_pretrained(folder)
        assert_identical(dense_state(engine), expected)
    folder = saved(llama(seed=5), rank.folder / "untied", rank)
    words = ("differ", "lm_head.weight", "tie_word_embeddings=false")
    refusal(ValueError, partial(engine.load_pretrained, folder), *words)
    folder = saved(llama(tied=True), rank.folder / "tied", rank)
    untied = engine_of(settings_of(), llama())
    refusal(ValueError, partial(untied.load_pretrained, folder), "another model", "lm_head.weight")


def renamed_head(name: str) -> str:
    return "lm_head.weight" if name == "model.embed_tokens.weight" else name


def rewrite(folder: Path, rank: Rank, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change a folder of one file."""
    if rank.rank == 0:
        state = change(load_file(folder / "model.safetensors"))
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()


def test_without_the_prefix(rank: Rank) -> None:
    """As the first GPT-2 files are: of the model without its head, with buffers that Transformers computes itself."""
    gpt2 = SPECIMENS["gpt2"].build
    folder = saved(scrambled(gpt2()), rank.folder / "in", rank)

    def old(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(2)}
        return masks | {name.removeprefix("transformer."): value for name, value in state.items()}

    rewrite(folder, rank, old)
    engine = engine_of(settings_of(), gpt2())
    engine.load_pretrained(folder)
    assert_identical(dense_state(engine), scrambled(gpt2()).state_dict())


def test_mistakes(rank: Rank) -> None:
    """All ranks say the same, and nothing is changed."""
    engine = engine_of(settings_of(), llama())
    before = dense_state(engine) | stepped(engine)
    for number, (change, words) in enumerate(_mistakes()):
        folder = saved(llama(seed=5), rank.folder / str(number), rank, max_shard_size="10KB")
        if rank.rank == 0:
            change(folder)
        dist.barrier()
        refusal(ValueError, partial(engine.load_pretrained, folder), *words)
    assert_identical(dense_state(engine) | stepped(engine), before)


def _mistakes() -> Iterator[tuple[Callable[[Path], Any], list[str]]]:
    yield shutil.rmtree, ["has neither"]
    yield lambda path: first(path).unlink(), ["cannot be read", "model-00001-of-"]
    yield lambda path: first(path).write_bytes(first(path).read_bytes()[:-3]), ["is damaged", "model-00001-of-"]
    yield lambda path: (path / "model.safetensors.index.json").write_text("{"), ["index.json is damaged"]
    yield lambda path: change_one(path, lambda value: value[:-1].clone()), ["has shape", "in the model"]
    yield lambda path: change_one(path, lambda value: value.to(torch.int8)), ["torch.int8", "in the model"]
    yield lambda path: change_one(path, None), ["another model", "it lacks 1 tensors"]
    yield only_pickles, ["only pickles"]


def first(path: Path) -> Path:
    return min(path.glob("model-*.safetensors"))


def change_one(path: Path, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    state = load_file(first(path))
    name = min(state)
    value = state.pop(name)
    if change is not None:
        state[name] = change(value)
    save_file(state, first(path))


def only_pickles(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"")
