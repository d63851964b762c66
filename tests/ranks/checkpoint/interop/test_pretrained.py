"""Start from a folder in Hugging Face format; each rank reads what it holds."""

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
from torch import nn
from transformers import AutoModelForCausalLM

import sdp_deepspeed
from sdp_deepspeed.checkpoint.interop import pretrained
from sdp_deepspeed.checkpoint.interop.export import ExportFormat, export
from tests.helpers.models import TOKENS, config, family, llama
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

LAYOUTS: dict[str, dict[str, Any]] = {
    "blocks_bf16": {"precision": "bf16"},
    "neurons_zero2": {"strategy": "neuron", "stage": 2},
    "backward_stage0_bf16": {"regime": "backward", "stage": 0, "precision": "bf16"},
}


def our_engine(model: nn.Module, *, stage: int = 1, precision: str = "fp32", **block: Any) -> Any:
    settings = config(**({"holders": 1} | block)) | {"zero_optimization": {"stage": stage}}
    return engine_of(settings | ({"bf16": {"enabled": True}} if precision == "bf16" else {}), model)


def saved(model: nn.Module, folder: Path, rank: Rank, **options: Any) -> Path:
    if rank.rank == 0:
        model.save_pretrained(folder, **options)  # type: ignore[operator]
    dist.barrier()
    return folder


