"""`sdp_deepspeed.Init`: build a model without storage; later, each rank initializes the weights that it holds.

Under `Init` tensors are on the meta device, and the operations of constructors, `reset_parameters` and Transformers'
`_init_weights` are recorded. Later, a rank computes each tensor that it holds, even in part, from the recording, as a
whole and on the CPU, and keeps its slices. So weights depend on the constructors and the seed only, and are the same on
every rank, in every layout, mode and host; but output projections of branches that subnetworks multiply by 1 / C start
multiplied by C. Tables that constructors compute are bit-identical to those without `Init`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.scale import starts_smaller
from sdp_deepspeed.masking.tensor_data import move_in_place
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.tensors import named_tensors
from sdp_deepspeed.recording import Recording, Ref, is_meta

_GET_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class Init:
    """Context manager in which a model is built without storage.

    `deepspeed.initialize`, `fully_shard` or `join` then initializes the weights that each rank holds, as the model's
    constructors would. Parameters have the same distribution as without this context, but other random numbers, derived
    from PyTorch's seed on rank 0; with `branch_scale: "training"`, output projections start multiplied by C.

    Raises:
        RuntimeError: inside, if a constructor needs the value of a tensor, by a nested `Init`, and by
            `from_pretrained`; after it, if weights are changed before `deepspeed.initialize`.
    """

    def __init__(self) -> None:
        self._inside = ExitStack()

    def __enter__(self) -> None:
        from transformers import PreTrainedModel

        if PreTrainedModel.init_weights is _init_weights:
            raise RuntimeError("sdp_deepspeed.Init contexts cannot be nested; build the whole model in one")
        recording, seed = Recording(), torch.initial_seed()
        modules: dict[int, nn.Module] = {}

        def note(module: nn.Module, *_: Any) -> None:
            modules[id(module)] = module

        # PyTorch's cached list of factory functions may contain replacements by Transformers.
        torch.utils._device._device_constructors.cache_clear()
        with ExitStack() as stack:
            _replace(stack, PreTrainedModel, "init_weights", _init_weights)
            _replace(stack, PreTrainedModel, "from_pretrained", _refuse_pretrained)
            _replace(stack, nn.init, "_no_grad_trunc_normal_", _truncated_normal)
            for register in (
                register_module_parameter_registration_hook,
                register_module_buffer_registration_hook,
                register_module_module_registration_hook,
            ):
                stack.callback(register(note).remove)
            stack.enter_context(torch.device("meta"))
            stack.enter_context(recording)
            stack.enter_context(_Constructing())
            stack.push(lambda kind, *_: None if kind else _defer_all(modules.values(), recording, seed))
            self._inside = stack.pop_all()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and "meta tensor" in str(error):
            error.add_note(
                "sdp_deepspeed.Init: a constructor needs the value of a tensor; build this model without Init"
            )
        inside, self._inside = self._inside, ExitStack()
        inside.__exit__(kind, error, traceback)


class _Constructing(TorchFunctionMode):
    """Keep the values of `torch.tensor`, and make initializers that skip meta tensors run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func == _GET_IS_META:
            return False
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is None:
            result = func(*args, **{**kwargs, "device": "cpu"})
            return result.detach().to("meta").requires_grad_(result.requires_grad)
        return func(*args, **kwargs)


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack is closed."""
    stack.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def _init_weights(self: Any) -> None:
    """Initialize on the meta device, where Transformers' method only ties weights."""
    self.initialize_weights()
    self.tie_weights(recompute_mapping=False)


def _refuse_pretrained(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "from_pretrained inside sdp_deepspeed.Init: build the model from its config, and call engine.load_pretrained "
        "after deepspeed.initialize"
    )


@torch.no_grad()
def _truncated_normal(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> torch.Tensor:
    """Truncated normal by inverse transform sampling. PyTorch's rejection sampling depends on values, which do not
    exist on the meta device."""
    low, high = (math.erf((bound - mean) / (std * 2**0.5)) for bound in (a, b))
    values = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device).uniform_(low, high).erfinv_()
    return tensor.copy_(values.mul_(std * 2**0.5).add_(mean).clamp_(a, b))


# ---- between Init and the engine --------------------------------------------------------------------------------

_CASTS = {"to", "type", "float", "half", "bfloat16", "double"}
_HARMLESS = {"requires_grad_", "detach_", "share_memory_"}
_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or", "xor", "matmul")}


