"""Models that are nothing but tensors, cut at random, for tests of `parallel`: a mask, a loss, a reference."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from sdp_deepspeed.units import Piece

Holders = tuple[int, ...]
Pieces = dict[str, list[tuple[Piece, Holders]]]
Regime = Literal["forward", "backward"]
Strategy = Literal["block", "neuron"]


@dataclass(frozen=True)
class SlicedModel:
    """Dense tensors and who holds which pieces of them.

    Args:
        groups: index of each tensor's param group.
        used_twice: a tensor that the loss uses first and last.
        missing: (name, rank, micro-step) without a gradient.
    """

    shapes: dict[str, torch.Size]
    pieces: Pieces
    groups: dict[str, int]
    used_twice: str | None = None
    missing: Collection[tuple[str, int, int]] = field(default_factory=frozenset)

    @property
    def holder_sets(self) -> set[Holders]:
        return {holders for found in self.pieces.values() for _, holders in found}

    def dense(self) -> dict[str, torch.Tensor]:
        """Initial weights."""
        return {name: _noise(shape, name) for name, shape in self.shapes.items()}


def sliced_model(size: int, strategy: Strategy, *, num_layers: int = 3) -> SlicedModel:
    """Layers between shared tensors, for `size` ranks: blocks held whole, or matrices cut along their rows and columns.
    Each unit has one holder fewer than there are ranks."""
    p = max(1, size - 1)
    model = SlicedModel({}, {}, {}, used_twice="embed", missing={("layer1.up", 0, 0), ("layer1.up", 1, 0)})

    def add(name: str, shape: tuple[int, ...], group: int, cut: Sequence[tuple[Piece, Holders]]) -> None:
        model.shapes[name], model.groups[name] = torch.Size(shape), group
        whole = Piece(name, None, 0, model.shapes[name].numel())
        model.pieces[name] = list(cut) or [(whole, tuple(range(size)))]

    add("embed", (7, 3), 0, ())
    for layer in range(num_layers):
        name = f"layer{layer}"
        add(f"{name}.norm", (3,), 1, ())
        translates = [tuple(sorted((layer + i + j) % size for j in range(p))) for i in range(size)]
        for suffix, shape, dim in (("up", (2 * size, 3), 0), ("bias", (2 * size,), 0), ("down", (3, 2 * size), 1)):
            tensor = f"{name}.{suffix}"
            pieces = [(Piece(tensor, dim, 2 * i, 2), holders) for i, holders in enumerate(translates)]
            block = [(Piece(tensor, None, 0, torch.Size(shape).numel()), translates[0])]
            add(tensor, shape, int(suffix == "bias"), pieces if strategy == "neuron" else block)
    add("scale", (), 1, ())
    add("head", (5, 3), 0, ())
    return model


def random_model(size: int, seed: int) -> SlicedModel:
    """Any plan: each tensor is shared, one rank set's, or cut into slices of random widths with random holders."""
    draw = random.Random(seed)
    sets = [tuple(sorted(draw.sample(range(size), draw.randint(1, size)))) for _ in range(draw.randint(1, 4))]
    model = SlicedModel({}, {}, {}, missing=set())
    for index in range(draw.randint(1, 12)):
        name, shape = f"t{index}", torch.Size((draw.randint(1, 6), draw.randint(1, 6)))
        model.shapes[name], model.groups[name] = shape, draw.randrange(2)
        dim = draw.choice((None, 0, 1))
        if dim is None:
            holders = draw.choice((*sets, tuple(range(size))))
            model.pieces[name] = [(Piece(name, None, 0, shape.numel()), holders)]
            continue
        cuts = sorted({0, shape[dim], *(draw.randint(0, shape[dim]) for _ in range(2))})
        ranges = itertools.pairwise(cuts)
        # every rank holds a part of a cut tensor
        found = [(Piece(name, dim, start, end - start), draw.choice(sets)) for start, end in ranges]
        found[0] = (found[0][0], tuple(range(size)))
        model.pieces[name] = found
    for name in model.shapes:
        for rank in range(size):
            if draw.random() < 0.1:
                model.missing.add((name, rank, 0))  # type: ignore[attr-defined]
    return model