def in_and_out(architecture: str, layout: str, rank: Rank) -> None:
    """Transformers' folder, the engine, a checkpoint, the exported folder: the same weights and logits all the way."""
    model = family(architecture, seed=5)
    folder = saved(model, rank.folder / "in", rank, max_shard_size="10KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
    engine = our_engine(family(architecture), **LAYOUTS[layout])
    train(engine, num_steps=1)
    moments = [state["exp_avg"].clone() for state in engine.optimizer.state.values()]
    engine.load_pretrained(folder)
    assert all(torch.equal(a["exp_avg"], b) for a, b in zip(engine.optimizer.state.values(), moments, strict=True))
    assert engine.global_steps == 1
    dtype = next(engine.module.parameters()).dtype
    assert_identical(dense_state(engine), {name: value.to(dtype) for name, value in expected.items()})
    engine.save_checkpoint(str(rank.folder / "checkpoint"), tag="tag")
    if rank.rank == 0:
        out = export(rank.folder / "checkpoint" / "tag", rank.folder / "out", ExportFormat(fp32=True))
        again = AutoModelForCausalLM.from_pretrained(out).eval()
        with torch.no_grad():  # masters were filled with all digits, not with what bf16 leaves of them
            assert torch.equal(again(input_ids=TOKENS).logits, model.eval()(input_ids=TOKENS).logits)


def a_rank_reads_what_it_holds(rank: Rank) -> None:
    """Neither whole tensors of which it has a part, nor anything twice; stage 0 has no masters beside the weights."""
    num_read = 0
    read_slice = pretrained._read_slice

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal num_read
        result = read_slice(*arguments)
        num_read += result.numel()
        return result

    folder = saved(llama(seed=5), rank.folder / "in", rank)
    engine = our_engine(llama(), strategy="neuron", stage=0)
    own = sum(tensor.numel() for name, tensor in engine.held_tensors().items() if name.endswith("weight"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "_read_slice", counted)
        engine.load_pretrained(folder)
    assert own < 0.8 * sum(parameter.numel() for parameter in llama().parameters())
    assert num_read == own, (num_read, own)


def into_a_model_without_weights(rank: Rank) -> None:
    """Nothing is initialized, and no rank ever has the dense model."""
    folder = saved(llama(seed=5), rank.folder / "in", rank)
    with sdp_deepspeed.Init(initialize=False):
        model = llama()
    engine = our_engine(model, strategy="neuron", precision="bf16")
    engine.load_pretrained(folder)
    assert_identical(dense_state(engine), llama(seed=5).bfloat16().state_dict())


def tied(rank: Rank) -> None:
    """The alias is in the file or not, and the model ties or not."""
    both = saved(llama(tied=True, seed=5), rank.folder / "both", rank)
    rewrite(both, rank, lambda state: {"lm_head.weight": state["model.embed_tokens.weight"].clone()} | state)
    head = saved(llama(tied=True, seed=5), rank.folder / "head", rank)
    rewrite(head, rank, lambda state: {renamed_head(name): value for name, value in state.items()})
    for folder in (both, head):
        engine = our_engine(llama(tied=True))
        engine.load_pretrained(folder)
        assert_identical(dense_state(engine), llama(tied=True, seed=5).state_dict())
    engine = our_engine(llama(tied=True))
    refusal(
        ValueError,
        partial(engine.load_pretrained, saved(llama(seed=5), rank.folder / "untied", rank)),
        *("differ", "lm_head.weight", "tie_word_embeddings=false"),
    )
    untied = our_engine(llama())
    folder = saved(llama(tied=True), rank.folder / "tied", rank)
    refusal(ValueError, partial(untied.load_pretrained, folder), "another model", "it lacks 'lm_head.weight'")


def renamed_head(name: str) -> str:
    return "lm_head.weight" if name == "model.embed_tokens.weight" else name


def rewrite(folder: Path, rank: Rank, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change a folder of one file."""
    if rank.rank == 0:
        state = change(load_file(folder / "model.safetensors"))
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()


def without_the_prefix(rank: Rank) -> None:
    """As the first GPT-2 files are: of the model without its head, with buffers that Transformers computes itself."""
    folder = saved(family("gpt2", seed=5), rank.folder / "in", rank)

    def old(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(2)}
        return masks | {name.removeprefix("transformer."): value for name, value in state.items()}

    rewrite(folder, rank, old)
    engine = our_engine(family("gpt2"))
    engine.load_pretrained(folder)
    assert_identical(dense_state(engine), family("gpt2", seed=5).state_dict())


def mistakes(rank: Rank) -> None:
    """All ranks say the same, and nothing is changed."""
    engine = our_engine(llama())
    before = dense_state(engine)
    for number, (change, words) in enumerate(_mistakes()):
        folder = saved(llama(seed=5), rank.folder / str(number), rank, max_shard_size="10KB")
        if rank.rank == 0:
            change(folder)
        dist.barrier()
        text = refusal(ValueError, partial(engine.load_pretrained, folder), "load_pretrained", *words)
        assert "\n" not in text
    assert_identical(dense_state(engine), before)
    deeper = our_engine(llama(8))
    refusal(ValueError, partial(deeper.load_pretrained, saved(llama(), rank.folder / "in", rank)), "lacks", "+49 more")


def _mistakes() -> Iterator[tuple[Callable[[Path], Any], list[str]]]:
    yield shutil.rmtree, ["no folder"]
    yield lambda path: first(path).unlink(), ["lacks 'model-00001-of-", "not completely copied"]
    yield lambda path: first(path).write_bytes(first(path).read_bytes()[:-3]), ["is damaged", "model-00001-of-"]
    yield lambda path: (path / "model.safetensors.index.json").write_text("{"), ["index.json cannot be read"]
    yield lambda path: change_one(path, lambda value: value[:-1].clone()), ["has shape", "and", "in the model"]
    yield lambda path: change_one(path, lambda value: value.to(torch.int8)), ["torch.int8", "quantized"]
    yield lambda path: change_one(path, None), ["says are in it", "lacks"]
    yield only_pickles, ["pytorch_model*.bin", "from_pretrained(folder).save_pretrained"]
    yield without_weights, ["neither"]


def first(path: Path) -> Path:
    return min(path.glob("model-*.safetensors"))


def change_one(path: Path, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    state = load_file(first(path))
    name = min(state)
    value = state.pop(name)
    if change is not None:
        state[name] = change(value)
    save_file(state, first(path))


def without_weights(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()


def only_pickles(path: Path) -> None:
    without_weights(path)
    (path / "pytorch_model.bin").write_bytes(b"")


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for architecture, layout in (
        ("llama", "blocks_bf16"),
        ("gpt2", "neurons_zero2"),
        ("gpt_neox", "backward_stage0_bf16"),
        ("qwen3", "neurons_zero2"),
    ):
        yield f"{architecture}-{layout}", partial(in_and_out, architecture, layout)
    for check in (a_rank_reads_what_it_holds, into_a_model_without_weights, tied, without_the_prefix, mistakes):
        yield check.__name__, check


@pytest.mark.checks(2, _cases, slow=["2-gpt*", "2-without*"])
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
