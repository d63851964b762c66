"""The dense model in evaluation and in `engine.dense()`, whatever ranks run of it; state dicts, copies and export."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sdp_deepspeed.config import MODES
from sdp_deepspeed.engine import dense_view
from sdp_deepspeed.masking.placeholders import PartialTensor
from tests.helpers.live_tensors import stored_absent
from tests.helpers.models import MIXED, VOCABULARY, batches, config, llama, loss_of
from tests.helpers.more_models import ALL_SPECIMENS
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, refusal, sgd, train
from tests.reference.virtual_workers import Reference

pytestmark = pytest.mark.world(3)

GENERATION: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def engine_with(model: nn.Module, *, holders: int = 2, **block: Any) -> Any:
    return engine_of(config(holders=holders, **block), model)


def batch_of(rank: Rank) -> torch.Tensor:
    """Another one on each rank."""
    return torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(rank.rank))


@torch.no_grad()
def logits(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch).logits


def assert_refused_in_use(state: Mapping[str, torch.Tensor], match: str) -> None:
    """A state dict may be taken and thrown away; each way in which it is used ends in an error, and what is whole in it
    can be used."""
    partial = [value for value in state.values() if isinstance(value, PartialTensor)]
    assert partial
    uses: list[Callable[[torch.Tensor], Any]] = [
        torch.clone,
        deepcopy,
        torch.zeros(1).copy_,
        lambda value: value.shape,
        lambda value: value.data_ptr(),
        lambda value: torch.save({"": value}, io.BytesIO()),
        lambda value: save({"": value}),
    ]
    for use, value in itertools.product(uses, partial):
        with pytest.raises(RuntimeError, match=match):
            use(value)
    for value in state.values():
        if not isinstance(value, PartialTensor):
            value.clone()


def held_copies(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.held_tensors().items()}


def test_is_the_dense_model(rank: Rank) -> None:
    """Before and after training: the same bits as the model, in evaluation and in `engine.dense()`, and back."""
    choices: list[tuple[str, Any, str]] = [(*mode, "gpt2") for mode in MODES]
    choices += [("forward", MIXED, "qwen3"), ("backward", MIXED, "gpt_neox_parallel")]
    for regime, strategy, name in choices:
        model: Any = ALL_SPECIMENS[name].build()
        dense, batch = deepcopy(model).eval(), batch_of(rank)
        engine = engine_with(model, regime=regime, strategy=strategy)
        assert_identical(dense_state(engine), dense.state_dict())
        train(engine, num_steps=2)
        whole = deepcopy(dense)
        whole.load_state_dict(dense_state(engine))
        expected, before = logits(whole, batch), held_copies(engine)
        engine.eval()
        assert torch.equal(logits(engine, batch), expected), (name, regime, strategy)
        with engine.dense():
            assert torch.equal(logits(engine, batch), expected)
            assert torch.equal(logits(engine.module, batch), expected)
            assert_identical(engine.module.state_dict(), whole.state_dict())
            prompt = batch[: 1 + rank.rank % 2]  # with a key/value cache; ranks need not do the same
            assert torch.equal(engine.module.generate(prompt, **GENERATION), whole.generate(prompt, **GENERATION))
        engine.train()
        assert not stored_absent(engine)
        assert_identical(held_copies(engine), before)
        train(engine, num_steps=1, first=2)


def test_evaluation_leaves_training_alone(rank: Rank) -> None:
    """A worker's own loss is the same before and after, and is not the dense model's; one that keeps gradients is the
    subnetwork's, and warns once. What was frozen since the start remains frozen."""
    engine, batch = engine_with(llama()), batch_of(rank)
    engine.module.lm_head.requires_grad_(False)
    before = loss_of(engine, batch).item()
    with mock.patch.object(dense_view.logger, "warning") as warned:
        engine.eval()
        with torch.inference_mode():
            dense = loss_of(engine, batch).item()
        with torch.no_grad():
            assert loss_of(engine.module, batch).item() == dense != before, "so is the bare module in evaluation"
        assert not warned.called
        assert [loss_of(engine, batch).item() for _ in range(2)] == [before] * 2, "with gradients"
    assert "use eval() and torch.no_grad()" in warned.call_args_list[0].args[0]
    assert len(warned.call_args_list) == 1
    engine.train()
    with torch.no_grad():
        assert loss_of(engine, batch).item() == before, "in training mode"
    assert loss_of(engine, batch).item() == before
    assert not engine.module.lm_head.weight.requires_grad
    assert len(set(train(engine, num_steps=2))) == 2


