"""The command line: `sdp COMMAND ...`, or `python -m sdp_deepspeed COMMAND ...`.

torch and everything else that takes long to import is imported inside the commands, so that help appears at once.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from sdp_deepspeed.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from sdp_deepspeed.architectures import LocatedBranch
    from sdp_deepspeed.config import SubnetworkConfig
    from sdp_deepspeed.estimate.deepspeed_bytes import RankEstimate
    from sdp_deepspeed.estimate.forecast import Forecast
    from sdp_deepspeed.estimate.run import Run
    from sdp_deepspeed.plan.plan import Plan
    from sdp_deepspeed.units import UnitCost

_GIB, _MIB = 2**30, 2**20
_ERROR = 2  # exit code

app = typer.Typer(
    name="sdp",
    help="Subnetwork data parallelism: inspect plans, memory and checkpoints without a training job.",
    epilog="To train, use a launcher: deepspeed --num_gpus 4 launch/pretrain.py RECIPE",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
checkpoint = typer.Typer(help="Inspect, verify and export checkpoints.")
app.add_typer(checkpoint, name="checkpoint")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name. Default: those of this process. Without arguments, the help is shown.

    Returns:
        The exit code; 2 for an error, which is one line on stderr.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(words or ["--help"], prog_name="sdp", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except TyperException as error:  # wrong options and arguments
        context = getattr(error, "ctx", None)
        command = "sdp" if context is None else context.command_path
        text = f"{error.format_message().removesuffix('.')} ({command} --help lists the options)"
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        text = 'plots need Matplotlib: pip install "sdp_deepspeed[plot]"'
    except (OSError, RuntimeError, ValueError) as error:
        text = str(error)
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return _ERROR


def _show_version(asked: bool) -> None:
    if asked:
        print(f"sdp_deepspeed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


def _byte_count(text: str) -> int:
    """Bytes of "5GB" or "200M" (powers of 1000), or "24GiB" (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B?", text.strip(), re.ASCII | re.IGNORECASE)
    count = 0
    if match is not None:
        exponent = " KMGT".index(match[2].upper())
        count = int(float(match[1]) * (1024 if match[3] else 1000) ** exponent)
    if count < 1:
        raise ValueError(f"got {text!r}, expected a size such as 24GiB or 200MB")
    return count


# ---- plan and estimate ----------------------------------------------------------------------------------------------

_Ranks = Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the recipe, such as sdp.coverage=0.25."),
]


@app.command()
def plan(
    source: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="YAML file of a run, or a saved plan (.json).")
    ] = None,
    overrides: _Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(help="Config of a model in place of a recipe: name on the hub, folder, or config.json."),
    ] = None,
    ranks: _Ranks = 8,
    save: Annotated[Path | None, typer.Option(help="Write the plan as JSON, for the key `assignment`.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the table to a .png, .svg or .pdf file.")] = None,
) -> None:
    """Show which subnetwork holds which unit, the balance and the spectral gap (of a schedule's first phase).

    With --model, also the residual branches that were found; coverage is 0.5 unless sdp.coverage is given.
    """
    costs: Sequence[UnitCost] | None = None
    warnings: Sequence[str] = ()
    if model is not None:
        from sdp_deepspeed.estimate.run import block_of, empty_model

        of_model, block = empty_model(model), block_of([*filter(None, [source]), *(overrides or [])])
        shown, costs, warnings, branches = _plan_of(of_model, block, ranks)
        print(_list(branches))
    elif source is None:
        raise ValueError("expected a recipe, a saved plan, or --model")
    elif source.endswith(".json"):
        if overrides:
            raise ValueError(f"a saved plan cannot be changed: remove {' '.join(overrides)}")
        from sdp_deepspeed.plan.plan import Plan

        shown = Plan.load(Path(source))
    else:
        shown, costs, warnings = _planned(Path(source), overrides or [], ranks)
    print(shown.table(costs, details=True))
    for warning in warnings:
        print(f"  warning: {warning}")
    if save is not None:
        shown.save(save)
    if plot is not None:
        _draw(shown, plot)


def _planned(source: Path, overrides: Sequence[str], ranks: int) -> tuple[Plan, Sequence[UnitCost], Sequence[str]]:
    from sdp_deepspeed.config import parse
    from sdp_deepspeed.estimate.run import read_run
    from sdp_deepspeed.messages import KEY

    run = read_run(source, overrides)
    block = parse(run.phases[0])
    if block is None:
        raise ValueError(f"{source}: {KEY} is missing or disabled; add it, such as sdp.coverage=0.5")
    with run.model.fake:
        return _plan_of(run.model.module, block, ranks)[:3]


