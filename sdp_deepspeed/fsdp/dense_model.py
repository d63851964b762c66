"""The dense model under FSDP2: evaluation gathers one layer at a time, so no rank ever holds the whole model.

A second tree of the model's modules, without weights and mask, runs in place of the subnetwork. Before a layer runs,
all ranks gather its weights from their shards; afterwards the weights are freed. Forward passes of the dense model are
therefore collective, and all ranks run the same number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from sdp_deepspeed.architectures.located_branch import trained_layers
from sdp_deepspeed.fsdp.dtensors import ReplacedDTensors
from sdp_deepspeed.fsdp.parts import Part, copy_without_hooks
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.forwards import ReplacedForward, replace_forward
from sdp_deepspeed.parallel.dense_gathers import Segment, gather_segments
from sdp_deepspeed.parallel.groups import Groups

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOW = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")  # their options
_NOT_OF_USERS = ("torch.distributed.fsdp", "sdp_deepspeed.fsdp")  # modules whose hooks belong to the subnetwork


class DenseModel:
    """Gathers and runs the dense model of a sharded model.

    Args:
        mask: mask of the model, not applied yet.
        parts: parts of the parameters, by dense name.
        dtensors: the DTensors of the weights.

    Attributes:
        module: the second tree.
        runnable: the model and its modules that contain a trained layer, and the same modules of the second tree.
    """

    def __init__(
        self,
        mask: Mask,
        parts: Mapping[str, Sequence[Part]],
        policy: MixedPrecisionPolicy,
        dtensors: ReplacedDTensors,
    ) -> None:
        self._mask, self._parts, self._policy, self._dtensors = mask, parts, policy, dtensors
        self._blank = {  # placeholders of the parameters while no layer runs
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in mask.parameters.values()
        }
        self._pairs: list[tuple[nn.Module, nn.Module]] = []  # modules of the model and of the second tree
        self.module = self._copy(mask.model, {})
        trained = {id(mask.model.get_submodule(name)) for name in trained_layers(mask.branches)}
        self.runnable = [(module, copied) for module, copied in self._pairs if id(module) in trained]
        self._dtypes = {name: parameter.dtype for name, parameter in mask.parameters.items()}
        self._places = self._find_places()
        live = {id(buffer): name for name, buffer in mask.buffers.items()}
        self._buffers = [
            (live[id(buffer)], module, copied, name)
            for module, copied in self._pairs
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._partial = set()  # names of buffers that some ranks lack, at least in part
        for name, pieces in mask.buffer_pieces.items():
            if any(len(holders) < mask.plan.num_ranks for _, holders in pieces):
                self._partial.add(name)
        self._estimates = False  # whether statistics are being estimated, and must not be gathered
        self._of_layers, self._of_root = self._names_by_layer()
        for path in self._of_layers:
            replace_forward(self.module.get_submodule(path), _run_layer, (self, path))

    def _copy(self, module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
        if id(module) not in made:
            made[id(module)] = copied = copy_without_hooks(module)
            self._pairs.append((module, copied))
            forward = vars(module).get("forward")
            if isinstance(forward, MethodType) and forward.__self__ is module:
                vars(copied)["forward"] = MethodType(forward.__func__, copied)
            vars(copied).update({name: vars(module)[name] for name in _HOW})
            for name, child in module._modules.items():
                copied._modules[name] = None if child is None else self._copy(child, made)
            for name, parameter in module._parameters.items():
                copied._parameters[name] = None if parameter is None else self._blank[id(parameter)]
        return made[id(module)]

    def _find_places(self) -> dict[str, list[tuple[nn.Module, str, nn.Parameter]]]:
        """Places of each parameter in the second tree, by dense name: module, name, placeholder."""
        names = {id(parameter): name for name, parameter in self._mask.parameters.items()}
        places: dict[str, list[tuple[nn.Module, str, nn.Parameter]]] = {name: [] for name in names.values()}
        for module, copied in self._pairs:
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    places[names[id(parameter)]].append((copied, attribute, self._blank[id(parameter)]))
        return places

    def _names_by_layer(self) -> tuple[dict[str, list[str]], list[str]]:
        """Names of parameters by the layer that contains them, and all other names."""
        of_layers: dict[str, list[str]] = {branch.layer: [] for branch in self._mask.branches}
        inside = {path: set(self.module.get_submodule(path).modules()) for path in of_layers}
        of_root = []
        for name, places in self._places.items():
            owners = {module for module, _, _ in places}
            layers = [path for path, modules in inside.items() if owners <= modules]
            if layers:
                of_layers[min(layers, key=len)].append(name)  # the outermost layer
            else:
                of_root.append(name)
        return {path: names for path, names in of_layers.items() if names}, of_root

    def attach(
        self,
        groups: Groups,
        device: torch.device,
        shard: Callable[[Part], torch.Tensor],
        whole: Mapping[str, Any],
        wrapped: Iterable[nn.Module],
    ) -> None:
        """Connect to the model, after it has been sharded.

        Args:
            shard: returns this rank's shard of a part that it holds.
            whole: module and name, by dense name, of parameters that FSDP2's root gathers or ignores.
            wrapped: modules whose inputs and outputs FSDP2 casts; so does the second tree.
        """
        self._groups, self._device, self._shard, self._whole = groups, device, shard, whole
        policy, cast_ids = self._policy, {id(module) for module in wrapped}
        for module, copied in self._pairs:
            if id(module) in cast_ids:
                inputs = policy.param_dtype if policy.cast_forward_inputs else None
                replace_forward(copied, _run_cast, (inputs, policy.output_dtype))

    # ---- forward passes -----------------------------------------------------------------------------------------

    @torch.compiler.disable
    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass of a module of the second tree; collective, while the root of the model runs."""
        self._follow_model()
        self._gather_buffers()
        self._set({name: module._parameters[key].detach() for name, (module, key) in self._whole.items()})
        self._set(self.gather(name for name in self._of_root if name not in self._whole))
        try:
            return module.forward(*args, **kwargs)
        finally:
            self._drop(self._of_root)
            self._drop(self._whole)

    @contextmanager
    def estimating(self) -> Iterator[None]:
        """Context in which the running statistics of the second tree are not overwritten."""
        self._follow_model()
        self._gather_buffers()
        self._estimates = True
        try:
            yield
        finally:
            self._estimates = False

    def current_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of the model by dense name; modules may have replaced them."""
        buffers = {name: module._buffers[attribute] for name, module, _, attribute in self._buffers}
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def return_buffers(self) -> None:
        """Copy the buffers of units from the second tree to the model; other buffers are shared by both."""
        for name, module, copied, attribute in self._buffers:
            dense, live = copied._buffers[attribute], module._buffers[attribute]
            if name in self._partial and dense is not None:
                for piece in self._mask.held_pieces(name):
                    self._mask.view(piece, live).copy_(piece.narrow(dense))

    @contextmanager
    def holding(self, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Context in which the second tree has the weights of a dense state dict."""
        self.module.load_state_dict(state, assign=True)
        try:
            yield
        finally:
            self._drop(self._places)

    @contextmanager
    def layer_weights(self, path: str) -> Iterator[None]:
        """Context in which a layer has its dense weights. Collective."""
        names = [name for name in self._of_layers[path] if name not in self._whole]
        self._set(self.gather(names))
        try:
            yield
        finally:
            self._drop(names)

    def _follow_model(self) -> None:
        """Copy hooks and training modes from the model, except while statistics are estimated."""
        if self._estimates:
            return
        for module, copied in self._pairs:
            copied.training = module.training
            if module is self._mask.model:
                continue
            for table in _HOOKS:
                hooks = getattr(module, table)
                of_users = {key: hook for key, hook in hooks.items() if not _is_of_the_subnetwork(hook)}
                vars(copied)[table] = type(hooks)(of_users)

    def _set(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            whole = self._dtensors.around(name, value)
            for module, attribute, _ in self._places[name]:
                module._parameters[attribute] = nn.Parameter(whole, requires_grad=False)

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            for module, attribute, blank in self._places[name]:
                module._parameters[attribute] = blank

    # ---- gathering ----------------------------------------------------------------------------------------------

    def gather(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Gather dense parameters in FSDP2's compute dtype. Collective, with the same names on all ranks."""
        parts = [part for name in names for part in self._parts[name]]
        wholes, segments = list[torch.Tensor](), list[Segment]()
        for part in parts:
            dtype = self._policy.param_dtype or self._dtypes[part.name]
            wholes.append(torch.empty(part.shape, dtype=dtype, device=self._device))
            for rank in part.holders:
                start, stop = part.rows(rank)
                segments.append(Segment(rank, wholes[-1][start:stop]))
                if rank == self._groups.rank:
                    segments[-1].values.copy_(self._shard(part))
        gather_segments(segments, self._groups.data_parallel)
        dense: dict[str, torch.Tensor] = {}
        for part, whole in zip(parts, wholes, strict=True):
            if part.dim is None:
                dense[part.name] = whole
                continue
            target = dense.setdefault(part.name, whole.new_empty(self._mask.shapes[part.name]))
            lengths = [piece.length for piece in part.pieces]
            for piece, values in zip(part.pieces, whole.split(lengths, part.dim), strict=True):
                piece.narrow(target).copy_(values)
        return dense

    def _gather_buffers(self) -> None:
        """Gather the buffers of units from their holders."""
        mask, segments = self._mask, list[Segment]()
        for name, module, copied, attribute in self._buffers:
            live = module._buffers[attribute]
            if name not in self._partial:
                copied._buffers[attribute] = live
            elif not self._estimates:
                assert live is not None
                dense = torch.empty(mask.shapes[name], dtype=live.dtype, device=self._device)
                copied._buffers[attribute] = dense
                for piece, (first, *_) in mask.buffer_pieces[name]:
                    segments.append(Segment(first, piece.narrow(dense)))
                    if first == mask.rank:
                        segments[-1].values.copy_(mask.view(piece, live))
        gather_segments(segments, self._groups.data_parallel)


def _run_layer(forward: ReplacedForward, *args: Any, **kwargs: Any) -> Any:
    dense, path = forward.state
    with dense.layer_weights(path):
        return forward.previous(*args, **kwargs)


def _run_cast(forward: ReplacedForward, *args: Any, **kwargs: Any) -> Any:
    inputs, outputs = forward.state
    args, kwargs = cast((args, kwargs), inputs)
    return cast(forward.previous(*args, **kwargs), outputs)


def cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors in nested values, as FSDP2 does."""
    if dtype is None:
        return values
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def _is_of_the_subnetwork(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_NOT_OF_USERS)