def test_state_dicts_are_whole_or_refused(rank: Rank) -> None:
    """Of the model, of modules in it, narrow ones too; what is shared is whole everywhere."""
    dense = llama()
    for strategy in ("block", "neuron"):
        engine = engine_with(llama(), strategy=strategy)
        missing = [unit for index, unit in enumerate(engine.plan.units) if not engine.plan.holds_rank(index, rank.rank)]
        modules = {piece.parameter.rpartition(".")[0] for unit in missing for piece in unit.pieces}
        parents = {parent for name in modules for parent in itertools.accumulate(name.split("."), "{}.{}".format)}
        for name in sorted(parents | {""}):
            state = engine.module.get_submodule(name).state_dict()
            assert_refused_in_use(state, r"holds only a part.*partial.*engine\.dense\(\)")
        assert_identical(
            engine.module.model.embed_tokens.state_dict(), dense.get_submodule("model.embed_tokens").state_dict()
        )
        with engine.dense():
            assert_identical(engine.module.state_dict(), dense.state_dict())
            inner = engine.module.model.layers[0].mlp
            assert_identical(inner.state_dict(), dense.get_submodule("model.layers.0.mlp").state_dict())


def test_ranks_run_what_they_like(rank: Rank) -> None:
    """In an evaluation ranks run other numbers of batches, another part first, or one part more often; one of them
    fails in between. In the backward regime, where every rank has the whole model, one may run none. With a loss of the
    subnetwork kept alive, whose graph knows other shapes."""
    batch = batch_of(rank)
    for regime, strategy in MODES:
        engine, dense = engine_with(llama(), regime=regime, strategy=strategy), llama().eval()
        inner: Any = dense.get_submodule("model")
        expected = inner(batch).last_hidden_state
        kept = loss_of(engine, batch)
        for evaluating in (engine, engine.module):
            evaluating.eval()
            if rank.rank == 1:
                with torch.no_grad():
                    assert torch.equal(engine.module.model(batch).last_hidden_state, expected)
            for _ in range(rank.rank + (regime == "forward")):
                assert torch.equal(logits(engine, batch), logits(dense, batch))
            if rank.rank == 2:
                layer = engine.module.model.layers[1].mlp.down_proj
                hook = layer.register_forward_pre_hook(mock.Mock(side_effect=KeyError("mine")))
                with pytest.raises(KeyError, match="mine"):
                    logits(engine, batch)
                hook.remove()
            evaluating.train()
            losses = [loss_of(engine, batch) for _ in range(2)]
            assert not stored_absent(engine)
            engine.backward(losses[0])
        engine.step()
        assert kept.isfinite()
        train(engine, num_steps=1)


