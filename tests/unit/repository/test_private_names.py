"""All private names of other packages that this one uses, and what for. A release of theirs may change them without a
word: whoever tries another release, or looks for the reason of a failure there, starts here."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sdp_deepspeed.engine.engine import SubnetworkEngine
from tests.helpers.repository import ROOT

TORCH = {
    "_BatchNorm": "class of all batch norms",
    "_C": "module of the names below that are said to be in it",
    "_MEM_FORMAT_ENCODING": "a class in DCP's index, which its unpickler lets pass",
    "_StorageInfo": "a class in DCP's index",
    "_get_layout": "a function in DCP's index",
    "_base": "whether a tensor is a view, whose hook FSDP2 would lose",
    "_c10d_functional": "namespace of collectives, which FLOPs of images cannot be counted through",
    "_current_graph_task_id": "in _C; whether a backward pass runs, and which",
    "_device": "module of _device_constructors",
    "_device_constructors": "cached list of factory functions, which Transformers replaces",
    "_swap_tensor_impl": "in _C; moves a tensor that has weak references, which swap_tensors refuses",
    "_foreach_add_": "one call for many tensors (documented as beta)",
    "_foreach_copy_": "the same",
    "_foreach_mul_": "the same",
    "_foreach_norm": "the same",
    "_foreach_zero_": "the same",
    "_utils": "module of _unflatten_dense_tensors",
    "_torchdynamo_orig_callable": "whether a `forward` was compiled, which copies of a model cannot run",
    "_unflatten_dense_tensors": "views of a flat buffer, thousands in one call",
    "_python_dispatch": "module of TorchDispatchMode, which sees each operation: FLOPs, memory, `Init`",
    "_pytree": "module of tree_map and tree_leaves: tensors in nested inputs and outputs",
    "_subclasses": "module of FakeTensorMode: memory of a step without computing it",
    "_schema": "names of an operation's arguments, and which it writes to",
    "_softmax": "an operation of attention, which branches are derived from",
    "_safe_softmax": "the same",
    "_grouped_mm": "the operation of experts, which branches are derived from",
    "_disable_current_modes": "leaves the contexts of callers while branches are derived and proven",
    "_cdata": "which tensors of a traced pass share a storage",
    "_local_scalar_dense": "the operation of .item()",
    "_scaled_dot_product_flash_attention_for_cpu": "the operation of attention on CPUs, for FLOPs",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "the same",
    "_no_grad_trunc_normal_": "in nn.init; recorded under `Init`",
    "_modules": "registry of a module's children, where wrappers are taken off and layers are copied",
    "_parameters": "registry of a module's parameters",
    "_buffers": "registry of a module's buffers",
    "_non_persistent_buffers_set": "buffers that are not in state dicts",
    "_call_impl": "what torch.compile compiles in place",
    "_compiled_call_impl": "the result of that",
    "_orig_mod": "the model in the wrapper of torch.compile",
    "_checkpoint_wrapped_module": "the layer in the wrappers of checkpointing and offload",
    "_forward_hooks": "users' hooks on layers, which the dense model runs, too",
    "_forward_hooks_always_called": "the same",
    "_forward_hooks_with_kwargs": "the same",
    "_forward_pre_hooks": "the same",
    "_forward_pre_hooks_with_kwargs": "the same",
    "_get_backend": "timeout of the default group, for groups that are created later",
    "_device_types": "the same",
    "_timeout": "the same, and of the group of a meeting of teams",
    "_Options": "of gloo groups, which have devices",
    "_devices": "the same",
    "_last_lr": "learning rates that a schedule reports, after a load under another plan",
    "_schedulers": "schedules in a schedule",
}
DEEPSPEED = {
    "_backward_prologue": "extended: whether this is the last micro-step",
    "_backward_epilogue": "extended: end of a backward pass under no_sync",
    "_broadcast_model": "extended: checks that ranks have the same model",
    "_checkpoint_tag_validation": "whether all ranks save under the same tag",
    "_config": "the parsed config: ZeRO's section, gradient overflow in bf16, the stage of a new plan",
    "_configure_tensor_parallel": "extended: errors of AutoTP in words",
    "_configure_distributed_model": "extended: the plan and the mask",
    "_configure_optimizer": "extended: an error of one rank is raised on all; in a team without absent parameters",
    "_copy_recovery_script": "extended: an error of one rank in the checkpoint of a team is raised on all",
    "_configure_zero_optimizer": "replaced by this package's optimizer",
    "_do_optimizer_sanity_check": "replaced: that optimizer serves every stage and precision",
    "_ds_grad_allreduce_registered": "parameters that AutoTP replicates",
    "_flush_coalesced_reduction_zero12": "replaced: the end of coalesce_grad_reduction",
    "_is_gradient_accumulation_boundary": "whether the caller sets the boundary",
}
OTHERS = {
    "_experts_implementation": "of a Transformers config: whether experts are computed by grouped_mm",
    "_gradient_checkpointing_func": "of a Transformers layer: whether checkpointing is reentrant",
    "_keys_to_ignore_on_load_unexpected": "of a Transformers model: keys of a file that it does not have",
    "_codecs": "a module in pickles of NumPy arrays, which the unpickler of launch/published_images.py lets pass",
    "_core": "the same",
    "_reconstruct": "a function in such pickles",
    "_initializing": "of a module's spec: whether its import has begun and not ended",
    "_state_dict_hooks": "of a module of torchtitan (an example)",
    "_load_state_dict_pre_hooks": "the same",
    "_globalstep_last_logged": "of Transformers' Trainer: a team that takes over weights goes on at their step",
    "_initial_global_step": "the same",
    "_run_epoch": "of Transformers' Trainer, extended in launch/pretrain.py",
    "_save_checkpoint": "the same",
}
KNOWN = TORCH | DEEPSPEED | OTHERS
OUR_STRINGS = {"_bias", "_proj", "_token_id", "_sdp", "_like"}  # parts of names, as of "q_proj"


def is_private(name: str) -> bool:
    """Without special names, names of this package's attributes on foreign objects, and namedtuple's public ones."""
    return re.fullmatch(r"_(?!_|sdp_|asdict$|replace$)\w+", name) is not None


@cache
def nodes_in(folder: Path) -> dict[Path, list[ast.AST]]:
    """Nodes of the syntax trees of a folder's modules, but for the text between the braces of f-strings."""
    nodes = {}
    for path in sorted(folder.glob("*.py")):
        every = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        texts = {id(text) for node in every if isinstance(node, ast.JoinedStr) for text in node.values}
        nodes[path] = [node for node in every if id(node) not in texts]
    return nodes


