"""Tables of the READMEs are what the raw figures make; numbers in tables by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables.markdown import for_readers, span, table, with_spread
from benchmarks.tables.plots import PLOTS, draw_all
from benchmarks.tables.readme import BLOCKS, RESULTS, ROOT, filled, read
from benchmarks.tables.replans import replan_time
from benchmarks.tables.times import overlap, step_ratios

FIGURES = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")


def test_tables_are_what_the_raw_figures_make_now() -> None:
    assert filled(FIGURES) == FIGURES, "run: python benchmarks/tables/make.py --write"
    for name in BLOCKS:
        assert FIGURES.count(f"<!-- {name} -->\n") == FIGURES.count(f"\n<!-- /{name} -->") == 1, name


def test_a_table_that_the_root_readme_repeats_is_the_same() -> None:
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    assert filled(front) == front, "run: python benchmarks/tables/make.py --write"


def test_every_result_is_in_a_table_and_has_its_provenance() -> None:
    files = {path.stem for path in RESULTS.glob("*.json")}
    assert files == {name for block in BLOCKS.values() for name in block.files}
    for name in files:
        assert {"commit", "versions", "cores"} <= read(RESULTS / f"{name}.json")["provenance"].keys(), name


def test_commands_name_scripts_and_options_that_exist() -> None:
    commands = FIGURES.replace("\\\n", "").splitlines()
    starts = [line for line in commands if line.startswith(("OMP_NUM_THREADS", "python", "sudo"))]
    assert len(starts) >= len(BLOCKS)
    for line in starts:
        words = line.split()
        script = next(ROOT / word for word in words if word.startswith("benchmarks/") and word.endswith(".py"))
        shared = [ROOT / "benchmarks" / name for name in ("common/ranks.py", "systems/options.py")]
        source = "".join(path.read_text(encoding="utf-8") for path in (script, *shared))
        options = {word for word in words if word.startswith("--")} - {"--num_gpus"}  # that one is the launcher's
        assert all(f'"{option}"' in source for option in options), line


def test_every_plot_is_shown_and_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib comes with the extra `plot`")
    draw_all(tmp_path)
    names = {f"{name}.png" for name in PLOTS}
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in RESULTS.glob("*.png")} == names
    assert all(FIGURES.count(f"](results/{name})") == 1 for name in names)


def test_the_command_prints_each_result_in_full(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/tables/make.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line for line in run.stdout.splitlines() if line.startswith("### ")] == [
        f"### {path.name}" for path in sorted(RESULTS.glob("*.json"))
    ]


def test_filling_touches_nothing_but_the_blocks() -> None:
    document = "before\n<!-- kills -->\nold\n<!-- /kills -->\nafter <!-- unknown -->\n"
    expected = f"before\n<!-- kills -->\n{BLOCKS['kills'].text()}\n<!-- /kills -->\nafter <!-- unknown -->\n"
    assert filled(document) == filled(expected) == expected
    assert filled(document.replace("old\n", "")) == expected
    assert filled("nothing here") == "nothing here"


def run_of(ranks: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    work = {name: [{"flops": 10 * len(name), "sent_bytes": ranks}] for name in seconds}
    return {
        "ranks": ranks,
        "baseline": "zero1",
        "model": {"num_parameters": 1_500_000},
        "sequence_length": 8,
        "arguments": {"micro_batch": 1, "accumulation": 1, "bucket": 2e6},
        "targets": dict.fromkeys(seconds) | {"sdp C=0.5": 0.6},
        "seconds": seconds,
        "work": work,
    }


def test_ratios_by_hand() -> None:
    """Ratios of the same repeat: 0.5, 0.5, 1.0, whose quartiles are 0.5, 0.5, 1.0. What runs share is said once."""
    seconds = {"zero1": [2.0, 4.0, 1.0], "sdp C=0.5": [1.0, 2.0, 1.0], "zero1, overlap": [1.0, 2.0, 0.5]}
    runs = [run_of(ranks, seconds) for ranks in (2, 4)]
    ratios, overlaps = step_ratios(*runs).splitlines(), overlap(*runs).splitlines()
    assert ratios[0] == overlaps[0] == "1.5M parameters, batch 1 x 8 per rank, buckets of 2M elements:"
    assert ratios[2] == "|  | target | 2 ranks | 4 ranks | FLOPs | bytes sent |"
    assert "| forward x block, C = 1/2 | 0.6 | 0.50 (0.50 to 1.00) | 0.50 (0.50 to 1.00) | 1.80 | 1.00 |" in ratios
    assert overlaps[4:] == ["| ZeRO-1 | 0.50 (0.50 to 0.50) | 0.50 (0.50 to 0.50) |"]


def test_overlap_over_a_link_by_hand() -> None:
    """With overlap half of its own time without, and a quarter of the baseline's with it."""
    seconds = {"zero1": [2.0] * 3, "sdp C=1": [1.0] * 3, "zero1, overlap": [2.0] * 3, "sdp C=1, overlap": [0.5] * 3}
    lines = overlap(run_of(2, seconds) | {"link": "1gbit"}).splitlines()
    assert lines[2] == "| with overlap / without | all ranks | share of ZeRO-1's, without | with |"
    half, quarter = "0.50 (0.50 to 0.50)", "0.25 (0.25 to 0.25)"
    assert lines[4:] == [
        "| ZeRO-1 | 1.00 (1.00 to 1.00) | 1 | 1 |",
        f"| forward x block, C = 1 | {half} | {half} | {quarter} |",
    ]
    with_ddp = overlap(run_of(2, seconds), run_of(2, seconds | {"DDP": [1.0] * 3}) | {"link": "1gbit"}).splitlines()
    assert with_ddp[-1] == f"| DDP |  |  |  | {half} |"