def _plan_of(
    model: nn.Module, block: SubnetworkConfig, ranks: int
) -> tuple[Plan, Sequence[UnitCost], Sequence[str], Sequence[LocatedBranch]]:
    from sdp_deepspeed.masking.proof import proven_branches
    from sdp_deepspeed.plan.strategies import unit_costs
    from sdp_deepspeed.planner import plan_model

    branches = proven_branches(model, block.strategy)
    shown, warnings = plan_model(model, block, ranks, branches=branches)
    return shown, unit_costs(model, shown.units), warnings, branches


def _list(branches: Sequence[LocatedBranch]) -> str:
    """Branches of a model, a line for each form."""
    forms = Counter((re.sub(r"\b[0-9]+\b", "*", b.layer), b.description, b.num_cells) for b in branches)
    lines = []
    for (layer, description, num_cells), number in forms.items():
        cells = "heads" if description.inner and description.inner.heads is not None else "neurons"
        inside = f" ({num_cells} {cells})" if num_cells else ""
        lines.append(f"{number} x {layer}.{description.name}{inside}: {', '.join(description.modules)}")
    return "\n".join(["branches:", *(f"  {line}" for line in lines)])


def _draw(shown: Plan, path: Path) -> None:
    from matplotlib.figure import Figure

    names, k = [unit.name for unit in shown.units], shown.num_subnetworks
    rows = [[subnetwork in holders for subnetwork in range(k)] for holders in shown.holders]
    figure = Figure(figsize=(min(16, 3 + 0.3 * k), min(40, 1.2 + 0.2 * len(names))), layout="constrained")
    axes = figure.add_subplot()
    axes.pcolormesh(rows, cmap="Blues", vmin=0, vmax=1.4, edgecolors="white", linewidth=0.5)
    step = -(-len(names) // 180)  # more labels would overlap
    axes.set_yticks([index + 0.5 for index in range(0, len(names), step)], names[::step], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("subnetwork")
    axes.set_title(
        f"{shown.regime}, coverage {shown.coverage:.3g}, spectral gap {shown.spectral_gap():.3f}", fontsize=9
    )
    figure.savefig(path, dpi=150)


@app.command()
def estimate(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file of a run.")],
    overrides: _Overrides = None,
    ranks: _Ranks = 8,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks of a node, for bytes between nodes.")] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="GPU memory, such as 24GiB: does the recipe fit (exit code 1 if not), and the largest micro-batch.",
        ),
    ] = None,
) -> None:
    """Estimate memory, traffic and FLOPs of an optimizer step on one rank, and of ZeRO and FSDP2 without subnetworks.

    Each phase is estimated on the rank whose subnetwork has the most FLOPs. Nothing is allocated, and no GPU is needed.
    The peak is that of live tensors, without kernel workspaces, fragmentation and the CUDA context. Flash attention is
    assumed. With teams, give the ranks of one team; the columns without subnetworks are of the ranks of all teams.
    """
    limit = None if fit is None else _byte_count(fit)
    from sdp_deepspeed.config import parse
    from sdp_deepspeed.estimate.deepspeed_config import read_settings
    from sdp_deepspeed.estimate.forecast import largest_micro_batches
    from sdp_deepspeed.estimate.run import read_run

    run = read_run(recipe, overrides or [])
    too_small = False
    for index, phase in enumerate(run.phases, start=1):
        block, settings = parse(phase), read_settings(phase)
        teams = 1 if block is None or block.local_steps is None else block.local_steps.teams
        num_ranks = {"SDP": ranks} if block is not None else {}
        if index == 1:
            num_ranks["plain"] = ranks * teams
        columns = partial(_forecasts, run=run, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
        forecasts = columns(phase)
        micro, accumulation = settings.micro_steps(ranks)
        prefix = f"phase {index} of {len(run.phases)}: " if len(run.phases) > 1 else ""
        text = _run_text(run, forecasts, ranks, teams)
        print(f"{prefix}{text}, micro-batch of {micro} samples x {accumulation}")
        largest = None if limit is None else largest_micro_batches(columns, phase, ranks, limit)
        print("\n".join(_estimate_text(forecasts, largest)))
        if limit is not None and largest is not None:
            plain = "FSDP2" if run.host == "fsdp2" else f"ZeRO-{settings.zero_optimization.stage}"
            name = plain if block is None else "SDP"  # of the recipe itself
            too_small |= forecasts[name].peak > limit
            print(_fit_text(name, forecasts[name], micro, largest[name], limit, fit or ""))
    if too_small:
        raise typer.Exit(1)


def _forecasts(
    config: Mapping[str, Any], *, run: Run, num_ranks: Mapping[str, int], ranks_per_node: int | None
) -> dict[str, Forecast]:
    """Forecasts by name.

    Args:
        num_ranks: data-parallel ranks of "SDP", and of "plain", the runs without subnetworks; some may be left out.
    """
    from sdp_deepspeed.estimate.deepspeed_config import read_settings
    from sdp_deepspeed.estimate.forecast import forecast, plain_forecasts

    forecasts: dict[str, Forecast] = {}
    if "SDP" in num_ranks:
        forecasts["SDP"] = forecast(
            run.model, config, num_ranks=num_ranks["SDP"], host=run.host, ranks_per_node=ranks_per_node
        )
    if "plain" in num_ranks:
        micro, accumulation = read_settings(config).micro_steps(num_ranks.get("SDP", num_ranks["plain"]))
        sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
        plain = {key: value for key, value in config.items() if key != "train_batch_size"} | sizes
        forecasts |= plain_forecasts(run.model, plain, num_ranks=num_ranks["plain"], ranks_per_node=ranks_per_node)
    return forecasts


def _run_text(run: Run, forecasts: Mapping[str, Forecast], ranks: int, teams: int) -> str:
    first = next(iter(forecasts.values()))
    coverage = f", coverage {first.coverage:.3g}" if "SDP" in forecasts else ""
    millions = first.num_parameters / 1e6
    of_teams = f"{teams} teams of " if teams > 1 else ""
    return (
        f"{millions:.1f}M parameters, {of_teams}{ranks} ranks, {first.items_per_step:,} {run.items} per step{coverage}"
    )


def _fit_text(name: str, column: Forecast, micro: int, largest: int, limit: int, given: str) -> str:
    fits = column.peak <= limit
    coverage = f" with coverage {column.coverage:.3g}" if name == "SDP" else ""
    unit, unit_name = (_GIB, "GiB") if limit >= _GIB else (_MIB, "MiB")
    others = f"the largest that fits is {largest}" if largest else "none fits"
    return (
        f"fits in {given}: {'yes' if fits else 'no'}, {name}{coverage} and a micro-batch of {micro} samples takes "
        f"up to {column.peak / unit:,.2f} {unit_name}; {others}"
    )


def _estimate_text(forecasts: Mapping[str, Forecast], largest: Mapping[str, int] | None) -> Iterator[str]:
    first = next(iter(forecasts.values()))
    unit, name = (_GIB, "GiB") if max(column.peak for column in forecasts.values()) >= 10 * _GIB else (_MIB, "MiB")
    rows: list[tuple[str, Callable[[Forecast], int]]] = [
        ("weights", lambda column: column.rank.weights),
        ("gradients", lambda column: column.rank.gradients),
        ("optimizer state", lambda column: column.rank.optimizer),
        ("optimizer state on the host", lambda column: column.rank.host_optimizer),
        ("anchors on the host", lambda column: column.anchors),
        ("activations", lambda column: column.activations),
        ("buffers", lambda column: _buffers(column.rank)),
        ("peak", lambda column: column.peak),
        ("sent per step", lambda column: column.rank.sent),
        ("sent per meeting to other teams", lambda column: column.sent_per_meeting),
    ]
    if first.out_of_node is not None:
        rows.append(("out of its node per step", lambda column: column.out_of_node or 0))
    cells = [("on one rank", *forecasts)]
    for title, value in rows:
        values = [value(column) for column in forecasts.values()]
        if any(values) or not title.endswith(("on the host", "to other teams")):
            cells.append((f"{title}, {name}", *(f"{number / unit:,.2f}" for number in values)))
    cells.append(("compute per step, TFLOPs", *(f"{column.flops / 1e12:.4g}" for column in forecasts.values())))
    if largest is not None:
        cells.append(("largest micro-batch, samples", *(str(largest[name]) for name in forecasts)))
    width = max(len(row[0]) for row in cells)
    yield from (f"  {row[0]:<{width}}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in cells)
    yield from (f"  warning: {warning}" for warning in first.warnings)


def _buffers(rank: RankEstimate) -> int:
    return rank.buffers + rank.step_gradients + rank.gathered + rank.gathered_units


# ---- checkpoints ----------------------------------------------------------------------------------------------------

_Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a checkpoint, or its parent, for the latest.")
]
_Tag = Annotated[str | None, typer.Option(help="Name of the checkpoint in the parent folder.")]


def _find(path: Path, tag: str | None) -> tuple[Path, list[str]]:
    """The folder of a complete checkpoint, and a problem if `latest` names another one.

    Raises:
        ValueError: no checkpoint is complete.
    """
    from sdp_deepspeed.checkpoint import atomic_folder, files

    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    if tag is not None or (path / files.CHECKSUMS).is_file():
        folder = path if tag is None else atomic_folder.path_of(path, tag)
        files.read_checksums(folder)
        return folder, []
    complete, tags = atomic_folder.complete_tags(path), atomic_folder.tags_to_try(path)
    if not complete:
        raise ValueError(f"{path}: has no complete checkpoint of sdp_deepspeed")
    if tags[0] in complete:
        return atomic_folder.path_of(path, tags[0]), []
    warning = f"{path / atomic_folder.LATEST} names {tags[0]!r}, which is not complete"
    return atomic_folder.path_of(path, complete[0]), [warning]


@checkpoint.command()
def inspect(path: _Checkpoint, tag: _Tag = None) -> None:
    """Describe a checkpoint, without reading its tensors."""
    folder, problems = _find(path, tag)
    print("\n".join([f"checkpoint {folder}", *_description(folder), *problems]))
    raise typer.Exit(1 if problems else 0)


def _description(path: Path) -> Iterator[str]:
    from sdp_deepspeed.checkpoint import files
    from sdp_deepspeed.checkpoint.save_and_load import COMMON, read_bytes, stored_tensors
    from sdp_deepspeed.plan.coverage import describe_holders

    sizes = [size for size, _ in files.read_checksums(path)["files"].values()]
    reader = files.Reader(path)
    facts = read_bytes(reader, COMMON)
    steps = facts["common"].get("counters", {}).get("global_steps", "unknown")
    yield f"step {steps}, written by {facts['ranks']} ranks; {len(sizes)} files, {sum(sizes) / _MIB:,.1f} MiB"
    table = json.loads(facts["plan"])
    yield (
        f"plan {table['hash'][:12]}: {table['regime']} regime, {table['strategy']} strategy, "
        f"{table['num_subnetworks']} subnetworks, {len(table['units'])} units with "
        f"{describe_holders([len(unit['holders']) for unit in table['units']])}"
    )
    kinds: defaultdict[str, list[Any]] = defaultdict(list)
    for key, stored in stored_tensors(reader).items():
        kinds[key.partition("/")[0]].append(stored)
    for kind, tensors in kinds.items():
        elements = sum(stored.size.numel() for stored in tensors)
        size = sum(stored.size.numel() * stored.properties.dtype.itemsize for stored in tensors)
        dtypes = sorted({str(stored.properties.dtype).removeprefix("torch.") for stored in tensors})
        yield f"{kind}: {len(tensors)} tensors, {elements:,} elements, {size / _MIB:,.1f} MiB, {' and '.join(dtypes)}"


@checkpoint.command()
def verify(path: _Checkpoint, tag: _Tag = None) -> None:
    """Compare a checkpoint's files with their checksums. Exit code 1 if one is missing or damaged."""
    from sdp_deepspeed.checkpoint import files

    folder, problems = _find(path, tag)
    problems += files.problems_in(folder)
    print("\n".join(problems or [f"{folder} is complete: sizes and checksums of all files match"]))
    raise typer.Exit(1 if problems else 0)


class Dtype(StrEnum):
    AS_TRAINED = "as-trained"
    FP32 = "fp32"


@checkpoint.command()
def export(
    path: _Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    tag: _Tag = None,
    dtype: Annotated[Dtype, typer.Option(help="fp32: the optimizer's master weights.")] = Dtype.AS_TRAINED,
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of a file; one is held in memory.")] = "5GB",
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of a tokenizer to include.")] = None,
) -> None:
    """Write the dense model of a checkpoint as a Hugging Face folder, for `from_pretrained`. Models of other libraries
    become safetensors files, for `load_state_dict`."""
    _byte_count(max_shard_size)
    import torch

    from sdp_deepspeed.checkpoint import export_and_import, files
    from sdp_deepspeed.checkpoint.save_and_load import COMMON, read_bytes

    folder, _ = _find(path, tag)
    if problems := files.problems_in(folder):
        raise ValueError("; ".join(problems))
    reader = files.Reader(folder)
    export_and_import.export(
        reader,
        read_bytes(reader, COMMON),
        out,
        dtype=torch.float32 if dtype is Dtype.FP32 else None,
        max_shard_size=max_shard_size,
        tokenizer=tokenizer,
    )
    print(f"{folder} -> {out}")


# ---- teams ----------------------------------------------------------------------------------------------------------


@app.command()
def teams(
    number: Annotated[int, typer.Argument(metavar="K", min=2, help="Number of teams.")],
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT", help="Python program and its arguments, after --.")],
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks of each team.")] = 1,
) -> None:
    """Run K teams and their lighthouse on this machine: sdp teams 4 -- train.py ARGUMENTS.

    Each rank runs the program, with the environment that torchrun sets, SDP_TEAM and TORCHFT_LIGHTHOUSE. If a rank is
    killed, its team ends, and the other teams go on. Exit code 1 if a team has failed.
    """
    from sdp_deepspeed.teams.launch import run_teams

    raise typer.Exit(run_teams(number, nproc_per_node, command))


# ---- environment ----------------------------------------------------------------------------------------------------


@app.command()
def env() -> None:
    """Show versions, devices and builds of operators that runs wait for, for a bug report."""
    from sdp_deepspeed.environment import describe_environment

    for line in describe_environment():
        print(line)
