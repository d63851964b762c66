"""FSDP2's options and ways to start, on two ranks whose subnetworks differ."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import DynamicCache

import sdp_deepspeed
from sdp_deepspeed.checkpoint import export_and_import
from sdp_deepspeed.fsdp import (
    CheckpointManager,
    clip_grad_norm_,
    full_state_dict,
    param_groups,
    save_pretrained,
    sharded_model_of,
)
from sdp_deepspeed.init import DeferredWeights
from tests.helpers.models import TOKENS, VOCABULARY, Diffusing, Wrapped, llama, loss_of
from tests.helpers.more_models import ALL_SPECIMENS
from tests.helpers.ranks import Rank
from tests.helpers.sharded import check_against_reference, gathered_state, sharded
from tests.helpers.training import assert_identical, gathered, refusal

pytestmark = pytest.mark.world(2)
ONE = {"holders": 1}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def test_checkpointed_or_offloaded(rank: Rank) -> None:
    check_against_reference(rank, llama(), ONE, prepare=lambda model: model.gradient_checkpointing_enable())
    check_against_reference(rank, llama(), ONE, offload_policy=CPUOffloadPolicy(pin_memory=False))


@pytest.mark.slow
def test_compiled(rank: Rank) -> None:
    def compile_layers(model: Any) -> None:
        for layer in model.model.layers:
            layer.compile(backend="eager")

    for block in (ONE, ONE | {"strategy": "neuron"}):
        check_against_reference(rank, llama(), block, prepare=compile_layers)
    check_against_reference(rank, llama(), ONE, parallelize=lambda model: model.compile(backend="eager"))


def test_mixed_precision(rank: Rank) -> None:
    """Absent units are gathered in the same dtype as held ones: evaluation gives what it gives at C = 1."""
    models = [sharded(ALL_SPECIMENS["gpt2"].build(), {"holders": number}, mp_policy=BF16) for number in (1, 2)]
    for model in models:  # units get fp32, which FSDP2 casts where they are held
        model.transformer.wte.register_forward_hook(lambda _, args, output: output.float())
        model.transformer.ln_f.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    loss_of(models[0], TOKENS).backward()
    assert {p.grad.dtype for p in models[0].parameters() if p.grad is not None} == {torch.float32}
    with torch.no_grad():
        found = [model.eval()(input_ids=TOKENS).logits for model in models]
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(*found)
    sharded_model_of(models[0]).reshard()
    assert {p.dtype for p in models[0].parameters()} == {torch.float32}


def test_stays_gathered(rank: Rank) -> None:
    """Between passes: two evaluations in a row, and training goes on with what it had."""
    model = sharded(llama(), ONE, reshard_after_forward=False)
    freed = sharded(llama(), ONE)
    for _ in range(2):
        with torch.no_grad():
            found = [one.eval()(input_ids=TOKENS).logits for one in (model, freed, model)]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        losses = [loss_of(one.train(), TOKENS) for one in (model, freed)]
        assert torch.equal(*losses)
        losses[0].backward()


def test_leaves_nothing_gathered(rank: Rank) -> None:
    """Evaluation does not, between any two calls; and what training has left gathered is clipped all the same."""
    model, other = sharded(llama(), ONE), sharded(llama(), ONE)
    with torch.no_grad():
        model.eval()(input_ids=TOKENS)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters() if parameter.numel())
    with mock.patch("torch.distributed.get_backend", return_value="undefined"):
        assert clip_grad_norm_(model, 1.0) == 0  # no gradient yet, of a process group for all devices
    other.set_reshard_after_backward(False)
    norms = []
    for each in (model, other):
        loss_of(each.train(), TOKENS).backward()
        norms += [clip_grad_norm_(each, float("inf"))]
    with torch.no_grad():
        model.eval()(input_ids=TOKENS)
    norms += [clip_grad_norm_(model.parameters(), float("inf"))]
    assert norms[0] > 0
    assert norms == norms[:1] * 3, norms
    loss_of(other, TOKENS)  # without a backward pass
    assert all(isinstance(each, DTensor) for group in param_groups(other) for each in group["params"])


def test_leaves_out_what_is_ignored(rank: Rank) -> None:
    """Of what is shared: rank 0's own is exported. Of units it is refused, and so are other ones on each rank."""
    model, name = llama(), "model.norm.weight"
    model.get_parameter(name).data += rank.rank
    full = full_state_dict(sharded(model, ONE, ignored_params=[model.get_parameter(name)]))
    assert (rank.rank == 0) == torch.equal(full.get(name, torch.zeros(1)), llama().get_parameter(name))
    other = llama()
    ignored = [other.get_parameter("model.layers.0.mlp.up_proj.weight")]
    refusal(ValueError, lambda: sharded(other, ONE, ignored_params=ignored), "must be averaged")
    name = ("model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight")[rank.rank]
    own = [other.get_parameter(name)]
    refusal(RuntimeError, lambda: sharded(other, ONE | {"shared": [r"\.attention"]}, ignored_params=own), "options")


