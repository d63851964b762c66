"""What is mixed into the bodies of a branch of which a rank holds some neurons or heads.

In the backward regime they run twice, first with the held weights and then with the lacking ones, and the outputs are
added. Where a branch's work is done by several modules of the layer, the first keeps its input for the last, which runs
the lacking ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sdp_deepspeed.architectures.branch import InnerLayers
from sdp_deepspeed.masking.mixins import Copied, Mixin, mix_in
from sdp_deepspeed.masking.outputs import Outputs
from sdp_deepspeed.masking.part import MaskedPart

_WAY = "inside engine.dense(resident=True)"


@dataclass
class Halves:
    """How the bodies of a branch run.

    Args:
        name: of the branch, for messages.
        part: of which they are.
        inner: its neurons or heads.
        outputs: of its body.
        cells: of the held and of the lacking half.
        twins: one body twice, without its tail, or several with the lacking weights; none if the lacking half does not
            run.
        inputs: of the first of several bodies, until the last one runs.
    """

    name: str
    part: MaskedPart | Copied
    inner: InnerLayers
    outputs: Outputs
    cells: tuple[Sequence[int], Sequence[int]] = ((), ())
    twins: tuple[nn.Module, ...] = ()
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def narrowed(self, kwargs: Mapping[str, Any], *, lacking: bool = False) -> dict[str, Any]:
        """Keyword arguments with what they have for the heads of one half."""
        if not self.inner.by_head:  # else a compiler would make a graph for each of what halves there are
            return dict(kwargs)
        return of_heads(kwargs, self.inner.by_head, self.cells[lacking], sum(map(len, self.cells)))

    def leave_out_caches(self, body: nn.Module, kwargs: dict[str, Any]) -> None:
        leave_out_caches(self.inner, self.name, body, kwargs, parts="two parts", way=_WAY)


class _OfHalves(Mixin):
    """A copy has the held neurons or heads."""

    _sdp_part: Halves

    def _sdp_finish(self, copied: nn.Module) -> None:
        super()._sdp_finish(copied)
        if not self._sdp_part.part.dense:
            make_narrow(copied, replace(self._sdp_part, part=Copied(), twins=(), inputs=[]))


class NarrowModule(_OfHalves):
    """Mixed in before a body's own class where it takes or returns more than its own heads know."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        halves = self._sdp_part
        if halves.part.dense:
            return super().forward(*args, **kwargs)
        output = super().forward(*args, **halves.narrowed(kwargs))
        return halves.outputs.around(output[0] if halves.outputs.count > 1 else output, kwargs)


class SplitModule(_OfHalves):
    """Mixed in before a body's own class in the backward regime: first the held neurons or heads, then the lacking."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        halves = self._sdp_part
        if halves.part.dense:
            return super().forward(*args, **kwargs)
        halves.leave_out_caches(self, kwargs)
        outputs = []
        for index, twin in enumerate(halves.twins):
            _train_like(twin, self)
            outputs.append(type(twin).forward(twin, *args, **halves.narrowed(kwargs, lacking=index == 1)))
        held, lacking = outputs
        result = held + lacking if halves.outputs.count == 1 else held[0] + lacking[0]
        for name in halves.inner.tail:
            result = self.get_submodule(name)(result)
        if halves.inner.tail_dropout:
            rate = getattr(self, halves.inner.tail_dropout)
            result = functional.dropout(result, p=rate, training=self.training)
        return halves.outputs.around(result, kwargs)


class FirstModule(NarrowModule):
    """Mixed in before the class of the first of several bodies: keeps its input until the last one runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        halves = self._sdp_part
        if not halves.part.dense:
            halves.leave_out_caches(self, kwargs)
            halves.inputs[:] = [(args, kwargs)]  # a pass that failed may have left its own
        return super().forward(*args, **kwargs)


class LastModule(Mixin):
    """Mixed in before the class of the last of several bodies: runs the lacking ones, and adds their output."""

    _sdp_part: Halves

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        halves = self._sdp_part
        held = super().forward(*args, **kwargs)
        if halves.part.dense:
            return held
        inputs, kwargs = halves.inputs.pop()
        named = halves.narrowed(kwargs, lacking=True)
        output: Any = None
        for twin in halves.twins:
            _train_like(twin, self)
            output = type(twin).forward(twin, *inputs, **named)
            inputs, named = ((output[0] if isinstance(output, tuple) else output),), {}
        return held + output


def make_narrow(body: nn.Module, halves: Halves) -> None:
    """A body that has the held neurons or heads, and needs to know nothing if nothing but its weights is of heads."""
    if halves.inner.by_head or halves.outputs.handed_on:
        mix_in(NarrowModule, body)
        object.__setattr__(body, "_sdp_part", halves)


def _train_like(twin: nn.Module, module: nn.Module) -> None:
    if twin.training != module.training:
        twin.train(module.training)


def of_heads(kwargs: Mapping[str, Any], names: Sequence[str], cells: Sequence[int], num_cells: int) -> dict[str, Any]:
    """Keyword arguments of a body with what those of `names` have for some of its key/value heads.

    Args:
        cells: indices of these heads.
        num_cells: of the dense body.
    """
    result = dict(kwargs)
    for name in names:
        value = result.get(name)
        if isinstance(value, torch.Tensor):
            heads = value.unflatten(1, (num_cells, -1))
            result[name] = torch.cat([heads[:, cell] for cell in cells], dim=1)
    return result


def leave_out_caches(
    inner: InnerLayers, name: str, body: nn.Module, kwargs: dict[str, Any], *, parts: str, way: str
) -> None:
    """Run a body that has several parts without caches of keys and values that are empty.

    Args:
        inner: of the branch `name`.
        kwargs: of the body; changed.
        parts, way: what the body runs in, and how else to generate, for the message.

    Raises:
        RuntimeError: a cache holds tokens, or should hold some.
    """
    for path in inner.caches:
        argument, _, inside = path.partition(".")
        if (cache := kwargs.get(argument)) is not None:
            what = f"{name} runs in {parts}, which have no cache of keys and values"
            _leave_out(
                getattr(cache, inside, cache),
                name,
                getattr(body, "layer_idx", None),
                f"{what}: generate without gradients, or {way}",
            )
            kwargs[argument] = None


def _leave_out(cache: Any, name: str, layer: int | None, refusal: str) -> None:
    missing = cache.__dict__.setdefault("_sdp_missing", set()) if hasattr(cache, "__dict__") else set()
    has_tokens = layer is not None and hasattr(cache, "get_seq_length") and cache.get_seq_length(layer) > 0
    if name in missing or has_tokens:
        raise RuntimeError(refusal)
    missing.add(name)