def defined_in(folder: Path) -> set[str]:
    """Private names that the modules of a folder define: functions, classes, variables, attributes of self."""
    names = set()
    for node in itertools.chain(*nodes_in(folder).values()):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def names_in(node: ast.AST, ours: set[str]) -> Iterator[str]:
    """Private names of others that a node of the syntax tree uses."""
    match node:
        case ast.Import(names=aliases):
            yield from (name for alias in aliases for name in alias.name.split("."))
        case ast.ImportFrom(module=module, level=0, names=aliases):
            yield from (name for path in (module or "", *(alias.name for alias in aliases)) for name in path.split("."))
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
            yield name
        case ast.Attribute(attr=name) if name not in ours:
            yield name
        case ast.Constant(value=str(text)) if text not in ours | OUR_STRINGS:
            yield text


def overridden() -> Iterator[str]:
    """Private methods of DeepSpeed's engine, an nn.Module, that this package's engine overrides."""
    theirs = {name for base in SubnetworkEngine.__mro__[1:] for name in vars(base)}
    yield from (name for name, value in vars(SubnetworkEngine).items() if callable(value) and name in theirs)


def test_all_private_names_that_are_used_are_listed_and_no_others() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for name in filter(is_private, overridden()):
        places[name].add("overridden")
    for root in (ROOT / "sdp_deepspeed", ROOT / "launch"):
        for folder in sorted({path.parent for path in root.rglob("*.py")}):
            ours = defined_in(folder)
            for path, nodes in nodes_in(folder).items():
                for node in nodes:
                    for name in filter(is_private, names_in(node, ours)):
                        places[name].add(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
    unknown = {name: sorted(where) for name, where in places.items() if name not in KNOWN}
    assert not unknown, "use a public name, or list these above with what they are for"
    assert not KNOWN.keys() - places.keys(), "remove these from the list"