def test_starts_from_init(rank: Rank) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        with sdp_deepspeed.Init():
            return llama()

    for strategy in ("block", "neuron"):
        weights = DeferredWeights(copy := build())
        state = gathered_state(sharded(build(), ONE | {"strategy": strategy}))
        for name, _ in copy.named_parameters():  # C = 1/2
            factor = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            assert torch.equal(state[name], weights.value(name, weights.seed) * factor), name


def test_steps_with_multi_tensor_kernels(rank: Rank) -> None:
    """Which refuse DTensors of several meshes in one group; and a norm that is not finite."""
    model = sharded(llama(), ONE)
    groups = [{"params": list(model.parameters()), "lr": 0.1}]
    loss_of(model, TOKENS).backward()
    assert clip_grad_norm_(model, 0.01) > 0.01
    assert abs(clip_grad_norm_(model, 1.0) - 0.01) < 1e-5
    divided = param_groups(groups)
    assert len(divided) == 2
    assert {group["lr"] for group in divided} == {0.1}
    before = gathered_state(model)
    torch.optim.AdamW(divided, foreach=True).step()
    assert all(not torch.equal(before[name], value) for name, value in gathered_state(model).items())
    next(p for p in model.parameters() if p.grad is not None).grad.fill_(float("nan"))
    refusal(RuntimeError, lambda: clip_grad_norm_(model, 1.0, error_if_nonfinite=True), "non-finite")


@pytest.mark.parametrize("norm_type", [1, 2.5, float("inf")])
def test_clips_other_norms(norm_type: float, rank: Rank) -> None:
    """Of the dense model's gradient, in which every parameter counts once; NaN on one rank is NaN on all."""
    model = sharded(llama(), ONE)
    loss_of(model, TOKENS).backward()
    held = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    dense = {name: gradient.flatten() for each in gathered(held) for name, gradient in each.items()}
    assert len(dense) > len(held)
    expected = torch.linalg.vector_norm(torch.cat([*dense.values()]), norm_type)
    torch.testing.assert_close(clip_grad_norm_(model, 0.01, norm_type), expected)
    torch.testing.assert_close(clip_grad_norm_(model, 1.0, norm_type=norm_type), torch.tensor(0.01), rtol=1e-3, atol=0)
    refusal(ValueError, lambda: clip_grad_norm_(model, 1.0, -norm_type), "norm_type", "above 0")
    if rank.rank == 1:
        next(p for p in model.parameters() if p.grad is not None).grad.to_local().view(-1)[0] = float("nan")
    assert clip_grad_norm_(model, 1.0, norm_type).isnan()


