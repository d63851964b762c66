"""`sdp checkpoint`: checkpoints without a training job."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdp_deepspeed.command_parser import Parser


def configure(parser: Parser) -> None:
    """Arguments of `sdp checkpoint`."""
    parser.description = "Look into checkpoints and convert them, without a training job."
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    verify = actions.add_parser("verify", help="say what a checkpoint is, and compare its files with their checksums")
    export = actions.add_parser("export", help="write its dense model in Hugging Face's format")
    from_zero = actions.add_parser("from-zero", help="convert a ZeRO checkpoint of DeepSpeed's to its universal format")
    for action in (verify, export, from_zero):
        action.add_argument("checkpoint", type=Path, help="its folder, or the folder above (then the latest)")
        action.add_argument("--tag", help="which checkpoint of the folder")
    export.add_argument("out", type=Path, help="a new folder")
    export.add_argument("--dtype", choices=("as-trained", "fp32"), default="as-trained", help="fp32: from the masters")
    export.add_argument("--max-shard-size", default="5GB", help="of a file; also the memory that is needed (5GB)")
    export.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer is copied")
    from_zero.add_argument("out", type=Path, help="the folder that engine.load_checkpoint gets")
    verify.set_defaults(run=_verify)
    export.set_defaults(run=_export)
    from_zero.set_defaults(run=_from_zero)


def find_checkpoint(path: Path, tag: str | None = None) -> Path:
    """The folder of a checkpoint.

    Args:
        path: that folder, or the one above with `latest`.

    Raises:
        ValueError: there is none.
    """
    from sdp_deepspeed.core.checkpoint import files

    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    tags = [tag] if tag is not None else [] if (path / files.CHECKSUMS).is_file() else files.tags_to_try(path)
    found = files.path_of(path, tags[0]) if tags else path
    files.read_checksums(found)
    return found


def _verify(options: argparse.Namespace) -> int:
    from sdp_deepspeed.core.checkpoint import files

    path = find_checkpoint(options.checkpoint, options.tag)
    found, problems = files.read_checksums(path)["files"], files.problems_in(path)
    print(f"checkpoint {path}: {len(found)} files, {sum(size for size, _ in found.values()):,} bytes")
    for line in problems or [*_description(path), "complete: sizes and checksums of all files are right"]:
        print(line)
    return 1 if problems else 0


def _description(path: Path) -> Iterator[str]:
    from sdp_deepspeed.core.checkpoint.files import Reader
    from sdp_deepspeed.core.checkpoint.manager import COMMON, dense_tensors, read_bytes

    reader = Reader(path)
    facts = read_bytes(reader, COMMON)
    plan = json.loads(facts["plan"])
    yield f"written by {facts['ranks']} ranks; plan {plan['hash'][:12]}: {plan['regime']} regime, {plan['strategy']}"
    of_kind: defaultdict[str, list[Any]] = defaultdict(list)
    for key, found in dense_tensors(reader).items():
        of_kind[key.partition("/")[0]].append(found)
    for kind, tensors in of_kind.items():
        dtypes = sorted({str(tensor.properties.dtype).removeprefix("torch.") for tensor in tensors})
        elements = sum(tensor.size.numel() for tensor in tensors)
        yield f"{kind}: {len(tensors)} tensors, {elements:,} elements, {' and '.join(dtypes)}"


def _export(options: argparse.Namespace) -> int:
    import torch

    from sdp_deepspeed.core.checkpoint.files import Reader, problems_in
    from sdp_deepspeed.core.checkpoint.hugging_face import export
    from sdp_deepspeed.core.checkpoint.manager import COMMON, read_bytes

    path = find_checkpoint(options.checkpoint, options.tag)
    if problems := problems_in(path):
        raise ValueError("; ".join(problems))
    reader, dtype = Reader(path), torch.float32 if options.dtype == "fp32" else None
    facts = read_bytes(reader, COMMON)
    form = {"max_shard_size": options.max_shard_size, "tokenizer": options.tokenizer}
    export(reader, facts, options.out, dtype=dtype, **form)
    print(f"{path} -> {options.out}")
    return 0


def _from_zero(options: argparse.Namespace) -> int:
    from sdp_deepspeed.core.checkpoint.universal import convert

    print(convert(options.checkpoint, options.out, tag=options.tag))
    return 0