def test_replans_by_hand() -> None:
    """Steps are ratios of the same repeat: 2, 1 and 3."""
    sizes = {"sent_bytes": 3_000_000, "least_bytes": 2_500_000, "asked_bytes": 4_000}
    replans = [{"seconds": second, "parts": {"plan": second / 2}} | sizes for second in (0.2, 0.2, 0.9)]
    row = {"stage": 2, "from": 0.5, "to": 0.75, "steps": [0.1, 0.2, 0.3], "replans": replans}
    facts = {"ranks": 4, "limit": 10, "model": {"num_parameters": 6_600_000}, "sequence_length": 128, "results": [row]}
    arguments = {"arguments": {"mode": ["forward", "block"], "precision": "fp32"}}
    caption, _, heads, _, only = replan_time(facts | arguments).splitlines()
    assert caption.startswith(
        "4 ranks, 6.6M parameters in fp32, forward x block, batch 1 x 128 per rank; 3 repeats; at"
    )
    assert heads == "|  | stage | seconds | steps | plan, ms | MB moved | of the least | kB to ask for them |"
    times = "0.20 (0.20 to 0.90) | 2.00 (1.00 to 3.00)"
    assert only == f"| C = 1/2 to 3/4 | 2 | {times} | 100 | 3.0 | 1.20 | 4 |"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("zero2, overlap", "ZeRO-2, overlap"),
        ("sdp C=1", "forward x block, C = 1"),
        ("backward x neuron + ZeRO-1 C=0.25", "backward x neuron + ZeRO-1, C = 1/4"),
        ("SDP + ZeRO-1, C=1/2", "SDP + ZeRO-1, C = 1/2"),
        ("forward x block, stage 0", "forward x block, stage 0"),
    ],
)
def test_names_for_readers(name: str, shown: str) -> None:
    assert for_readers(name) == shown


def test_pieces_of_tables() -> None:
    assert table(["a", ""], [["1", "2"]]) == "| a |  |\n| --- | --- |\n| 1 | 2 |"
    assert (span([0.501, 0.4]), span([0.501, 0.499])) == ("0.40 to 0.50", "0.50")
    assert with_spread([1.0, 2.0, 3.0]) == "2.00 (1.00 to 3.00)"


def test_a_cell_is_no_longer_than_a_sentence() -> None:
    cells = [cell for line in FIGURES.splitlines() if line.startswith("|") for cell in line.split(" | ")]
    assert max(map(len, cells)) <= 80
