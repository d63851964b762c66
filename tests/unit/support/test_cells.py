"""The cells of the support matrix, and the matrix that README shows."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.support.cells import AXES, Cell, Share, all_cells, share
from sdp_deepspeed.support.refusals import main, markdown, refuse_unsupported
from sdp_deepspeed.support.table import TABLE

SAMPLE = random.Random(0).sample(list(all_cells()), 300)


@pytest.fixture(scope="module")
def counted() -> Share:
    return share()


def test_cells_are_all_combinations_of_all_axes() -> None:
    assert [field.name for field in fields(Cell)] == list(AXES)
    cells = list(all_cells())
    assert len(set(cells)) == len(cells) == len(list(itertools.product(*AXES.values())))
    assert Cell() in cells


def test_a_cell_is_allowed_if_start_up_does_not_refuse_it() -> None:
    for cell in SAMPLE:
        config = cell.config()
        block = parse(config)
        assert block is not None
        if not cell.refusals():
            refuse_unsupported(block, config)
            continue
        with pytest.raises(ValueError, match=r"not possible|not built yet") as caught:
            refuse_unsupported(block, config)
        assert all(row.what in str(caught.value) for row in cell.refusals())


def test_a_value_of_an_axis_changes_the_config() -> None:
    """Two cells with one config would count the same thing twice."""
    configs = [repr(cell.config()) for cell in all_cells()]
    assert len(set(configs)) == len(configs)


def test_config_of_a_cell() -> None:
    plain = Cell().config()
    assert plain == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        KEY: {"holders": 1, "regime": "forward", "strategy": "block"},
    }
    cell = Cell("backward", "mixed", 2, "bf16+fp32", 2, "cpu", "caller", 2, overlap=True)
    assert cell.config(num_ranks=8, num_holders=2) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "managed_gradient_accumulation": False,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "tensor_parallel": {"autotp_size": 2},
        KEY: {
            "holders": 2,
            "regime": "backward",
            "strategy": {"attention": "neuron", "mlp": "block"},
            "subnetworks": 2,
        },
    }


def test_deepspeed_reads_what_a_cell_means() -> None:
    """Its own parser, on every value of every axis."""
    config_class: Any = pytest.importorskip("deepspeed").DeepSpeedConfig
    for name, values in AXES.items():
        for value in values:
            cell = replace(Cell(stage=2), **{name: value})
            read = config_class(cell.config())
            zero, offload = read.zero_config, read.zero_config.offload_optimizer
            assert (zero.stage, zero.overlap_comm) == (cell.stage, cell.overlap)
            assert (offload is not None and offload.device == "cpu") == (cell.offload == "cpu")
            assert read.float16_config.enabled == (cell.precision == "fp16")
            assert read.bfloat16_config.enabled == (cell.precision in ("bf16", "bf16+fp32"))
            assert (read.grad_accum_dtype == "fp32") == (cell.precision == "bf16+fp32")
            assert read.torch_autocast_enabled == (cell.precision == "autocast")
            assert read.managed_gradient_accumulation == (cell.accumulation != "caller")
            assert (read.gradient_accumulation_steps > 1) == (cell.accumulation != "none")
            assert max(1, read.tensor_parallel_config.autotp_size) == cell.tensor_parallel


def test_share_is_what_is_counted(counted: Share) -> None:
    refusals = {cell: [row.what for row in cell.refusals()] for cell in all_cells()}
    assert counted.num_cells == len(refusals)
    assert counted.num_allowed == sum(not rows for rows in refusals.values())
    assert counted.num_allowed > counted.num_cells / 2
    refused_by = {row.what: count for row, count in counted.refused_by}
    assert refused_by == {row: sum(row in rows for rows in refusals.values()) for row in refused_by}
    assert set(refused_by) == {row for rows in refusals.values() for row in rows}


def test_what_no_cell_is_refused_for(counted: Share) -> None:
    """Corners, stages, tensor parallelism and replicas combine with everything."""
    for name in ("regime", "strategy", "tensor_parallel", "replicas"):
        refused = {cell for cell in SAMPLE if cell.refusals()}
        for cell in refused:
            others = [replace(cell, **{name: value}) for value in AXES[name] if value != asdict(cell)[name]]
            assert all(other.refusals() for other in others)
    alone = [replace(Cell(stage=2), **{name: value}) for name, values in AXES.items() for value in values]
    assert [cell for cell in alone if cell.refusals() and cell.precision != "autocast"] == []


def test_matrix_lists_all_rows_and_the_share(counted: Share) -> None:
    rows, cells = markdown().split("\n\n", 1)
    assert len(rows.split("\n")) == len(TABLE) + 2
    assert all(f"| {row.what} | " in rows for row in TABLE)
    num_works, num_hints = (sum(row.state == state for row in TABLE) for state in ("works", "no effect"))
    assert f"{num_works} of {len(TABLE)} rows work, {num_hints} are hints" in cells
    assert f"{counted.num_allowed:,} of {counted.num_cells:,} cells (regime x strategy x stage x precision x" in cells
    assert f"are allowed ({100 * counted.num_allowed / counted.num_cells:.0f}%)" in cells
    for row, count in counted.refused_by:
        assert f"| {row.what} | {count:,} | {row.note} |" in cells


def test_matrix_is_written_between_its_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out == markdown() + "\n"
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- matrix -->\nold\n\nold\n<!-- /matrix -->\nafter\n")
    for _ in range(2):
        main([str(path)])
        assert path.read_text() == f"before\n<!-- matrix -->\n{markdown()}\n<!-- /matrix -->\nafter\n"
