"""One rank's subnetwork of a module: a plan applied to it in place, and undone."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sdp_deepspeed.architectures import LocatedBranch, locate_branches
from sdp_deepspeed.masking.check import blocks_of_units, check_plan, refuse_cache
from sdp_deepspeed.masking.experts import check_experts, router_refusal
from sdp_deepspeed.masking.forwards import restore_forward, set_data
from sdp_deepspeed.masking.lacking_blocks import skip_branch
from sdp_deepspeed.masking.narrow_layers import Sizes, select_heads
from sdp_deepspeed.masking.split_layers import FrozenPart, Ranges, set_sizes, split_layer
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, dense_tensors, pieces_by_tensor
from sdp_deepspeed.units import Piece

Holders = tuple[int, ...]
Pieces = list[tuple[Piece, Holders]]


class Mask:
    """One rank's subnetwork of a module. Every rank makes one, of the same plan.

    After `apply` the module tree, the names and the Parameter objects are those of the dense model. What the rank lacks
    has no storage (forward regime) or is frozen (backward regime). A cut parameter has the held slices only, side by
    side in dense order; its gradient too.

    Args:
        model: whole, on its final device.
        plan: whose pieces are of this model's tensors (of a tensor-parallel rank's, where it has parts).
        rank: data-parallel.
        branches: residual branches, as a tensor-parallel rank has them. Default: those that the model has.

    Attributes:
        parameters, buffers: of the model, by dense name.
        pieces: by dense name of each parameter, the slices that make it up, each with the ranks that hold it: all ranks
            where it is shared.
        buffer_pieces: the same of buffers.
        shapes: dense, by name of each parameter and buffer.
        trainable: by name, whether the parameter required a gradient before masking.

    Raises:
        ValueError: the plan does not fit the model, or the model has what cannot be masked.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, rank: int, *, branches: Sequence[LocatedBranch] | None = None
    ) -> None:
        if "_sdp_masked" in vars(model):
            raise RuntimeError("the model is masked already: undo its mask, or take a new model")
        self.model, self.plan, self.rank = model, plan, rank
        self.branches = locate_branches(model) if branches is None else branches
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.buffers: dict[str, torch.Tensor] = dict(model.named_buffers())
        tensors: dict[str, torch.Tensor] = {**self.parameters, **self.buffers}
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.trainable = {name: parameter.requires_grad for name, parameter in self.parameters.items()}
        buffers = [TensorInfo(n, tuple(b.shape), b.dtype, kind="buffer") for n, b in self.buffers.items()]
        divided = pieces_by_tensor([*dense_tensors(model), *buffers], plan)
        self.pieces: dict[str, Pieces] = {name: divided["parameter", name] for name in self.parameters}
        self.buffer_pieces: dict[str, Pieces] = {name: divided["buffer", name] for name in self.buffers}
        self._held = {
            piece
            for pieces in itertools.chain(self.pieces.values(), self.buffer_pieces.values())
            for piece, holders in pieces
            if rank in holders
        }
        check_plan(model, plan, self.branches)
        check_experts(model, plan, self.branches)
        self._router_refusal = router_refusal(model, plan, self.branches)
        self._strides = {name: tensor.stride() for name, tensor in tensors.items()}
        self._reshaped: list[str] = []  # names of parameters and buffers that are not as in the dense model
        self._where: dict[Piece, tuple[torch.Tensor, int]] = {}
        self._masked: list[nn.Module] = []  # with another forward
        self._sizes: list[Sizes] = []
        self._gradients: dict[str, torch.Tensor] = {}  # put aside while the module is dense
        self._hooks: list[RemovableHandle] = []
        self._locate_whole()
        self.is_applied = False

    # ---- where pieces are ---------------------------------------------------------------------------------------

    def is_held(self, piece: Piece) -> bool:
        """Whether this rank's subnetwork has the piece."""
        return piece in self._held

    def trained(self, piece: Piece) -> bool:
        """Whether this rank computes a gradient for the piece."""
        return piece.kind == "parameter" and self.trainable[piece.parameter] and self.is_held(piece)

    def stored(self, piece: Piece) -> bool:
        """Whether this rank has the piece's values now: what it holds; in the backward regime and when dense, all."""
        return piece in self._where

    def view(self, piece: Piece, of: torch.Tensor | None = None) -> torch.Tensor:
        """A stored piece in the weights, detached, or in a tensor laid out like its parameter (the gradient)."""
        tensor, start = self._where[piece]
        if of is not None:
            assert self.is_held(piece), "what is frozen has no gradient"
            tensor = of
        return tensor.detach() if piece.dim is None else tensor.detach().narrow(piece.dim, start, piece.length)

    def joined(self, name: str) -> torch.Tensor:
        """A copy of the dense tensor, of which this rank has all pieces (backward regime)."""
        dense = self._tensor(name).detach().new_empty(self.shapes[name])
        for piece, _ in self.pieces_of(name):
            piece.narrow(dense).copy_(self.view(piece))
        return dense

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers, and what layers that are split have beside them."""
        frozen = [tensor for module in self._masked for tensor in getattr(module._sdp_state, "frozen", {}).values()]
        rest = [tensor for tensor, _ in self._where.values()]
        every = (*self.parameters.values(), *self.buffers.values(), *frozen, *rest)
        return list({id(tensor): tensor for tensor in every}.values())

    def _locate_whole(self) -> None:
        """Every piece where it lies in the dense model."""
        for name in self.shapes:
            self._where |= {piece: (self._tensor(name), piece.start) for piece, _ in self.pieces_of(name)}

    def _tensor(self, name: str) -> torch.Tensor:
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def pieces_of(self, name: str) -> Pieces:
        return self.pieces[name] if name in self.pieces else self.buffer_pieces[name]

    # ---- apply and undo -----------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self) -> None:
        """Cut the dense module down to this rank's subnetwork, in place."""
        if self.is_applied:
            raise RuntimeError("the mask is applied already; undo it first")
        if self.plan.regime == "forward":
            self._apply_forward()
        else:
            self._apply_backward()
        for name, gradient in self._gradients.items():
            self.parameters[name].grad = gradient
        self._gradients.clear()
        for module in self.model.modules() if not self.plan.is_whole else ():
            vars(module)["_sdp_masked"] = True
        self.is_applied = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def undo(self) -> None:
        """Give the dense module back: tensors of dense shape with the values that this rank stores, and zeros where it
        has none. The caller writes those into `view(piece)`. Gradients of cut parameters are put aside until `apply`.
        """
        if not self.is_applied:
            raise RuntimeError("the mask is not applied")
        for module in self._masked:
            restore_forward(module)
        for name in self._reshaped:
            tensor = self._tensor(name)
            dense = torch.empty_strided(
                self.shapes[name], self._strides[name], dtype=tensor.dtype, device=tensor.device
            ).zero_()
            for piece, _ in self.pieces_of(name):
                if self.stored(piece):
                    piece.narrow(dense).copy_(self.view(piece))
            if tensor.grad is not None:
                self._gradients[name] = tensor.grad
            set_data(tensor, dense)
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(self.trainable[name])
        self._locate_whole()
        for module in self._masked:
            set_sizes(module)
        for sizes in self._sizes:
            sizes.set(1, 1)
        for hook in self._hooks:
            hook.remove()
        self._masked, self._sizes, self._hooks, self._reshaped = [], [], [], []
        for module in self.model.modules():
            vars(module).pop("_sdp_masked", None)
        self.is_applied = False

    # ---- the two regimes ----------------------------------------------------------------------------------------

    def _apply_forward(self) -> None:
        cut = self._cut_branches()
        self._sizes = [Sizes.of(self.model, branch) for branch in cut]
        lacking = [
            branch
            for index, branches in blocks_of_units(self.plan, self.branches).items()
            if not self.plan.holds_rank(index, self.rank)
            for branch in branches
        ]
        for branch in lacking:
            self._masked += skip_branch(self.model, branch)
        of_layers = {name for branch in lacking for name in branch.parameters}
        for name in self.shapes:
            self._narrow(name, is_multiplied=name in of_layers)
        for branch, sizes in zip(cut, self._sizes, strict=True):
            heads = self._held_cells(branch)
            sizes.set(len(heads), branch.num_cells)
            assert branch.description.inner is not None
            if branch.description.inner.by_head or branch.description.handed_on:
                body = self.model.get_submodule(branch.bodies[0])
                select_heads(body, branch, heads)
                self._masked.append(body)
        if not self.plan.is_whole:
            for check in (refuse_cache, self._router_refusal):
                if check is not None:
                    self._hooks.append(self.model.register_forward_pre_hook(check, with_kwargs=True))

    def _narrow(self, name: str, *, is_multiplied: bool) -> None:
        """Keep of a tensor what this rank holds.

        Args:
            is_multiplied: by the layer itself, also where it is lacking: one zero is read as all of it.
        """
        tensor, pieces = self._tensor(name), [piece for piece, _ in self.pieces_of(name)]
        held = [piece for piece in pieces if self.is_held(piece)]
        if held == pieces:
            return
        for piece in pieces:
            del self._where[piece]
        if held:
            self._put(held, tensor, side_by_side(held, tensor))
            self._reshaped.append(name)
            return
        zeros = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        set_data(tensor, zeros.expand(self.shapes[name]) if is_multiplied else zeros.new_empty(0))
        tensor.requires_grad_(False)
        self._reshaped.append(name)

    def _apply_backward(self) -> None:
        """Weights of lacking units are frozen; layers that are cut are split. Buffers stay as they are: every rank runs
        everything."""
        parts: dict[str, dict[str, FrozenPart]] = defaultdict(dict)
        for name, pieces in self.pieces.items():
            held = [piece for piece, _ in pieces if self.is_held(piece)]
            frozen = [piece for piece, _ in pieces if not self.is_held(piece)]
            if not frozen:
                continue
            parameter, dim = self.parameters[name], frozen[0].dim
            if dim is None:
                parameter.requires_grad_(False)
                continue
            rest = side_by_side(frozen, parameter)
            self._put(held, parameter, side_by_side(held, parameter))
            self._put(frozen, rest)
            self._reshaped.append(name)
            owner, _, own_name = name.rpartition(".")
            ranges = Ranges(tuple(p.length for p, _ in pieces), tuple(int(not self.is_held(p)) for p, _ in pieces))
            parts[owner][own_name] = FrozenPart(rest, dim, ranges.merged())
        outputs = self.output_biases()
        for branch in self._cut_branches():
            assert branch.description.inner is not None
            owners = dict.fromkeys(tensor.parameter.rpartition(".")[0] for tensor in branch.cut_tensors)
            for owner in (owner for owner in owners if owner in parts):
                bias, is_sum = outputs.get(owner, ("", False))
                module = self.model.get_submodule(owner)
                compact = branch.description.inner.heads is None  # attention itself keeps its output
                split_layer(module, parts[owner], bias, sums=is_sum, compact=compact)
                self._masked.append(module)

    def output_biases(self) -> dict[str, tuple[str, bool]]:
        """By dense name of a module with an output projection, the name of its bias; and whether the projection is a
        parameter of it (experts), so that the module's output is a sum over what is cut."""
        found = {}
        for branch in self.branches:
            for tensor in branch.cut_tensors:
                if tensor.cut.is_output:
                    owner, _, name = tensor.parameter.rpartition(".")
                    is_parameter = tensor.cut.module.rpartition(".")[2] == name
                    found[owner] = (f"{name}_bias" if is_parameter else "bias", is_parameter)
        return found

    def _put(self, pieces: Sequence[Piece], tensor: torch.Tensor, data: torch.Tensor | None = None) -> None:
        if data is not None:
            set_data(tensor, data)
        start = 0
        for piece in pieces:
            self._where[piece] = (tensor, start)
            start += piece.length

    def _cut_branches(self) -> list[LocatedBranch]:
        """Those whose cells do not all have the same holders as everything."""
        cut = {name for name, pieces in self.pieces.items() if pieces[0][0].dim is not None}
        return [b for b in self.branches if any(tensor.parameter in cut for tensor in b.cut_tensors)]

    def _held_cells(self, branch: LocatedBranch) -> list[int]:
        """Neurons or heads of a branch that this rank has."""
        output = next(tensor for tensor in branch.cut_tensors if tensor.cut.is_output)
        width = output.size // branch.num_cells
        return [
            cell
            for piece, _ in self.pieces[output.parameter]
            if self.is_held(piece)
            for cell in range(piece.start // width, (piece.start + piece.length) // width)
        ]


def side_by_side(pieces: Sequence[Piece], dense: torch.Tensor) -> torch.Tensor:
    """A copy of pieces of one tensor along the dim that they cut."""
    dim = pieces[0].dim
    assert dim is not None
    return torch.cat([piece.narrow(dense.detach()) for piece in pieces], dim)
