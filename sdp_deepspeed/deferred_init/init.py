"""`sdp_deepspeed.Init`: build the dense model without its memory; each worker makes its own part of it later.

Inside, tensors that random numbers or fills go into have no storage (they are on PyTorch's meta device, but say that
they are on the CPU, as initializers pass over tensors that do not); what is done to them is written down. All other
tensors, such as tables computed from `torch.arange`, are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from sdp_deepspeed.deferred_init.late_changes import watch
from sdp_deepspeed.deferred_init.operation import Operation, Ref, address
from sdp_deepspeed.deferred_init.program import Program

PROGRAM = "_sdp_program"  # attribute of a parameter or buffer whose value a program makes
_BLANK = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::empty_like"}
_FILLS = {"aten::zeros", "aten::ones", "aten::full"}
_REPLACING = {
    f"aten::{name}_"
    for name in (
        *("normal", "uniform", "zero", "fill", "copy", "exponential", "random", "bernoulli"),
        *("log_normal", "cauchy", "geometric"),
    )
}
_READS_VALUES = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}


class Init:
    """Context in which a model is built without storage for its weights.

    `deepspeed.initialize` then gives each rank the weights of its own units, equal bit for bit to what the same lines
    build without this context: seed as ever. Ranks that are seeded differently all start from rank 0's random state.
    The random stream is left where the dense model's building leaves it, if nobody used it in between. What is done to
    the model's weights between this context and `deepspeed.initialize` counts too.

    Args:
        initialize: False draws no random numbers, for a model whose weights are loaded right after
            `deepspeed.initialize`; until then they are zeros.

    Raises:
        RuntimeError: inside, where building depends on the value of a tensor that has none yet; or inside another Init.
        ValueError: inside, for a tensor on a GPU: weights are initialized on the CPU and moved by `initialize`.
    """

    def __init__(self, *, initialize: bool = True) -> None:
        self._initialize = initialize
        self._inside = ExitStack()

    def __enter__(self) -> Program:
        if any(isinstance(mode, _Recording) for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError("sdp_deepspeed.Init inside another Init: build the whole model in one")
        program = Program(torch.get_rng_state(), draws=self._initialize)
        recording = _Recording(program)
        registered: dict[int, torch.Tensor] = {}

        def mark(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
            if tensor is not None:
                setattr(tensor, PROGRAM, program)
                registered[id(tensor)] = tensor

        with ExitStack() as stack:
            stack.callback(lambda: watch(registered.values(), recording))  # when all else is undone
            for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
                stack.callback(register(mark).remove)
            stack.enter_context(recording.again())
            stack.enter_context(_truncated_normal_as_one(recording))
            stack.callback(lambda: setattr(program, "state_at_end", torch.get_rng_state()))
            self._inside = stack.pop_all()
        return program

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        self._inside = ExitStack()  # which held the tensors


class _OnCpu(TorchFunctionMode):
    """Tensors without storage say that they are on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        _check_device((kwargs or {}).get("device"))  # before PyTorch looks for a GPU
        if func is torch.Tensor.__deepcopy__:  # its own way copies storages, unseen
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))
        result = func(*args, **(kwargs or {}))
        if func == torch.Tensor.device.__get__ and result.type == "meta":
            return torch.device("cpu")
        return False if func == torch.Tensor.is_meta.__get__ else result  # type: ignore[attr-defined]