def test_gradients_of_the_dense_model_are_nobodys(rank: Rank) -> None:
    """`torch.autograd.grad` has them; a backward pass would add them to those of the subnetwork, and is refused."""
    for regime, strategy in MODES:
        engine, dense, batch = engine_with(llama(), regime=regime, strategy=strategy), llama(), batch_of(rank)
        engine.backward(loss_of(engine, batch))
        own = {key: p.grad.clone() for key, p in engine.module.named_parameters() if p.grad is not None}
        with engine.dense():
            names = ["lm_head.weight", *(piece.parameter for piece in engine.plan.units[0].pieces)]
            trained = [name for name in names if engine.module.get_parameter(name).requires_grad]
            found = torch.autograd.grad(loss_of(engine.module, batch), list(map(engine.module.get_parameter, trained)))
            expected = torch.autograd.grad(loss_of(dense, batch), list(map(dense.get_parameter, trained)))
            assert all(map(torch.equal, found, expected))
            del found
        assert_identical({key: p.grad for key, p in engine.module.named_parameters() if p.grad is not None}, own)
        engine.step()
        with engine.dense():
            loss = loss_of(engine.module, batch)
            with pytest.raises(RuntimeError, match=r"backward inside engine\.dense\(\)"):
                engine.backward(loss)
            with pytest.raises(RuntimeError, match=r"inside engine\.dense\(\).*torch\.autograd\.grad"):
                loss.backward()
        engine.optimizer.zero_grad()
        train(engine, num_steps=1)


