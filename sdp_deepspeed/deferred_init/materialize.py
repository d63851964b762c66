"""A model without storage becomes this worker's own: planned and cut down first, then filled with the values of its
initialization, a tensor at a time. No rank ever has the dense model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn

from sdp_deepspeed.config import KEY
from sdp_deepspeed.deferred_init.init import PROGRAM, Init
from sdp_deepspeed.deferred_init.late_changes import unwatch
from sdp_deepspeed.deferred_init.materializer import Materializer, layout
from sdp_deepspeed.deferred_init.operation import Ref, address
from sdp_deepspeed.deferred_init.program import Program
from sdp_deepspeed.deferred_init.threads import num_threads, own_cores
from sdp_deepspeed.distributed.agreement import run_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.messages import listed, quoted
from sdp_deepspeed.plan.tensors import named_tensors

_BUILD_UNDER_INIT = "build the model inside `with sdp_deepspeed.Init():`"
Value = Ref | torch.Tensor  # in the program, or as it is


class DeferredModel:
    """How the values of a model without storage are made.

    Args:
        program: what makes them.
        values: by dense name, tensors with storage of their own left out.
        note: for the user, where the program was not written while the model was built; else empty.
    """

    def __init__(self, program: Program, values: Mapping[str, Value], *, note: str = "") -> None:
        self.note = note
        self._program = program
        self._values = dict(values)
        refs = {name: value for name, value in values.items() if isinstance(value, Ref)}
        undefined = program.never_written(ref.storage for ref in refs.values()) if program.draws else set()
        _refuse([name for name, ref in refs.items() if ref.storage in undefined], "nothing initializes it")

    @classmethod
    def of(cls, model: nn.Module) -> DeferredModel | None:
        """Of a model that was built under `Init` or on the meta device; None if all of it has storage.

        Raises:
            ValueError: tensors whose values nothing says, by name.
        """
        tensors = named_tensors(model)
        unwatch(tensors.values())
        programs = {id(found): found for t in tensors.values() if (found := getattr(t, PROGRAM, None)) is not None}
        known = [address(t) in program.storages for program in programs.values() for t in tensors.values()]
        if not any(known) and not any(tensor.is_meta for tensor in tensors.values()):
            return None
        if len(programs) > 1:
            raise ValueError("sdp_deepspeed.Init: parts of the model were built in several contexts; use one for all")
        if not programs:
            return cls._of_meta_model(model, tensors)
        (program,) = programs.values()
        return cls(program, _values(program, tensors))

    @classmethod
    def _of_meta_model(cls, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> DeferredModel:
        """Nothing was written down: Transformers' models are built once more, others are reset module by module."""
        if not _is_transformers(model):
            versions = _versions(tensors)
            with torch.device("meta"):
                _reset(model)
            once = {name: version - versions[name] for name, version in _versions(tensors).items()}
            _refuse_changed(versions, once)
            with Init() as program:
                _reset(model)
            return cls(program, _values(program, tensors), note=_note("reset_parameters() of its modules"))
        with torch.device("meta"):
            _refuse_changed(_versions(tensors), _versions(named_tensors(type(model)(deepcopy(model.config)))))
        floats = (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
        with default_dtype(next(floats, torch.get_default_dtype())), Init() as program:
            twin = named_tensors(type(model)(deepcopy(model.config)))
        unwatch(twin.values())
        unknown = [n for n, t in tensors.items() if n not in twin or layout(twin[n]) != layout(t)]
        _refuse(unknown, f"a fresh {type(model).__name__} of the model's config has no such tensor")
        values = {name: twin[name] for name, tensor in tensors.items() if tensor.is_meta}
        made = values | _values(program, {name: twin[name] for name in values})
        return cls(program, made, note=_note(f"a fresh {type(model).__name__} of its config"))

    @torch.no_grad()
    def materialize(self, mask: Mask, device: torch.device, world: Communicator) -> None:
        """Give each tensor of a masked model its storage on `device`, with the initial values that this rank stores.

        All ranks call it, and all take rank 0's random numbers. Parameters stay the objects that they are.
        """
        own = bytes(self._program.rng_state.numpy())
        states, cores = zip(*world.gather_objects((own, own_cores())), strict=True)
        neighbors = mask.model.nodes.neighbors(world.rank)
        threads = num_threads([cores[rank] for rank in neighbors], neighbors.index(world.rank))
        run_on_all_ranks(world, lambda: self._draw(Materializer(mask, device), states[0], own, threads))

    def _draw(self, materializer: Materializer, first: bytes, here: bytes, threads: int) -> None:
        """Fill from the random state `first`; the state of this process ends as the dense model's building leaves it,
        unless somebody has used it since, or it is another one (`here`) on purpose."""
        before = torch.get_rng_state()
        torch.set_rng_state(torch.frombuffer(bytearray(first), dtype=torch.uint8))
        self._fill(materializer, threads)
        if not torch.equal(before, self._program.state_at_end) or here != first:
            torch.set_rng_state(before)

    def _fill(self, materializer: Materializer, threads: int) -> None:
        names: dict[int, dict[str, Ref]] = {}
        for name, value in self._values.items():
            if materializer.is_dropped(name):
                continue
            if isinstance(value, Ref):
                names.setdefault(value.storage, {})[name] = value
            else:
                materializer.store(name, value)
        only = [refs.popitem() for refs in map(dict, names.values()) if len(refs) == 1]
        parts = {ref: stretches for name, ref in only if (stretches := materializer.stretches(name))}
        for storage, data in self._program.run(names, parts=parts, num_threads=threads):
            for name, ref in names[storage].items():
                materializer.store(name, ref.view(data))
            del data
        materializer.finish()


def _values(program: Program, tensors: Mapping[str, torch.Tensor]) -> dict[str, Value]:
    """Tensors that the program makes; those on the meta device of which it knows nothing are an error."""
    known = {name: Ref.of(tensor) for name, tensor in tensors.items() if address(tensor) in program.storages}
    _refuse([n for n, t in tensors.items() if t.is_meta and n not in known], "nothing initializes it")
    return dict(known)


def _refuse(names: Sequence[str], why: str) -> None:
    if names:
        raise ValueError(f"{KEY}: {quoted(names, limit=1)} is on the meta device, and {why}: {_BUILD_UNDER_INIT}")


def _note(source: str) -> str:
    return (
        f"the model is on the meta device, so its weights come from {source}, whatever was done to them through .data: "
        f"if you did, {_BUILD_UNDER_INIT}"
    )


def _reset(model: nn.Module) -> None:
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def _versions(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """How often each of those without storage was changed in place."""
    return {name: tensor._version for name, tensor in tensors.items() if tensor.is_meta}


def _refuse_changed(versions: Mapping[str, int], built: Mapping[str, int]) -> None:
    """Refuse what was changed more often than building it changes it: nobody knows how."""
    changed = [name for name, version in versions.items() if version > built.get(name, version)]
    _refuse(changed, "it was changed after it was built, which nothing wrote down")


def _is_transformers(model: nn.Module) -> bool:
    modules = {base.__module__ for base in type(model).__mro__}
    return "transformers.modeling_utils" in modules and hasattr(model, "config")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new tensors are of this dtype unless they say another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def refuse_tensor_parallel(deferred: DeferredModel | None) -> None:
    """Tensor parallelism divides weights that are there.

    Raises:
        ValueError: the model has no storage yet.
    """
    if deferred is not None:
        raise ValueError(
            f"{KEY}: tensor parallelism (tensor_parallel.autotp_size, or an mpu object) cannot divide a model that was "
            "built under sdp_deepspeed.Init or on the meta device: build it on the CPU, with the same seed on every "
            "rank"
        )


def check_deferred_alike(deferred: DeferredModel | None, world: Communicator) -> None:
    """Weights of one rank are broadcast to all, or all make their own; all ranks call it.

    Raises:
        ValueError: on all ranks, naming those whose model has no storage, where others have it.
    """
    without = [rank for rank, is_deferred in enumerate(world.gather_objects(deferred is not None)) if is_deferred]
    if without and len(without) < world.size:
        raise ValueError(
            f"{KEY}: on ranks {listed(without)} the model has no weights yet (sdp_deepspeed.Init, or the meta device), "
            "on the others it has: build it in the same way on every rank, and load weights on all of them"
        )


def check_initialized_alike(check_holders: Callable[[], None]) -> None:
    """Nothing was broadcast: see that nothing had to be; all ranks call it.

    Raises:
        ValueError: on all ranks, naming the first tensors that differ.
    """
    try:
        check_holders()
    except RuntimeError as problem:
        raise ValueError(
            f"{KEY}: ranks did not initialize the model alike ({problem}): inside sdp_deepspeed.Init, or on the meta "
            "device, build the same model from the same config and seed on every rank"
        ) from problem
