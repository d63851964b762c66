"""What a dense view mixes into the classes of a model and of its parts: calls and copies ask the view first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sdp_deepspeed.masking.mixins import Mixin


class Viewed(Mixin):
    """Mixed in before the class of what a view knows, so that copies are of what the view shows."""

    _sdp_view: Any  # a DenseView

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        self._sdp_view.become_resident()
        return super().__deepcopy__(memo)

    def _sdp_finish(self, copied: nn.Module) -> None:
        super()._sdp_finish(copied)
        self._sdp_view.finish_copy(self, copied)


class ViewedModel(Viewed):
    """Mixed in before the model's own class: what streams runs uncompiled, as no compiler sees through collectives."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._sdp_view.is_streaming():
            return super().__call__(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):
            return super().__call__(*args, **kwargs)


class ViewedPart(Viewed):
    """Mixed in before the class of a part's first and last module. A hook has a number: compilers would notice."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._sdp_view.is_streaming():
            return super().__call__(*args, **kwargs)
        self._sdp_view.before(self)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._sdp_view.after(self)
