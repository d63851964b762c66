"""Import hooks: make `deepspeed.initialize` build our engine if the config has our block.

Dispatching in `DeepSpeedEngine.__new__` also works for callers that imported `initialize` earlier, and for Accelerate.
Importing this module is cheap: DeepSpeed is patched when it is imported, or at once if it was imported before.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sdp_deepspeed.engine.trainer_hook import patch_accelerate, patch_trainer

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


def arm() -> None:
    """Patch each library now if it is imported, else when it will be imported."""
    waiting = {}
    patches = {
        "deepspeed": _patch_deepspeed,
        "accelerate.accelerator": patch_accelerate,
        "transformers.trainer": patch_trainer,
    }
    for name, patch in patches.items():
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            patch()
        else:
            waiting[name] = patch
    if waiting and not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(waiting))


class _AfterImport:
    """A meta path finder that patches each library once its import is complete.

    It has no base class, since importing `importlib.abc` takes longer than importing this package.
    """

    def __init__(self, waiting: dict[str, Callable[[], None]]) -> None:
        self._waiting = waiting
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._searching or fullname not in self._waiting:
            return None
        self._searching = True  # the search below calls this finder, too
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        # Looking up a spec does not mean that the library is imported, so patch only when it is executed.
        if spec is not None and spec.loader is not None:
            loader: Any = _PatchingLoader(spec.loader, self._waiting[fullname])
            spec.loader = loader
        return spec


class _PatchingLoader:
    def __init__(self, loader: Any, patch: Callable[[], None]) -> None:
        self._loader = loader
        self._patch = patch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch()


def _patch_deepspeed() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    _do_not_build_shm()
    if "__new__" not in vars(DeepSpeedEngine):
        DeepSpeedEngine.__new__ = _new


def _do_not_build_shm() -> None:
    """Do not load DeepSpeed's all-reduce for inference on CPUs, which would be compiled in every environment and take
    66 MiB of shared memory per rank; Gloo's is used in its place."""
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute it is PyTorch
    backend.build_shm_op = lambda: None


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`DeepSpeedEngine.__new__`: create our subclass for configs with our block. Raises ValueError for keys with a
    similar name, and for masked models without the block."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    from sdp_deepspeed.engine.compare_configs import parse_and_compare
    from sdp_deepspeed.engine.earlier_engines import refuse_masked
    from sdp_deepspeed.engine.engine import SubnetworkEngine
    from sdp_deepspeed.messages import KEY

    block = parse_and_compare(kwargs.get("config"), kwargs)
    if block is None:
        model = kwargs.get("model", args[1] if len(args) > 1 else None)
        if model is not None:
            refuse_masked(model)
        return object.__new__(cls)
    ours: type = SubnetworkEngine
    if block.local_steps is not None:
        from sdp_deepspeed.engine.team_engine import TeamEngine

        ours = TeamEngine
    if cls is not DeepSpeedEngine and not issubclass(cls, ours):
        raise ValueError(
            f"{KEY}: {cls.__name__} is not supported (pipeline modules, hybrid engine); pass an "
            "ordinary module, or remove the block"
        )
    engine = object.__new__(ours if cls is DeepSpeedEngine else cls)
    object.__setattr__(engine, "block", block)
    return engine