def _deferred_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Views and casts of a deferred tensor are deferred; in-place operations raise."""
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    if is_in_place or name in (*_OPERATORS, "__setitem__", "__deepcopy__") or "out" in (kwargs or {}):
        raise RuntimeError(
            f"{name}: between sdp_deepspeed.Init and deepspeed.initialize weights do not exist, and cannot be changed "
            "or copied; do it inside Init"
        )
    if func == _GET_IS_META:
        return False  # otherwise initializers skip it
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **(kwargs or {}))
        source: Any = next(leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) in _DEFERRED.values())
        for leaf in tree_leaves(result):
            if is_meta(leaf) and type(leaf) in _DEFERRED:
                if name in _CASTS:
                    _defer(leaf, source._sdp_weights)
                elif leaf.untyped_storage() is source.untyped_storage():
                    leaf.__class__ = _DEFERRED[type(leaf)]
    return result


class _DeferredTensor(torch.Tensor):
    __torch_function__ = classmethod(_deferred_function)


class _DeferredParameter(nn.Parameter):
    __torch_function__ = classmethod(_deferred_function)


_DEFERRED: dict[type[Any], type[Any]] = {torch.Tensor: _DeferredTensor, nn.Parameter: _DeferredParameter}


def _defer(tensor: Any, weights: tuple[Recording, int, Ref]) -> None:
    tensor.__class__ = _DEFERRED[type(tensor)]
    tensor._sdp_weights = weights


def _defer_all(modules: Iterable[nn.Module], recording: Recording, seed: int) -> None:
    """Defer all tensors of the modules and their submodules; existing data moves to the recording."""
    for module in {id(module): module for root in modules for module in root.modules()}.values():
        plain = [value for value in vars(module).values() if is_meta(value)]
        for tensor in (*module._parameters.values(), *module._buffers.values(), *plain):
            if type(tensor) in _DEFERRED:
                if not is_meta(tensor):
                    move_in_place(tensor, tensor.detach().to("meta"))
                _defer(tensor, (recording, seed, recording.ref(tensor)))


# ---- what the hosts call ----------------------------------------------------------------------------------------


def has_meta_tensors(model: nn.Module) -> bool:
    """Whether a tensor of the model is on the meta device, as all are after `Init`."""
    return any(map(is_meta, named_tensors(model).values()))


class DeferredWeights:
    """Initial weights of a model built under `Init`.

    The constructor turns the model's tensors into ordinary meta tensors. These may be cast, which casts the values, and
    a mask may be applied.

    Attributes:
        seed: this rank's seed at `Init`; all ranks must use the same seed.

    Raises:
        ValueError: the same on every rank: a tensor is not initialized, was replaced after `Init`, or was built
            without it.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors: dict[str, Any] = named_tensors(model)
        weights = {name: t._sdp_weights for name, t in tensors.items() if hasattr(t, "_sdp_weights")}
        if others := [name for name in tensors if name not in weights]:
            what = "was replaced or added after" if weights else "is on the meta device without"
            raise ValueError(
                f"{quoted(others, limit=1)} {what} sdp_deepspeed.Init: build the whole model inside, and load or "
                "change weights after deepspeed.initialize"
            )
        if len({id(recording) for recording, _, _ in weights.values()}) > 1:
            raise ValueError(
                "parts of the model were built in several sdp_deepspeed.Init contexts; use one for the whole model"
            )
        self._recording, self.seed, _ = next(iter(weights.values()))
        self._refs = {name: ref for name, (_, _, ref) in weights.items()}
        if blank := [name for name, ref in self._refs.items() if not self._recording.is_written(ref)]:
            raise ValueError(_uninitialized(blank))
        self._plain = [  # tensors in plain attributes
            (module, key, value._sdp_weights[-1])
            for module in model.modules()
            for key, value in vars(module).items()
            if hasattr(value, "_sdp_weights")
        ]
        for tensor in tensors.values():
            del tensor._sdp_weights
            tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor

    @torch.inference_mode(False)
    @torch.no_grad()
    def materialize(self, mask: Mask, device: torch.device, seed: int) -> None:
        """Allocate and initialize what this rank stores of the model's meta tensors.

        Tensor objects and random state are unchanged. Peak memory is what the rank stores, plus one dense tensor.

        Args:
            seed: the same on every rank.

        Raises:
            ValueError: a part of a tensor that this rank stores is not initialized.
        """
        random_state = torch.get_rng_state()
        for tensor in mask.tensors():
            if is_meta(tensor):
                move_in_place(tensor, _zeros_like(tensor, device))
        for name in self._refs:
            stored = mask.stored_pieces(name)
            dense = self.value(name, seed) if stored else None
            for piece in stored:
                mask.view(piece).copy_(piece.narrow(dense))
        _shrink_outputs(mask)
        for module, key, ref in self._plain:
            setattr(module, key, self._recording.value(ref, seed).to(device))
        torch.set_rng_state(random_state)

    def value(self, name: str, seed: int) -> torch.Tensor:
        """The initial value of a dense tensor, on the CPU in its original dtype. Changes PyTorch's random state."""
        value = self._recording.value(self._refs[name], seed)
        if value.is_floating_point() and value.isnan().any():
            raise ValueError(_uninitialized([name]))
        return value


def _shrink_outputs(mask: Mask) -> None:
    """Multiply the output projections of branches that subnetworks multiply by 1 / C by C, so that subnetworks start as
    without a scale."""
    for branch in mask.branches:
        if branch.name not in mask.scaled or not starts_smaller(mask.model, branch):
            continue
        for name in branch.outputs:
            for piece in mask.stored_pieces(name):
                mask.view(piece).mul_(mask.scaled[branch.name])


def _uninitialized(names: list[str]) -> str:
    return f"{quoted(names, limit=1)}: its constructor does not initialize all of it; initialize it there"


def _zeros_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Zeros with the same strides and storage size."""
    num_elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    zeros = torch.zeros(num_elements, dtype=tensor.dtype, device=device)
    strided = zeros.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return strided.detach()  # its base would keep the memory when a host replaces `.data`
