"""Tests mirror the package: a module is tested in a file of its name and room, or the list says where and why there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.repository import PACKAGE, TESTS

# Data or types, which have no behavior of their own.
NOTHING_TO_TEST = {
    "architectures/branch": "descriptions are data",
    "checkpoint/state/trained_state": "a protocol",
    "checkpoint/storage/names": "names of files",
    "distributed/act": "data, and words that test_last_acts.py reads",
    "distributed/host_words": "words that test_monitored_barrier.py and ranks/fsdp/test_options.py read",
    "engine/host_engine": "a protocol",
    "optimizer/settings": "data; each setting's effect is tested where it acts",
    "report": "the old name of a command",
    "training/task": "a protocol",
    "version": "one string",
}
# Modules that are tested through what they are a part of: the folder or file that does it.
TESTED_WITH = {
    "architectures/decoders": "unit/architectures/test_families.py",
    "architectures/encoder_decoders": "unit/architectures/test_more_families.py",
    "architectures/encoders": "unit/architectures/test_more_families.py",
    "architectures/falcon": "unit/architectures/test_more_families.py",
    "architectures/cut_tensors": "unit/architectures/test_strategies.py",
    "architectures/located_branch": "unit/architectures/test_strategies.py",
    "architectures/registry": "unit/architectures/test_strategies.py",
    "checkpoint/interop/load_universal": "ranks/checkpoint/interop/test_from_zero.py",
    "checkpoint/interop/transformers_names": "ranks/checkpoint/interop/test_export.py",
    "checkpoint/interop/whole_tensors": "ranks/checkpoint/interop/test_pretrained.py",
    "checkpoint/load": "unit/checkpoint/test_checkpointer.py",
    "checkpoint/state/fill": "ranks/checkpoint/test_reshard.py",
    "checkpoint/state/rank_chunks": "ranks/checkpoint/test_reshard.py",
    "checkpoint/state/snapshot": "unit/checkpoint/test_checkpointer.py",
    "config_errors": "unit/test_config.py",
    "data/cache": "unit/data/test_prepare.py",
    "data/growing": "unit/data/test_block_order.py",
    "data/lifeline": "unit/data/test_workers.py",
    "data/progress": "unit/data/test_main.py",
    "data/streaming": "unit/data/test_background.py",
    "data/tokenize_part": "unit/data/test_stream_writer.py",
    "data/worker": "unit/data/test_workers.py",
    "deferred_init/materializer": "ranks/deferred_init/test_materialize.py",
    "deferred_init/operation": "unit/deferred_init/test_init.py",
    "deferred_init/program": "unit/deferred_init/test_init.py",
    "distributed/communicator": "unit/exchange/test_exchange.py",
    "engine/apply_plan": "ranks/reference/test_oracle.py",
    "engine/checkpoint_calls": "ranks/checkpoint/test_checkpointer.py",
    "engine/consistency": "ranks/engine/test_refusals.py",
    "engine/dense_calls": "ranks/masking/test_dense_view.py",
    "engine/holder_groups": "ranks/masking/test_synchronized.py",
    "engine/import_hook": "launcher/test_import_hook.py",
    "engine/replan_calls": "ranks/engine/test_replan.py",
    "exchange/averaging": "unit/exchange/test_overlap.py",
    "exchange/gradient_norm": "unit/optimizer/test_accumulation.py",
    "exchange/gradients": "unit/optimizer/test_accumulation.py",
    "exchange/step_averaging": "unit/exchange/test_overlap.py",
    "fsdp/block_units": "ranks/fsdp/test_shard.py",
    "fsdp/dense_view": "ranks/fsdp/test_options.py",
    "fsdp/full_state": "ranks/fsdp/test_options.py",
    "fsdp/holder_meshes": "ranks/fsdp/test_shard.py",
    "fsdp/mesh_groups": "ranks/fsdp/test_options.py",
    "fsdp/narrow_copies": "unit/fsdp/test_neuron.py",
    "fsdp/norm": "ranks/fsdp/test_options.py",
    "fsdp/piece_fetcher": "ranks/fsdp/test_neuron.py",
    "fsdp/piece_values": "ranks/fsdp/test_neuron.py",
    "fsdp/shard_fetcher": "ranks/fsdp/test_options.py",
    "fsdp/sharded_mask": "ranks/fsdp/test_options.py",
    "fsdp/sharded_model": "ranks/fsdp/test_shard.py",
    "fsdp/whole_layers": "unit/fsdp/test_neuron.py",
    "hosts/remote": "unit/hosts/test_inspection.py",
    "lock_owner": "unit/test_folder_lock.py",
    "masking/block": "unit/masking/test_mask.py",
    "masking/compiled": "ranks/engine/test_compile.py",
    "masking/counts": "unit/masking/test_neuron.py",
    "masking/halves": "unit/masking/test_backward_neuron.py",
    "masking/outputs": "unit/architectures/test_more_families.py",
    "masking/part": "unit/masking/test_mask.py",
    "masking/viewed": "ranks/masking/test_dense_view.py",
    "masking/watched": "unit/masking/test_description_check.py",
    "masking/twins": "unit/masking/test_backward_neuron.py",
    "optimizer/exchanges": "unit/exchange/test_overlap.py",
    "optimizer/host_surface": "unit/optimizer/test_optimizer.py",
    "optimizer/param_groups": "ranks/optimizer/test_optimizers.py",
    "plan/assignment/problem": "unit/plan/assignment/test_methods.py",
    "plan/assignment/search": "unit/plan/assignment/test_methods.py",
    "plan/planner": "unit/plan/test_plan.py",
    "plan/spectral_gap": "unit/plan/test_plan.py",
    "reference/held_rows": "unit/reference/test_batched_workers.py",
    "reference/row_sites": "unit/reference/test_batched_workers.py",
    "support/block": "unit/support/test_table.py",
    "tensor_parallel/checks": "ranks/tensor_parallel/test_model.py",
    "tensor_parallel/group": "ranks/tensor_parallel/test_model.py",
    "training/evaluate": "launcher/test_pretrain.py",
    "training/host": "launcher/test_pretrain_fsdp.py",
    "training/loop": "launcher/test_pretrain.py",
    "training/monitors": "ranks/engine/test_step_events.py",
    "training/session": "launcher/test_pretrain.py",
    "training/text_task": "launcher/test_pretrain.py",
    "vision/task": "launcher/test_train_vision.py",
}


def modules() -> list[str]:
    """Paths in the package without their ending; `__init__` and `__main__` belong to their room."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in sorted(PACKAGE.rglob("*.py")))
    return [str(path) for path in paths if not path.name.startswith("__")]


def has_mirror(module: str) -> bool:
    """Whether a tier has a test file of the module's name in its room, or in the room above."""
    path = Path(module)
    folders = [path.parent, *list(path.parent.parents)[:-1]] if path.parent.name else [path.parent]
    return any(
        (TESTS / tier / folder / f"test_{path.name}.py").is_file() for tier in ("unit", "ranks") for folder in folders
    )


@pytest.mark.parametrize("module", modules())
def test_every_module_has_its_tests(module: str) -> None:
    listed = module in NOTHING_TO_TEST or module in TESTED_WITH
    assert has_mirror(module) != listed, "a test file of its name and room, or a line in one of the lists"


def test_the_lists_are_true() -> None:
    assert not NOTHING_TO_TEST.keys() & TESTED_WITH.keys()
    assert {*NOTHING_TO_TEST, *TESTED_WITH} <= set(modules())
    assert [path for path in TESTED_WITH.values() if not (TESTS / path).is_file()] == []
