"""Transformers calls some tensors otherwise in files than in modules: GPT-NeoX's `lm_head` is `embed_out` there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping


class FileNames:
    """Of one class of models.

    Args:
        transforms: Transformers' conversions from files to modules.
    """

    def __init__(self, transforms: Iterable[Any]) -> None:
        self._transforms = list(transforms)

    @classmethod
    def of_model(cls, architecture: str, model_type: str | None) -> FileNames:
        """As Transformers knows them.

        Args:
            architecture: the class's name.
            model_type: of its config.
        """
        transforms = get_checkpoint_conversion_mapping(architecture)
        if transforms is None and model_type is not None:
            transforms = get_checkpoint_conversion_mapping(model_type)
        return cls(transforms or ())

    def to_module(self, stored: Iterable[str]) -> dict[str, str]:
        """Names in files by the names that the module gives them; what only a conversion of values would load keeps
        its name."""
        return {_renamed(name, self._transforms): name for name in sorted(stored)}

    def converted(self, stored: Iterable[str]) -> list[str]:
        """Names in files whose values only a conversion makes a module's (experts that are stored one by one)."""
        return [name for name in sorted(stored) if _is_converted(name, self._transforms)]

    def to_file(self, names: Iterable[str]) -> Mapping[str, str]:
        """Names in files by names in the module.

        Raises:
            ValueError: files have other values than the module (experts that are stored one by one).
        """
        backwards = [transform.reverse_transform() for transform in self._transforms[::-1]]
        result = {}
        for name in names:
            result[name] = _renamed(name, backwards)
            if _is_converted(name, backwards):
                raise ValueError(f"Transformers stores {name!r} converted; export with engine.save_pretrained")
        return result


def _is_converted(name: str, transforms: Iterable[Any]) -> bool:
    return any(hasattr(one, "operations") and one.rename_source_key(name)[1] is not None for one in transforms)


def _renamed(name: str, transforms: Iterable[Any]) -> str:
    for transform in transforms:
        if not hasattr(transform, "operations"):  # those convert values
            name, _ = transform.rename_source_key(name)
    return name
