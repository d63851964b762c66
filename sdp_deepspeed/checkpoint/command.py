"""`sdp checkpoint`: checkpoints without a training job."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdp_deepspeed.checkpoint import files
from sdp_deepspeed.command_parser import Parser
from sdp_deepspeed.sizes import byte_count, bytes_text


def configure(parser: Parser) -> None:
    """Arguments of `sdp checkpoint`."""
    parser.description = "Look into checkpoints and convert them, without a training job."
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, run, purpose in (
        ("inspect", _inspect, "say what a checkpoint is, without reading its tensors"),
        ("verify", _verify, "compare its files with their checksums; exit code 1 if one is damaged"),
    ):
        action = actions.add_parser(name, help=purpose)
        action.description = f"{purpose[0].upper()}{purpose[1:]}."
        _add_checkpoint(action)
        action.set_defaults(run=run)
    _configure_export(actions.add_parser("export", help="write its dense model in Hugging Face's format"))
    _configure_from_zero(actions.add_parser("from-zero", help="convert a ZeRO checkpoint of DeepSpeed's"))


def _add_checkpoint(parser: Parser) -> None:
    parser.add_argument("checkpoint", type=Path, help="its folder, or the folder above (then the latest)")
    parser.add_argument("--tag", help="which checkpoint of the folder")


def _configure_export(parser: Parser) -> None:
    parser.description = "Write the dense model of a checkpoint in Hugging Face's format."
    _add_checkpoint(parser)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--dtype", choices=("as-trained", "fp32"), default="as-trained", help="fp32: from the masters")
    parser.add_argument(
        "--max-shard-size", type=byte_count, default="5GB", help="of a file; also the memory that is needed (5GB)"
    )
    parser.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer is added")
    parser.set_defaults(run=_export)


def _configure_from_zero(parser: Parser) -> None:
    parser.description = "Convert a ZeRO-1, 2 or 3 checkpoint of DeepSpeed to its universal format, which loads here."
    parser.add_argument("checkpoint", type=Path, help="its folder, or the folder above with `latest`")
    parser.add_argument("out", type=Path, help="the folder that engine.load_checkpoint gets")
    parser.add_argument("--tag", help="which checkpoint of the folder")
    parser.set_defaults(run=_from_zero)


def find_checkpoint(path: Path, tag: str | None = None) -> tuple[Path, str | None]:
    """The folder of a complete checkpoint, and a remark if it is not the one that `latest` names.

    Args:
        path: that folder, or the one above.

    Raises:
        ValueError: there is none.
    """
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    if tag is not None or (path / files.CHECKSUMS).is_file():
        found = path if tag is None else files.path_of(path, tag)
        files.read_checksums(found)
        return found, None
    complete, tags = files.complete_tags(path), files.tags_to_try(path)
    if not complete:
        raise ValueError(f"{path} has no complete checkpoint of sdp_deepspeed")
    if tags[0] in complete:
        return files.path_of(path, tags[0]), None
    return files.path_of(path, complete[0]), f"{path / files.LATEST} names {tags[0]!r}, which is not complete"


def _inspect(options: argparse.Namespace) -> int:
    path, remark = find_checkpoint(options.checkpoint, options.tag)
    print("\n".join([f"checkpoint {path}", *_description(path), *([remark] if remark else [])]))
    return 0 if remark is None else 1


def _description(path: Path) -> Iterator[str]:
    from sdp_deepspeed.checkpoint.manager import COMMON, dense_tensors, read_bytes
    from sdp_deepspeed.plan.coverage import in_words

    sizes = [size for size, _ in files.read_checksums(path)["files"].values()]
    reader = files.Reader(path)
    facts = read_bytes(reader, COMMON)
    steps = facts["common"].get("counters", {}).get("global_steps", "unknown")
    yield f"step {steps}, written by {facts['ranks']} ranks; {len(sizes)} files, {bytes_text(sum(sizes))}"
    plan = json.loads(facts["plan"])
    yield (
        f"plan {plan['hash'][:12]}: {plan['regime']} regime, {plan['strategy']} strategy, {plan['num_subnetworks']} "
        f"subnetworks, {len(plan['units'])} units with {in_words([len(unit['holders']) for unit in plan['units']])}"
    )
    kinds: dict[str, list[Any]] = defaultdict(list)
    for key, stored in dense_tensors(reader).items():
        kinds[key.partition("/")[0]].append(stored)
    for kind, tensors in kinds.items():
        elements = sum(stored.size.numel() for stored in tensors)
        size = sum(stored.size.numel() * stored.properties.dtype.itemsize for stored in tensors)
        dtypes = sorted({str(stored.properties.dtype).removeprefix("torch.") for stored in tensors})
        yield f"{kind}: {len(tensors)} tensors, {elements:,} elements, {bytes_text(size)}, {' and '.join(dtypes)}"


def _verify(options: argparse.Namespace) -> int:
    path, remark = find_checkpoint(options.checkpoint, options.tag)
    problems = [] if remark is None else [remark]
    problems += files.problems_in(path)
    print("\n".join(problems or [f"{path} is complete: sizes and checksums of all files are right"]))
    return 1 if problems else 0


def _export(options: argparse.Namespace) -> int:
    import torch

    from sdp_deepspeed.checkpoint.hugging_face import export
    from sdp_deepspeed.checkpoint.manager import COMMON, read_bytes

    path, _ = find_checkpoint(options.checkpoint, options.tag)
    if problems := files.problems_in(path):
        raise ValueError("; ".join(problems))
    reader = files.Reader(path)
    dtype = torch.float32 if options.dtype == "fp32" else None
    export(
        reader,
        read_bytes(reader, COMMON),
        options.out,
        dtype=dtype,
        max_shard_size=options.max_shard_size,
        tokenizer=options.tokenizer,
    )
    print(f"{path} -> {options.out}")
    return 0


def _from_zero(options: argparse.Namespace) -> int:
    from sdp_deepspeed.checkpoint.universal import convert

    print(convert(options.checkpoint, options.out, tag=options.tag))
    return 0
