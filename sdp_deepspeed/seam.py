"""The seam: `deepspeed.initialize` builds our engine when the config has our block, and its own otherwise.

Dispatching in `DeepSpeedEngine.__new__` reaches callers that imported `initialize` before us, and Accelerate,
which calls it itself. Importing this module is cheap; DeepSpeed is patched when it is (or was) imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_HOST = "deepspeed"


def arm() -> None:
    """Patch DeepSpeed now if it is imported, else at the moment when it will be."""
    host = sys.modules.get(_HOST)
    if host is not None and not getattr(getattr(host, "__spec__", None), "_initializing", False):
        _patch()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds `deepspeed` as everybody does, and patches it once its import is complete.

    It stays: others look for a spec without importing (Transformers and Accelerate ask whether DeepSpeed is there).
    """

    _looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _HOST or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _patch()


def _patch() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    if "__new__" not in vars(DeepSpeedEngine):
        DeepSpeedEngine.__new__ = _new


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`DeepSpeedEngine.__new__`: our subclass for configs with our block; an error for near-misses of its name."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    from .config import KEY, parse

    config = kwargs.get("config")
    block = parse(config) if isinstance(config, dict) else None
    if block is None:
        return object.__new__(cls)
    from .engine import SubnetworkEngine

    if cls is DeepSpeedEngine:
        return object.__new__(SubnetworkEngine)
    if not issubclass(cls, SubnetworkEngine):
        raise ValueError(
            f"{KEY}: {cls.__name__} is not supported (pipeline modules and the hybrid engine build their own); give "
            "deepspeed.initialize an ordinary module, or remove the block"
        )
    return object.__new__(cls)
