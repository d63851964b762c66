"""Folders in Hugging Face format: a start from one, a training, and one again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sdp_deepspeed.checkpoint.checkpointer import COMMON, Checkpointer, read_bytes
from sdp_deepspeed.checkpoint.files import Reader
from sdp_deepspeed.checkpoint.hugging_face import dense_state_dict, export, load_pretrained
from tests.helpers.core_training import Layout, Training, training
from tests.helpers.models import TOKENS, family, llama
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, refusal

pytestmark = pytest.mark.world(2)

CPU, BF16, NEURON = torch.device("cpu"), torch.bfloat16, {"strategy": "neuron"}
LAYOUTS = {
    "blocks_bf16": Layout(2, dtype=BF16),
    "neurons_zero2": Layout(2, stage=2, block=NEURON),
    "backward_stage0_bf16": Layout(2, stage=0, dtype=BF16, block={"regime": "backward"}),
}


def saved(model: Any, folder: Path, rank: Rank, **options: Any) -> Path:
    if rank.rank == 0:
        model.save_pretrained(folder, **options)
    dist.barrier()
    return folder


def exported(run: Training, rank: Rank, name: str, **options: Any) -> Path:
    """By way of a checkpoint; on rank 0."""
    Checkpointer().save(rank.folder / "checkpoints", name, run.state, {})
    if rank.rank == 0:
        reader = Reader(rank.folder / "checkpoints" / name)
        export(reader, read_bytes(reader, COMMON), rank.folder / name, **options)
    return rank.folder / name


def assert_loaded(folder: Path, **options: Any) -> Any:
    """As a user loads it; nothing is missing and nothing is left over."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def in_and_out(architecture: str, layout: str, rank: Rank) -> None:
    """Transformers' folder, a run, a checkpoint, the exported folder: the same weights and logits all the way."""
    model: Any = family(architecture, seed=5)
    folder = saved(model, rank.folder / "in", rank, max_shard_size="10KB")
    with training(LAYOUTS[layout], model=family(architecture)) as run:
        run.train(1)
        before = run.tensors()
        load_pretrained(run.state, folder)
        after = run.tensors()
        assert_identical(*({k: v for k, v in found.items() if k.startswith("exp_avg")} for found in (before, after)))
        out = exported(run, rank, "fp32", dtype=torch.float32, max_shard_size="6KB")
        trained, live = exported(run, rank, "trained"), dense_state_dict(run.state, CPU)
    assert bool(live) == (rank.rank == 0)
    if rank.rank == 0:
        assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
        again = assert_loaded(out, dtype=torch.float32)
        with torch.no_grad():  # masters were filled with all digits, not with what bf16 leaves of them
            assert torch.equal(again(input_ids=TOKENS).logits, model.eval()(input_ids=TOKENS).logits)
        kept = assert_loaded(trained, dtype="auto")
        assert {p.dtype for p in kept.parameters()} == {LAYOUTS[layout].dtype}
        assert_identical(live, {n: v for n, v in kept.state_dict().items() if n in live})
        assert_identical(live, {n: v.to(LAYOUTS[layout].dtype) for n, v in model.state_dict().items() if n in live})
        assert not list(rank.folder.glob("*.tmp"))
        with pytest.raises(ValueError, match="already exists"):
            export(Reader(rank.folder / "checkpoints" / "fp32"), {"dtypes": {}, "model": {}}, out)
    dist.barrier()


def test_tied(rank: Rank) -> None:
    """The second name is in the file or not, and the model ties or not."""
    both = saved(llama(tied=True, seed=5), rank.folder / "both", rank)
    rewrite(both, rank, lambda state: {"lm_head.weight": state["model.embed_tokens.weight"].clone()} | state)
    head = saved(llama(tied=True, seed=5), rank.folder / "head", rank)
    rewrite(head, rank, lambda state: {renamed_head(name): value for name, value in state.items()})
    for folder in (both, head):
        with training(Layout(2), model=llama(tied=True)) as run:
            load_pretrained(run.state, folder)
            live = dense_state_dict(run.state, CPU)
            expected = llama(tied=True, seed=5).state_dict()
            assert_identical(live, {name: value for name, value in expected.items() if name in live})
    with training(Layout(2), model=llama(tied=True)) as run:
        folder = saved(llama(seed=5), rank.folder / "untied", rank)
        words = ("differ", "lm_head.weight", "tie_word_embeddings=false")
        refusal(ValueError, partial(load_pretrained, run.state, folder), *words)
    with training(Layout(2), model=llama()) as run:
        folder = saved(llama(tied=True), rank.folder / "tied", rank)
        refusal(ValueError, partial(load_pretrained, run.state, folder), "another model", "lm_head.weight")


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
    folder = saved(family("gpt2", seed=5), rank.folder / "in", rank)

    def old(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(2)}
        return masks | {name.removeprefix("transformer."): value for name, value in state.items()}

    rewrite(folder, rank, old)
    with training(Layout(2), model=family("gpt2")) as run:
        load_pretrained(run.state, folder)
        live = dense_state_dict(run.state, CPU)
        expected = family("gpt2", seed=5).state_dict()
        assert_identical(live, {name: value for name, value in expected.items() if name in live})


def test_mistakes(rank: Rank) -> None:
    """All ranks say the same, and nothing is changed."""
    with training(Layout(2), model=llama()) as run:
        before = run.tensors()
        for number, (change, words) in enumerate(_mistakes()):
            folder = saved(llama(seed=5), rank.folder / str(number), rank, max_shard_size="10KB")
            if rank.rank == 0:
                change(folder)
            dist.barrier()
            refusal(ValueError, partial(load_pretrained, run.state, folder), *words)
        assert_identical(run.tensors(), before)


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