class _Recording(TorchDispatchMode):
    """Writes down what is done to tensors without storage, or with random numbers; does all else."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self._changed: set[int] = set()  # storages with data that the program changes
        self._random_state = program.rng_state

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, everything is written down."""
        with self, _OnCpu():
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        has_none = any(map(self.is_deferred, tensors)) or _is_meta(kwargs.get("device"))
        if func.is_view or not (has_none or is_random or func._schema.name in _BLANK | _FILLS):
            return func(*args, **kwargs)
        if has_none and func._schema.name in _READS_VALUES:
            raise RuntimeError(
                f"sdp_deepspeed.Init: the model is built by the value of a tensor ({func}) that does not exist yet; "
                "build it without Init. Values are there after deepspeed.initialize; trunc_normal_ belongs inside Init"
            )
        _check_device(kwargs.get("device"))
        return self._record(func, args, kwargs, is_random=is_random)

    def is_deferred(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()  # says where it is; under _OnCpu the tensor does not
        return storage.device.type == "meta" or address(tensor) in self._changed

    def record_in_place(self, call: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """A function that replaces all of `tensor` by random numbers."""
        self._make_changeable(tensor)
        ref = self.program.ref(tensor)
        self._note_random_state(kwargs.get("generator"))
        replaces = frozenset([ref.storage]) if self._covers(ref) else frozenset()
        operation = Operation(call, (ref, *args), kwargs, targets=(ref,), replaces=replaces, is_random=True)
        self.program.operations.append(operation)

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], *, is_random: bool) -> Any:
        written = list(_written(func, args, kwargs))
        for tensor in written:
            self._make_changeable(tensor)
        originals: dict[int, torch.Tensor] = {}
        known = {address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}

        def without_data(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "meta":
                return tensor
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            originals[id(empty)] = tensor
            return empty

        names = {argument.name for argument in func._schema.arguments}
        has_device = "device" in names
        meta_args, meta_kwargs = tree_map_only(torch.Tensor, without_data, (args, kwargs))
        outputs = func(*meta_args, **(meta_kwargs | ({"device": "meta"} if has_device else {})))
        outputs = tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), tensor), outputs)
        leaves = [(position, leaf) for position, leaf in enumerate(tree_leaves(outputs))]
        births = tuple(
            (position, self.program.ref(leaf))
            for position, leaf in leaves
            if isinstance(leaf, torch.Tensor) and address(leaf) not in known
        )
        if func._schema.name not in _BLANK:
            kwargs |= {"device": "cpu"} if has_device else {}
            if names >= {"device", "dtype"}:  # makes one tensor, which may be of what is the default dtype now
                kwargs |= {"dtype": outputs.dtype}
            self._append(func, args, kwargs, births, tuple(map(self.program.ref, written)), is_random=is_random)
        return outputs

    def _append(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        births: tuple[tuple[int, Ref], ...],
        targets: tuple[Ref, ...],
        *,
        is_random: bool,
    ) -> None:
        if is_random:
            self._note_random_state(kwargs.get("generator"))
        args, kwargs = tree_map_only(torch.Tensor, self._as_constant, (args, kwargs))
        replacing = {ref for ref in targets if func._schema.name in _REPLACING and self._covers(ref)}
        refs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Ref) and leaf not in replacing]
        reads = frozenset(ref.storage for ref in refs)
        replaces = frozenset(ref.storage for ref in (*replacing, *(ref for _, ref in births))) - reads
        operation = Operation(func, args, kwargs, births, targets, reads, replaces, is_random)
        self.program.operations.append(operation)

    def _as_constant(self, tensor: torch.Tensor) -> Any:
        """A real tensor as it is now, or what will be one."""
        return self.program.ref(tensor) if self.is_deferred(tensor) else tensor.detach().clone()

    def _covers(self, ref: Ref) -> bool:
        return ref.covers(self.program.storages[ref.storage].nbytes())

    def _make_changeable(self, tensor: torch.Tensor) -> None:
        """A real tensor is about to be changed by the program: from now on its data are only where that begins."""
        if self.is_deferred(tensor):
            return
        everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        ref = self.program.ref(everything)
        self._changed.add(ref.storage)
        start = everything.clone()
        operation = Operation(torch.clone, (start,), {}, births=((0, ref),), replaces=frozenset([ref.storage]))
        self.program.operations.append(operation)

    def _note_random_state(self, generator: torch.Generator | None) -> None:
        """Nothing is drawn while the program is written: the state changes only where somebody seeds anew."""
        if generator is not None:
            self.program.generators.setdefault(id(generator), (generator, generator.get_state()))
        elif not torch.equal(state := torch.get_rng_state(), self._random_state):
            self._random_state = state
            self.program.operations.append(Operation(torch.set_rng_state, (state,), {}, is_random=True))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Arguments that an operation writes in place."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _check_device(device: Any) -> None:
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise ValueError(
            f"sdp_deepspeed.Init: a tensor is made on {device}, but weights are initialized on the CPU and moved by "
            "deepspeed.initialize: build the model without a device"
        )


@contextmanager
def _truncated_normal_as_one(recording: _Recording) -> Iterator[None]:
    """PyTorch draws it again and again until all values are inside: how often, depends on the values."""
    original = torch.nn.init._no_grad_trunc_normal_

    def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        recording.record_in_place(original, tensor, *args, **kwargs)
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = record
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original
