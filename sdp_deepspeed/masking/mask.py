"""`Mask`: turn a module into one rank's subnetwork in place, and back."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.masking.absent_blocks import skip_branch
from sdp_deepspeed.masking.check import check_plan, refuse_cache
from sdp_deepspeed.masking.experts import check_experts, router_refusal
from sdp_deepspeed.masking.forwards import restore_forward
from sdp_deepspeed.masking.head_arguments import select_heads
from sdp_deepspeed.masking.scale import coverage_of_branches, scale_block, scale_outputs
from sdp_deepspeed.masking.size_attributes import Sizes
from sdp_deepspeed.masking.split_layers import ParameterSplit, Ranges, parent_in_branch, set_sizes, split_layer
from sdp_deepspeed.masking.tensor_data import set_data
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import blocks_of_units
from sdp_deepspeed.plan.tensors import PiecesOfTensor, TensorInfo, dense_tensors, pieces_by_tensor
from sdp_deepspeed.units import Piece

# Attribute of the modules of a masked model, and of their copies: dense names of partial tensors, by their name there.
_MASKED = "_sdp_masked"


class Mask:
    """One rank's subnetwork of a module. All ranks create one from the same plan.

    `apply` keeps the module tree, the names and the Parameter objects of the dense model. Absent tensors have no
    storage (forward regime) or are frozen (backward regime). A cut parameter, and its gradient, consist of the held
    slices, concatenated in dense order.

    Args:
        model: whole, on its final device.
        plan: plan in coordinates of this model's tensors; with tensor parallelism, in those of this rank.
        rank: data-parallel index.
        branches: residual branches of the model, with what the strategy cuts; with tensor parallelism as on this rank.
        is_scaled: whether a subnetwork multiplies what its units add by 1 / C (`branch_scale`).

    Attributes:
        parameters, buffers: parameters and buffers of the model, by dense name.
        batch_norms: dense names of batch norms; modules may be wrapped later.
        pieces: slices of each parameter with the ranks that hold them, by dense name. Shared ones have all ranks.
        buffer_pieces: the same for buffers.
        shapes: dense shapes of parameters and buffers, by name.
        trainable: whether a parameter required a gradient before masking, by name.
        scaled: coverage of each branch that is multiplied by its inverse, by name of the branch.

    Raises:
        ValueError: the plan does not fit the model, or the model cannot be masked.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        rank: int,
        branches: Sequence[LocatedBranch],
        *,
        is_scaled: bool = False,
    ) -> None:
        if is_masked(model):
            raise RuntimeError("the model is masked already; undo its mask, or use a new model")
        self.model, self.plan, self.rank, self.branches = model, plan, rank, branches
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.buffers: dict[str, torch.Tensor] = dict(model.named_buffers())
        tensors: dict[str, torch.Tensor] = {**self.parameters, **self.buffers}
        self.batch_norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.trainable = {name: parameter.requires_grad for name, parameter in self.parameters.items()}
        buffers = [TensorInfo(n, tuple(b.shape), b.dtype, kind="buffer") for n, b in self.buffers.items()]
        divided = pieces_by_tensor([*dense_tensors(model), *buffers], plan)
        self.pieces: dict[str, PiecesOfTensor] = {name: divided[name] for name in self.parameters}
        self.buffer_pieces: dict[str, PiecesOfTensor] = {name: divided[name] for name in self.buffers}
        self._held = {
            piece
            for pieces in itertools.chain(self.pieces.values(), self.buffer_pieces.values())
            for piece, holders in pieces
            if rank in holders
        }
        check_plan(model, plan, self.branches)
        check_experts(model, plan, self.branches)
        is_scaled = is_scaled and plan.regime == "forward"
        self.scaled = coverage_of_branches(plan, self.branches) if is_scaled else {}
        self._router_refusal = router_refusal(model, plan, self.branches)
        self._strides = {name: tensor.stride() for name, tensor in tensors.items()}
        self._reshaped: dict[str, torch.Size] = {}  # new shapes of parameters and buffers whose shapes have changed
        self._where: dict[Piece, tuple[torch.Tensor, int]] = {}
        self._masked: list[nn.Module] = []  # modules with a replaced forward
        self._sizes: list[Sizes] = []
        self._gradients: dict[str, torch.Tensor] = {}  # kept while the module is dense
        self._frozen_later: list[str] = []  # by the user, after the mask was made; trainable while the module is dense
        self._hooks: list[RemovableHandle] = []
        self._partial = self._partial_tensors()
        self._locate_whole()
        self.is_applied = False

    # ---- where pieces are ---------------------------------------------------------------------------------------

    def is_held(self, piece: Piece) -> bool:
        """Whether this rank's subnetwork contains the piece."""
        return piece in self._held

    def is_trained(self, piece: Piece) -> bool:
        """Whether this rank computes a gradient for the piece."""
        return piece.kind == "parameter" and self.trainable[piece.parameter] and self.is_held(piece)

    def is_stored(self, piece: Piece) -> bool:
        """Whether this rank currently stores the piece: held pieces; in the backward regime and when dense, all."""
        return piece in self._where

    def held_pieces(self, name: str) -> list[Piece]:
        """Pieces of a dense tensor that this rank's subnetwork contains."""
        return [piece for piece, _ in self.pieces_of(name) if self.is_held(piece)]

    def stored_pieces(self, name: str) -> list[Piece]:
        """Pieces of a dense tensor that this rank currently stores."""
        return [piece for piece, _ in self.pieces_of(name) if self.is_stored(piece)]

    def is_partial(self, name: str) -> bool:
        """Whether the masked module of some rank has a parameter or buffer in part, or not at all."""
        pieces = self.pieces_of(name)
        if self.plan.regime == "backward" and pieces[0][0].dim is None:
            return False  # all ranks store it
        return any(len(holders) < self.plan.num_ranks for _, holders in pieces)

    def view(self, piece: Piece, of: torch.Tensor | None = None) -> torch.Tensor:
        """Detached view of a stored piece in the weights, or in a tensor `of` the same layout (the gradient)."""
        tensor, start = self._where[piece]
        if of is not None:
            assert self.is_held(piece), "frozen slices have no gradient"
            tensor = of
        return tensor.detach() if piece.dim is None else tensor.detach().narrow(piece.dim, start, piece.length)

    def view_in(self, piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
        """View of a stored piece in the current tensor of its name, whole or reduced, which may have been replaced."""
        if tensor.shape == self.shapes[piece.parameter]:
            view: torch.Tensor = piece.narrow(tensor.detach())
            return view
        return self.view(piece, tensor) if self.is_held(piece) else self.view(piece)

    def joined(self, name: str) -> torch.Tensor:
        """A copy of the dense tensor, if this rank stores all pieces (backward regime)."""
        dense = self._tensor(name).detach().new_empty(self.shapes[name])
        for piece, _ in self.pieces_of(name):
            piece.narrow(dense).copy_(self.view(piece))
        return dense

    def _partial_tensors(self) -> dict[nn.Module, dict[str, str]]:
        names: dict[nn.Module, dict[str, str]] = {}
        for name in filter(self.is_partial, self.shapes):
            module_path, _, attribute = name.rpartition(".")
            names.setdefault(self.model.get_submodule(module_path), {})[attribute] = name
        return names

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers, and the frozen parts of split layers."""
        stored = [tensor for tensor, _ in self._where.values()]
        every = (*self.parameters.values(), *self.buffers.values(), *stored)
        return list({id(tensor): tensor for tensor in every}.values())

    def _locate_whole(self) -> None:
        """Record the locations of all pieces in the dense model."""
        for name in self.shapes:
            self._where |= {piece: (self._tensor(name), piece.start) for piece, _ in self.pieces_of(name)}

    def _tensor(self, name: str) -> torch.Tensor:
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def pieces_of(self, name: str) -> PiecesOfTensor:
        return self.pieces[name] if name in self.pieces else self.buffer_pieces[name]

    def check_shapes(self) -> None:
        """Raise RuntimeError if a parameter, or a buffer of a unit, no longer has the shape that the module needs: that
        of the subnetwork, or the dense one."""
        for name in {**self.parameters, **self._reshaped}:
            expected, current = self._reshaped.get(name, self.shapes[name]), self._tensor(name).shape
            if current != expected:
                raise RuntimeError(
                    f"{name!r}: its data was replaced by {tuple(current)}, expected {tuple(expected)}; resize before "
                    "deepspeed.initialize, and assign weights inside `with engine.dense():`"
                )

    # ---- apply and undo -----------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self) -> None:
        """Reduce the dense module to this rank's subnetwork, in place."""
        if self.is_applied:
            raise RuntimeError("the mask is applied already; undo it first")
        if self.plan.regime == "forward":
            self._apply_forward()
        else:
            self._apply_backward()
        for name, gradient in self._gradients.items():
            self.parameters[name].grad = gradient
        self._gradients.clear()
        for name in self._frozen_later:
            self.parameters[name].requires_grad_(False)
        if not self.plan.is_dense:
            for module in self.model.modules():
                vars(module)[_MASKED] = self._partial.get(module, {})
        self.is_applied = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def undo(self) -> None:
        """Restore the dense module, with the values that this rank stores and zeros elsewhere. The caller replaces the
        zeros through `view(piece)`. Gradients of cut parameters are kept until `apply`."""
        if not self.is_applied:
            raise RuntimeError("the mask is not applied")
        for module in self._masked:
            restore_forward(module)
        for name in self._reshaped:
            tensor = self._tensor(name)
            dense = torch.empty_strided(
                self.shapes[name], self._strides[name], dtype=tensor.dtype, device=tensor.device
            ).zero_()
            for piece in self.stored_pieces(name):
                piece.narrow(dense).copy_(self.view(piece))
            if tensor.grad is not None:
                self._gradients[name] = tensor.grad
            set_data(tensor, dense)
        held = {piece.parameter for piece in self._held}
        frozen = [name for name, p in self.parameters.items() if self.trainable[name] and not p.requires_grad]
        self._frozen_later = [name for name in frozen if name in held]
        for name in frozen:
            self.parameters[name].requires_grad_(True)
        self._locate_whole()
        for module in self._masked:
            set_sizes(module)
        for sizes in self._sizes:
            sizes.set(1, 1)
        for hook in self._hooks:
            hook.remove()
        self._masked, self._sizes, self._hooks, self._reshaped = [], [], [], {}
        for module in self.model.modules():
            vars(module).pop(_MASKED, None)
        self.is_applied = False

    # ---- the two regimes ----------------------------------------------------------------------------------------

    def _apply_forward(self) -> None:
        cut = self._cut_branches()
        self._sizes = [Sizes.of(self.model, branch) for branch in cut]
        absent = []
        for index, branches in blocks_of_units(self.plan, self.branches).items():
            for branch in branches:
                if not self.plan.holds_rank(index, self.rank):
                    absent.append(branch)
                    self._masked += skip_branch(self.model, branch)
                elif coverage := self.scaled.get(branch.name):
                    self._masked.append(scale_block(self.model, branch, coverage))
        of_layers = {name for branch in absent for name in branch.parameters}
        for name in self.shapes:
            self._narrow(name, is_multiplied=name in of_layers)
        biases = self.output_biases() if self.scaled else {}
        for branch, sizes in zip(cut, self._sizes, strict=True):
            heads = self._held_cells(branch)
            sizes.set(len(heads), branch.num_cells)
            assert branch.description.inner is not None
            if branch.description.inner.by_head or branch.description.extra_outputs:
                body = self.model.get_submodule(branch.bodies[0])
                select_heads(body, branch, heads)
                self._masked.append(body)
            if coverage := self.scaled.get(branch.name):
                self._masked += scale_outputs(self.model, branch, coverage, biases)
        if not self.plan.is_dense:
            for check in (refuse_cache, self._router_refusal):
                if check is not None:
                    self._hooks.append(self.model.register_forward_pre_hook(check, with_kwargs=True))

    def _narrow(self, name: str, *, is_multiplied: bool) -> None:
        """Reduce a tensor to the slices that this rank holds.

        Args:
            is_multiplied: whether the layer itself uses the tensor, even if this rank lacks it. It is then one expanded
                zero.
        """
        tensor = self._tensor(name)
        pieces = [piece for piece, _ in self.pieces_of(name)]
        held = self.held_pieces(name)
        if held == pieces:
            return
        for piece in pieces:
            del self._where[piece]
        if held:
            self._put(held, tensor, concatenate(held, tensor))
            self._reshaped[name] = tensor.shape
            return
        zeros = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        set_data(tensor, zeros.expand(self.shapes[name]) if is_multiplied else zeros.new_empty(0))
        tensor.requires_grad_(False)
        self._reshaped[name] = tensor.shape

    def _apply_backward(self) -> None:
        """Freeze the weights of units that this rank lacks, and split cut layers. Buffers are unchanged, since every
        rank runs the whole model."""
        cuts: dict[str, dict[str, ParameterSplit]] = defaultdict(dict)  # by name of the module and of its parameter
        rests: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)  # frozen slices
        for name, pieces in self.pieces.items():
            held = self.held_pieces(name)
            frozen = [piece for piece, _ in pieces if not self.is_held(piece)]
            if not frozen:
                continue
            parameter, dim = self.parameters[name], frozen[0].dim
            if dim is None:
                parameter.requires_grad_(False)
                continue
            rest = concatenate(frozen, parameter)
            self._put(held, parameter, concatenate(held, parameter))
            self._put(frozen, rest)
            self._reshaped[name] = parameter.shape
            module_path, _, attribute = name.rpartition(".")
            ranges = Ranges(tuple(p.length for p, _ in pieces), tuple(int(not self.is_held(p)) for p, _ in pieces))
            cuts[module_path][attribute] = ParameterSplit(dim, ranges.merged())
            rests[module_path][attribute] = rest
        outputs = self.output_biases()
        for branch in self._cut_branches():
            assert branch.description.inner is not None
            for module_path in dict.fromkeys(tensor.parameter.rpartition(".")[0] for tensor in branch.cut_tensors):
                if module_path not in cuts:
                    continue
                bias, is_sum = outputs.get(module_path, ("", False))
                module = self.model.get_submodule(module_path)
                compact = branch.description.inner.heads is None  # attention keeps its own output
                changed = split_layer(
                    module,
                    ({}, rests[module_path]),  # held: the module's own
                    cuts[module_path],
                    output_bias=bias,
                    is_sum=is_sum,
                    compact=compact,
                    parent=parent_in_branch(self.model, branch, module_path),
                )
                self._masked.append(changed)

    def output_biases(self) -> dict[str, tuple[str, bool]]:
        """For each module with an output projection, by dense name: the name of the bias, and whether the projection is
        a parameter of the module (experts), so that its output is a sum over neurons."""
        biases = {}
        for branch in self.branches:
            for tensor in branch.cut_tensors:
                if tensor.cut.is_output:
                    module_path, _, name = tensor.parameter.rpartition(".")
                    is_parameter = tensor.cut.module.rpartition(".")[2] == name
                    biases[module_path] = (f"{name}_bias" if is_parameter else "bias", is_parameter)
        return biases

    def _put(self, pieces: Sequence[Piece], tensor: torch.Tensor, data: torch.Tensor | None = None) -> None:
        if data is not None:
            set_data(tensor, data)
        start = 0
        for piece in pieces:
            self._where[piece] = (tensor, start)
            start += piece.length

    def _cut_branches(self) -> list[LocatedBranch]:
        """Branches that are split by neurons or heads."""
        cut = {name for name, pieces in self.pieces.items() if pieces[0][0].dim is not None}
        return [b for b in self.branches if any(tensor.parameter in cut for tensor in b.cut_tensors)]

    def _held_cells(self, branch: LocatedBranch) -> list[int]:
        """Indices of the neurons or heads of a branch that this rank holds."""
        output = next(tensor for tensor in branch.cut_tensors if tensor.cut.is_output)
        width = output.size // branch.num_cells
        return [
            cell
            for piece in self.held_pieces(output.parameter)
            for cell in range(piece.start // width, (piece.start + piece.length) // width)
        ]


def is_masked(module: nn.Module) -> bool:
    """Whether a module is masked, or a copy of a masked one."""
    return _MASKED in vars(module)


def partial_tensors(module: nn.Module) -> dict[str, str]:
    """Dense names, by name in the module, of tensors that some rank has in part, or not at all. The same on all ranks;
    none of a dense module. Copies of a masked module have the same names."""
    names: dict[str, str] = vars(module).get(_MASKED, {})
    return names


def concatenate(pieces: Sequence[Piece], dense: torch.Tensor) -> torch.Tensor:
    """Copy pieces of a tensor, concatenated along their dim."""
    dim = pieces[0].dim
    assert dim is not None
    return torch.cat([piece.narrow(dense.detach()) for piece in pieces], dim)