def test_is_exported(rank: Rank) -> None:
    """As in evaluation."""
    from transformers import LlamaForCausalLM

    model = sharded(llama(), ONE)
    folder = rank.folder / "exported"
    save_pretrained(model, folder)
    whole: Any = LlamaForCausalLM.from_pretrained(folder)
    assert whole.config.architectures == ["LlamaForCausalLM"]
    with torch.no_grad():
        expected = whole(input_ids=TOKENS).logits
        assert torch.equal(model.eval()(input_ids=TOKENS).logits, expected)
    built = llama().get_parameter("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(whole.get_parameter("model.layers.0.mlp.down_proj.weight"), built)
    refusal(RuntimeError, lambda: save_pretrained(model, Path("/dev/null/x")), "save_pretrained")
    no_room = {"side_effect": MemoryError("no room")} if rank.rank == 0 else {"wraps": export_and_import._room_for}
    with mock.patch.object(export_and_import, "_room_for", **no_room):
        refusal(RuntimeError, lambda: save_pretrained(model, folder), "no room", "rank 0")
    with torch.no_grad():
        assert torch.equal(model(input_ids=TOKENS).logits, expected)


def test_is_exported_without_transformers(rank: Rank) -> None:
    """With tied weights: a model without `save_pretrained`, and one whose `save_pretrained` takes no state dict."""
    for kind, name in ((Wrapped, "model"), (Diffusing, "diffusion_pytorch_model")):
        model, folder = sharded(kind(), ONE), rank.folder / name
        save_pretrained(model, folder)
        if rank.rank == 0:
            assert_identical(load_file(folder / f"{name}.safetensors"), kind().state_dict())
        with torch.no_grad():
            expected = kind().eval()(input_ids=TOKENS).logits
            assert torch.equal(model.eval()(input_ids=TOKENS).logits, expected)


def test_generates(rank: Rank) -> None:
    """The dense model does, with its cache; hooks that were put on since run."""
    model, plain, called = sharded(llama(), ONE | {"strategy": "neuron"}), llama(), list[int]()
    layer = model.model.layers[0]
    layer.mlp.register_forward_hook(lambda *_: called.append(1))
    layer.self_attn.register_forward_pre_hook(lambda _, args, kwargs: called.append(len(kwargs) > 0), with_kwargs=True)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    models: list[Any] = [model, plain]
    found, expected = (each.eval().generate(TOKENS, **options) for each in models)
    assert torch.equal(found, expected)
    assert called == [True, 1] * 4
    model.train()
    with pytest.raises(RuntimeError, match="past_key_values"):
        model(input_ids=TOKENS, past_key_values=DynamicCache())


def test_is_refused(rank: Rank) -> None:
    """One rank's mistake is everybody's error, and nothing is changed."""
    model = llama()
    before = deepcopy(model.state_dict())
    block = ONE if rank.rank else ONE | {"regime": "backward"}
    refusal(ValueError, lambda: sharded(model, block), "regime", "rank 0")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    refusal(RuntimeError, lambda: sharded(llama(), ONE | {"seed": rank.rank}), "settings")
    refusal(RuntimeError, lambda: sharded(llama(), ONE, reshard_after_forward=bool(rank.rank)), "settings", "options")
    refusal(RuntimeError, lambda: sharded(llama(1 + rank.rank), ONE), "rank 1 computed a different plan from rank 0")
    resized: Any = llama()
    resized.resize_token_embeddings(VOCABULARY + rank.rank)
    refusal(RuntimeError, lambda: sharded(resized, ONE), "model.embed_tokens.weight [62, 16]", "on rank 1")
    model = sharded(model, ONE)
    refusal(ValueError, lambda: sharded(model, ONE), "reduced this model")
    t5 = sharded(ALL_SPECIMENS["t5"].build(), {"strategy": "neuron", "holders": 1})
    t5.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    refusal(RuntimeError, lambda: loss_of(t5.train(), TOKENS), "cannot checkpoint activations")
    refusal(ValueError, lambda: full_state_dict(llama()), "was not sharded")


def with_counts() -> Any:
    """A model with a buffer in each layer."""
    model: Any = llama()
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_buffer("count", torch.full((2,), float(number)))
    return model


def test_wrapped_layers(rank: Rank) -> None:
    """By torch's checkpoint_wrapper and torch.compile, as in torchtitan: a model without wrappers goes on from it."""

    def wrap(model: Any) -> None:
        layers = model.model.layers
        layers[0] = checkpoint_wrapper(layers[0])
        layers[0].mlp = checkpoint_wrapper(layers[0].mlp)
        layers[1].mlp.up_proj = checkpoint_wrapper(layers[1].mlp.up_proj)
        layers[1] = torch.compile(checkpoint_wrapper(layers[1]), backend="eager")

    for strategy in ("block", {"mlp": "neuron"}):
        model = check_against_reference(rank, with_counts(), ONE | {"strategy": strategy}, parallelize=wrap)
        assert "_checkpoint_wrapped_module" in model.model.layers[0]._modules
        folder = rank.folder / type(strategy).__name__
        CheckpointManager(model, torch.optim.SGD(param_groups(model))).save_checkpoint(folder)
        other = sharded(with_counts(), ONE)
        for layer in other.model.layers:
            layer.self_attn.count.add_(rank.rank + 1)
        CheckpointManager(other, torch.optim.SGD(param_groups(other))).load_checkpoint(folder, load_module_only=True)
        found, expected = gathered_state(other), gathered_state(model)
        assert list(found) == list(expected) == list(with_counts().state_dict())
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    for wrapper in (checkpoint_wrapper, partial(torch.compile, backend="eager")):
        refusal(ValueError, lambda wrapper=wrapper: sharded(wrapper(llama()), ONE), "the model itself is wrapped")
    reentrant: Any = llama()
    reentrant.model.layers[0] = checkpoint_wrapper(reentrant.model.layers[0], checkpoint_impl=CheckpointImpl.REENTRANT)
    refusal(ValueError, lambda: sharded(reentrant, ONE), "'model.layers.0' uses reentrant")
    few: Any = llama(1)
    few.model.layers[0] = checkpoint_wrapper(few.model.layers[0])
    refusal(ValueError, lambda: sharded(few, ONE | {"granularity": "layer"}), "unit")
    assert "_checkpoint_wrapped_module" in few.model.layers[0]._modules, "as it was"
    by_transformers: Any = llama()
    by_transformers.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    refusal(ValueError, lambda: sharded(by_transformers, ONE), "'model.layers.0'", "uses reentrant")