def test_what_is_loaded_is_trained(rank: Rank) -> None:
    """A state dict inside dense() reaches what each rank stores, so that training goes on from it."""
    for (regime, strategy), name in zip(MODES, ("llama_odd", "llama_odd", "llama_tied", "gpt2"), strict=True):
        dense = ALL_SPECIMENS[name].build()
        engine = engine_of(sgd(regime=regime, strategy=strategy), deepcopy(dense))
        train(engine, num_steps=1)
        with torch.no_grad():
            for index, parameter in enumerate(dense.parameters()):
                parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()) + index).view_as(parameter))
        with engine.dense():
            engine.module.load_state_dict(dense.state_dict())
        assert_identical(dense_state(engine), dense.state_dict())
        reference = Reference(dense, engine.plan, lambda named: torch.optim.SGD(named.values(), lr=0.1), loss_of, 0.0)
        losses, norm = reference.step(next(batches(rank.size, 1)))
        assert train(engine, num_steps=1) == pytest.approx(losses[rank.rank], rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
        for key, value in dense_state(engine).items():
            assert torch.allclose(value, dense.state_dict()[key], rtol=0, atol=1e-5), key


def test_copies_of_a_subnetwork_are_not_the_model(rank: Rank) -> None:
    """Saved, loaded or evaluated, also while the original is dense; they can be trained. In backward x block they have
    every weight, so they may be used."""
    batch, words = batch_of(rank), "copy of a rank's subnetwork"
    for regime, strategy in MODES:
        engine, dense = engine_with(llama(), regime=regime, strategy=strategy), llama()
        averaged: Any = AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        copied, layers = averaged.module, deepcopy(engine.module.model.layers)
        assert torch.equal(loss_of(copied, batch), loss_of(engine, batch))
        train(engine, num_steps=2)
        averaged.update_parameters(engine.module)
        if (regime, strategy) == ("backward", "block"):  # the first update copies
            assert_identical(copied.state_dict(), dense_state(engine))
            engine.eval()
            assert torch.equal(logits(copied.eval(), batch), logits(engine, batch))
            continue
        for module in (copied, layers):
            assert_refused_in_use(module.state_dict(), words)
        with pytest.raises(RuntimeError, match="load_state_dict: this rank has only a part"):
            copied.load_state_dict(dense.state_dict())
        for evaluated in (averaged.eval(), copied):
            refusal(RuntimeError, partial(logits, evaluated, batch), words)
        engine.eval()
        logits(engine, batch)
        refusal(RuntimeError, partial(logits, copied, batch), words)
        loss_of(copied.train(), batch).backward()
        engine.train()
        with engine.dense():
            refusal(RuntimeError, partial(logits, copied.eval(), batch), words)
            whole = deepcopy(engine.module)
        engine.eval()
        expected = logits(engine, batch)
        assert torch.equal(logits(whole.eval(), batch), expected)
        assert all(parameter.requires_grad for parameter in whole.parameters())
        loss_of(whole, batch).backward()
        torch.optim.SGD(whole.parameters(), lr=1.0).step()
        assert torch.equal(logits(engine, batch), expected), "the copy has its own weights"


def test_replaced_parameters_are_noticed(rank: Rank) -> None:
    """By the next step, before a checkpoint is written, and when a state dict is loaded with `assign=True`: all would
    go on with the first ones."""
    for regime, strategy, holders in (("forward", "block", 3), ("forward", "neuron", 2), ("backward", "block", 2)):
        engine = engine_of(config(holders=holders, regime=regime, strategy=strategy), llama())
        head = engine.module.lm_head
        first, head.weight = head.weight, nn.Parameter(head.weight.detach().clone())
        words = ("'lm_head.weight'", "Parameters were replaced")
        refusal(RuntimeError, partial(train, engine, num_steps=1), *words)
        refusal(RuntimeError, partial(engine.save_checkpoint, str(rank.folder)), *words)
        head.weight = first
        engine.optimizer.zero_grad()
        train(engine, num_steps=1)
        refusal(RuntimeError, partial(assign, engine), "Parameters were replaced")


def test_replaced_data_is_noticed(rank: Rank) -> None:
    """If it does not have the subnetwork's shape, before it is used; if it does, it is trained."""
    for regime, strategy in (("forward", "block"), ("forward", "neuron"), ("backward", "neuron")):
        engine = engine_with(llama(), regime=regime, strategy=strategy)
        for parameter in engine.module.parameters():
            parameter.data = parameter.data.clone()
        train(engine, num_steps=1)
        for parameter, dense in zip(engine.module.parameters(), llama(seed=5).parameters(), strict=True):
            parameter.data = dense.data
        run = partial(loss_of, engine, batch_of(rank))
        refusal(RuntimeError, run, "its data was replaced", "inside `with engine.dense():`")


def assign(engine: Any) -> None:
    with engine.dense():
        engine.module.load_state_dict(llama().state_dict(), assign=True)


def test_16_bit_models_are_the_dense_model(rank: Rank) -> None:
    """DeepSpeed's file, and that without what the user froze, which is not what a rank lacks; ranks/checkpoint has
    folders in Hugging Face format."""
    model = ALL_SPECIMENS["gpt2"].build()
    model.get_parameter("transformer.ln_f.weight").requires_grad_(False)
    engine = engine_of(sgd(regime="backward", strategy=MIXED), model)
    train(engine, num_steps=1)
    state = dense_state(engine)
    engine.save_16bit_model(str(rank.folder))
    engine.save_16bit_model(str(rank.folder), "trained.bin", exclude_frozen_parameters=True)
    gathered(None)
    assert_identical(torch.load(rank.folder / "pytorch_model.bin", weights_only=True), state)
    trained = torch.load(rank.folder / "trained.bin", weights_only=True)
    assert state.keys() - trained.keys() == {"transformer.ln_f.weight"}
    assert not stored_absent(engine)


def test_an_export_that_fails_is_everybodys(rank: Rank) -> None:
    """And an earlier one stays as it was."""
    engine, folder = engine_with(llama()), rank.folder / "hf"
    engine.save_pretrained(folder)
    known = (folder / "model.safetensors").read_bytes()
    (rank.folder / "file").touch()
    refusal((RuntimeError, OSError), lambda: engine.save_pretrained(rank.folder / "file" / "x"), "file")
    refusal(RuntimeError, lambda: engine.save_pretrained(folder, tokenizer=object()), "save_pretrained")
    with mock.patch("torch.save", side_effect=OSError(28, "No space left on device")):
        refusal(OSError, lambda: engine.save_16bit_model(str(rank.folder / "y")), "No space", "[on rank 0]")
    with mock.patch("transformers.modeling_utils.safe_save_file", side_effect=OSError(28, "No space left on device")):
        refusal(OSError, lambda: engine.save_pretrained(rank.folder / "full"), "No space", "[on rank 0]")
    assert (folder / "model.safetensors").read_bytes() == known
    engine.save_16bit_model(str(rank.folder / "y"))
    assert [path.name for path in (rank.folder / "y").iterdir()] == ["pytorch_model.bin"]
    assert not stored_absent(engine)
    train(engine, num_steps=1)
