"""`sdp checkpoint`, and folders in Hugging Face format: from an engine and back, and as a user has them."""

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
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import sdp_deepspeed
from sdp_deepspeed.cli import main as sdp
from tests.helpers.checkpointed_runs import settings_of, stepped
from tests.helpers.models import SPECIMENS, TOKENS, Diffusing, Wrapped, config, llama, scrambled
from tests.helpers.ranks import Rank, run_ranks
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

pytestmark = pytest.mark.world(2)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"strategy": "neuron"}),
    "gpt2_bf16": ("gpt2", {"strategy": "neuron"}),
}


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def write(name: str, folder: Path, rank: Rank) -> None:
    """A checkpoint, and beside it what the engine itself exports and answers."""
    architecture, block = RUNS[name]
    settings = config(holders=1, **block) | {"bf16": {"enabled": name.endswith("bf16")}}
    engine = engine_of(settings, SPECIMENS[architecture].build())
    train(engine, num_steps=2)
    engine.save_checkpoint(str(folder / name))
    engine.save_pretrained(folder / f"{name}_hf")
    with engine.dense(), torch.no_grad():
        logits = engine.module.eval()(input_ids=TOKENS).logits
    if rank.rank == 0:
        torch.save(logits, folder / f"{name}.pt")


def test_of_other_libraries(rank: Rank) -> None:
    """With tied weights: whatever was exported is the whole state dict, and is loaded again."""
    for kind, name in ((Wrapped, "model"), (Diffusing, "diffusion_pytorch_model")):
        folder, exported = rank.folder / name, rank.folder / f"{name}_exported"
        engine = engine_of(config(holders=1, strategy="neuron"), kind())
        train(engine, num_steps=1)
        expected = dense_state(engine)
        engine.save_pretrained(folder)
        engine.save_checkpoint(str(rank.folder / f"{name}_saved"))
        if rank.rank == 0:
            assert sdp(["checkpoint", "export", str(rank.folder / f"{name}_saved"), str(exported)]) == 0
            assert_identical(load_file(folder / f"{name}.safetensors"), expected)
            assert_identical(load_file(exported / "model.safetensors"), expected)
        dist.barrier()
        for path in (folder, exported):
            again = engine_of(config(holders=1), kind(seed=5))
            again.load_pretrained(path)
            assert_identical(dense_state(again), expected)
    if rank.rank == 0:
        save_file({}, folder / "adapter.safetensors")
    dist.barrier()
    refusal(ValueError, partial(again.load_pretrained, folder), "several", "adapter, diffusion_pytorch_model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    outcomes = run_ranks(2, [(name, partial(write, name, path)) for name in RUNS])
    assert not any(outcomes.values()), next(filter(None, outcomes.values()))
    return path


@pytest.mark.parametrize("name", RUNS)
def test_exported_model_is_the_engines_dense_model(name: str, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    assert sdp(["checkpoint", "export", str(folder / name), str(out), "--max-shard-size", "4KB"]) == 0
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    assert_identical(tensors_in(out), tensors_in(folder / f"{name}_hf"))
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=TOKENS).logits, torch.load(folder / f"{name}.pt"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(tmp_path / "tokens")
    options = ["--dtype", "fp32", "--tokenizer", str(tmp_path / "tokens")]
    (tmp_path / "out" / ".unfinished" / "out").mkdir(parents=True)  # of an export that was killed
    assert sdp(["checkpoint", "export", str(folder / "gpt2_bf16"), str(tmp_path / "out"), *options]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {"model.safetensors", "config.json", "generation_config.json", *tokenizer}
    masters, trained = tensors_in(tmp_path / "out"), tensors_in(folder / "gpt2_bf16_hf")
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert_identical({name: value.bfloat16() for name, value in masters.items()}, trained)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
    assert sdp(["checkpoint", "inspect", str(folder / "llama")]) == 0
    shown = capsys.readouterr().out
    assert all(
        words in shown for words in ("step 2, written by 2 ranks", "neuron strategy", "weight: 21", "exp_avg_sq")
    )
    assert sdp(["checkpoint", "verify", str(folder / "llama" / "global_step2")]) == 0


def test_damage_is_found(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (folder / "llama" / "global_step2").iterdir():
        (tmp_path / "runs" / "tag").mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / "tag" / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "runs" / "tag" / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (tmp_path / "runs" / "latest").write_text("tag")
    assert sdp(["checkpoint", "verify", str(tmp_path / "runs")]) == 1
    assert "__1_0.distcp is damaged" in capsys.readouterr().out
    assert sdp(["checkpoint", "export", str(tmp_path / "runs"), str(tmp_path / "out")]) == 2
    assert "__1_0.distcp is damaged" in capsys.readouterr().err
    file.write_bytes(content)
    (tmp_path / "runs" / "latest").write_text("lost")
    for action in ("verify", "inspect"):
        assert sdp(["checkpoint", action, str(tmp_path / "runs")]) == 1
        assert "latest names 'lost'" in capsys.readouterr().out
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]


def _mistakes_of_the_command(folder: Path, path: Path) -> Iterator[tuple[list[object], list[str]]]:
    good, out = folder / "llama", path / "out"
    yield ["export", path / "nowhere", out], ["no such folder", "nowhere"]
    yield ["export", path, out], ["no complete checkpoint"]
    yield ["export", good, out, "--tag", "lost"], ["lost"]
    yield ["export", good, good], ["already exists"]
    yield ["export", good, out, "--max-shard-size", "0GB"], ["0GB", "24GiB or 200MB"]
    yield ["export", good, out, "--dtype", "fp8"], ["fp8"]
    yield ["export", good, out, "--tokenizer", path], ["no tokenizer"]
    yield ["export", good], ["OUT"]
    yield ["import", good], ["import"]
    yield ["inspect", path / "nowhere"], ["no such folder"]
    yield ["verify", path], ["no complete checkpoint"]


def test_mistakes_are_told_in_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in _mistakes_of_the_command(folder, tmp_path):
        assert sdp(["checkpoint", *map(str, arguments)]) == 2, arguments
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert text.count("\n") == 1, text
        assert all(word in text for word in words), text
        assert not list(tmp_path.iterdir()), arguments


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


def test_tied_weights(rank: Rank) -> None:
    """The second name is in the file or not, and the model ties or not."""
    both = saved(llama(tied=True, seed=5), rank.folder / "both", rank)
    rewrite(both, rank, lambda state: {"lm_head.weight": state["model.embed_tokens.weight"].clone()} | state)
    head = saved(llama(tied=True, seed=5), rank.folder / "head", rank)
    rewrite(head, rank, lambda state: {"lm_head.weight": state.pop("model.embed_tokens.weight")} | state)
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


def test_folders_that_are_refused(rank: Rank) -> None:
    """All ranks say the same, and nothing is changed."""
    engine = engine_of(settings_of(), llama())
    before = dense_state(engine) | stepped(engine)
    for number, (change, words) in enumerate(_damages()):
        folder = saved(llama(seed=5), rank.folder / str(number), rank, max_shard_size="10KB")
        if rank.rank == 0:
            change(folder)
        dist.barrier()
        refusal(ValueError, partial(engine.load_pretrained, folder), *words)
    assert_identical(dense_state(engine) | stepped(engine), before)


def _damages() -> Iterator[tuple[Callable[[Path], Any], list[str]]]:
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