class SlicedMask:
    """What `parallel` uses of a mask: stored tensors, held slices of a cut one first."""

    is_applied = True

    def __init__(self, model: SlicedModel, rank: int, regime: Regime, dtype: torch.dtype) -> None:
        self.model, self.rank, self.shapes, self.pieces = model, rank, model.shapes, model.pieces
        self.parameters = {name: nn.Parameter(dense) for name, dense in model.dense().items()}
        self._where: dict[Piece, tuple[torch.Tensor, int]] = {}
        for name, dense in model.dense().items():
            held = [piece for piece, holders in self.pieces[name] if rank in holders]
            other = [piece for piece, holders in self.pieces[name] if rank not in holders]
            is_cut = self.pieces[name][0][0].dim is not None
            stored = _joined(held, dense) if is_cut else dense if held or regime == "backward" else dense.new_empty(0)
            self.parameters[name].data = stored.to(dtype, copy=True)
            self.parameters[name].requires_grad_(bool(held))
            self._place(held if is_cut or held else other, self.parameters[name])
            if is_cut and regime == "backward" and other:
                self._place(other, _joined(other, dense).to(dtype))

    def _place(self, pieces: Sequence[Piece], tensor: torch.Tensor) -> None:
        start = 0
        for piece in pieces if tensor.numel() else ():
            self._where[piece] = (tensor, start)
            start += piece.length

    def is_stored(self, piece: Piece) -> bool:
        return piece in self._where

    def view(self, piece: Piece, of: torch.Tensor | None = None) -> torch.Tensor:
        tensor, start = self._where[piece]
        tensor = tensor.detach() if of is None else of
        return tensor if piece.dim is None else tensor.narrow(piece.dim, start, piece.length)

    def loss(self, micro_step: int, step: int = 0) -> torch.Tensor:
        """This rank's, of the slices that it holds; `reference_gradients` has the same for the dense model."""
        used = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        twice = self.model.used_twice
        total = torch.zeros((), requires_grad=True)
        for name in [*used, *([twice] if twice in used else [])]:
            if (name, self.rank, micro_step) in self.model.missing:
                continue
            draws = []
            for dense in _draws(self.model.shapes[name], name, self.rank, micro_step, step):
                held = [piece for piece, holders in self.pieces[name] if self.rank in holders]
                draws.append(_joined(held, dense) if held[0].dim is not None else dense)
            total = _add_term(total, self.parameters[name], *draws)
        return total


def _joined(pieces: Sequence[Piece], dense: torch.Tensor) -> torch.Tensor:
    return torch.cat([piece.narrow(dense) for piece in pieces], pieces[0].dim or 0) if pieces else dense.new_empty(0)


def _noise(shape: Sequence[int], *key: Any) -> torch.Tensor:
    return torch.randn(torch.Size(shape), generator=torch.Generator().manual_seed(zlib.crc32(repr(key).encode())))


def _draws(shape: Sequence[int], *key: Any) -> list[torch.Tensor]:
    return [_noise(shape, part, *key) for part in range(2)]


def _add_term(total: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An elementwise function's sum, so that a slice has the gradient that it has in the dense tensor, a + 0.4 b x."""
    a, b = a.to(x.dtype), b.to(x.dtype)
    return total + (a * x + 0.2 * b * x * x).sum().float()


class Reference:
    """Literal, in one process: each rank's dense gradients, each piece's mean over its holders, `torch.optim`."""

    def __init__(self, model: SlicedModel, size: int, make: Any, dtype: torch.dtype, clip: float) -> None:
        self.model, self.size, self.dtype, self.clip = model, size, dtype, clip
        self.masters = {name: nn.Parameter(dense.to(dtype).float()) for name, dense in model.dense().items()}
        self.optimizer = make(param_groups(model, self.masters))
        self.norm = 0.0

    def step(self, num_micro_steps: int, step: int) -> None:
        means = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        for rank in range(self.size):
            gradients = self.gradients(rank, num_micro_steps, step)
            for name, found in self.model.pieces.items():
                for piece, holders in found:
                    if rank in holders:
                        piece.narrow(means[name]).add_(piece.narrow(gradients[name]) / len(holders))
        for name, mean in means.items():
            self.masters[name].grad = mean
        self.norm = float(torch.stack([mean.double().square().sum() for mean in means.values()]).sum().sqrt())
        if self.clip and self.norm > self.clip:
            for mean in means.values():
                mean.mul_(self.clip / (self.norm + 1e-6))
        self.optimizer.step()

    def gradients(self, rank: int, num_micro_steps: int, step: int) -> Mapping[str, torch.Tensor]:
        """Sums over micro-steps, as if the rank held everything."""
        sums = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        for micro_step in range(num_micro_steps):
            for name, master in self.masters.items():
                if (name, rank, micro_step) in self.model.missing:
                    continue
                x, uses = master.detach().to(self.dtype).float(), 2 if name == self.model.used_twice else 1
                a, b = _draws(self.model.shapes[name], name, rank, micro_step, step)
                sums[name] += uses * (a + 0.4 * b * x)
        return sums

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """In the dtype of the model."""
        for name, master in self.masters.items():
            yield name, master.detach().to(self.dtype)


def param_groups(model: SlicedModel, parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Two, with different learning rates and weight decays."""
    of_group: list[list[nn.Parameter]] = [[], []]
    for name, index in model.groups.items():
        of_group[index].append(parameters[name])
    return [{"params": of_group[0]}, {"params": of_group[1], "lr": 0.03, "weight_decay": 0.0}]
