"""Which models can be masked, and whether their subnetworks are right, by an oracle that needs no names.

    python benchmarks/families.py --output benchmarks/results/families.json
    python benchmarks/families.py --output FILE --only 'seq2seq/|/gpt2/'   # measures these again

A small model with random weights of each class of Transformers' causal, masked, sequence-to-sequence and image
mappings; with `--timm FOLDER`, one of each of timm's modules. The folder is for PyTorch's CPU build, beside which
torchvision does not import: `pip install --no-deps --target FOLDER torchvision==0.28.0 timm`. For blocks and for
neurons, the subnetworks of two workers at C = 1/2 are compared with the dense model in which all parameters of absent
units are zero (common/zeroed_units.py).

Each model is built and measured in a forked process with a time limit. A run that ends early goes on from its file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import set_verbosity_error

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.provenance import write_result
from benchmarks.common.small_models import Case, build, cases, import_timm, run
from benchmarks.common.zeroed_units import Verdict, judge

STRATEGIES = {"blocks": "block", "neurons": "neuron"}
SECONDS = 400.0  # time limit of a model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--timm", metavar="FOLDER", help="with timm's modules, from a folder with torchvision and timm")
    parser.add_argument("--only", default="", help="regular expression of names: mapping/model type/class")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    set_verbosity_error()
    known: dict[str, Any] = {}
    if arguments.output.exists():
        known = json.loads(arguments.output.read_text(encoding="utf-8"))["models"]
    facts: dict[str, object] = {"what": "families"}
    if arguments.timm:
        facts["timm"] = import_timm(arguments.timm).__version__
    every = cases(arguments.timm)
    matching = [case for case in every if re.search(arguments.only, case.name)]
    left = [case for case in matching if arguments.only or case.name not in known]
    with torch.no_grad():  # a backward pass starts threads, which must not be forked
        run(build(Case("causal", "llama", "LlamaForCausalLM")))  # what it imports no process imports again
    for case, found in measured(left):
        known[case.name] = found
        words = "; ".join(f"{key} {found[key]['word']} {found[key]['reason']}" for key in STRATEGIES if key in found)
        print(f"{case.name}: {words or 'not built: ' + found['not built']}", flush=True)
        write_result(arguments.output, facts | {"models": dict(sorted(known.items()))})


def measured(left: Sequence[Case], seconds: float = SECONDS) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Figures of each model, as they come; each from a process of its own, which a crash or a hang ends alone."""
    fork = multiprocessing.get_context("fork")
    for case in left:
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=lambda case, to: to.send(measure(case)), args=(case, theirs), daemon=True)
        process.start()
        theirs.close()
        found: dict[str, Any] = {"not built": f"not done after {seconds:.0f} s"}
        try:
            if ours.poll(seconds):
                found = ours.recv()
        except EOFError:
            found = {"not built": "its process has died"}
        process.kill()
        process.join()
        yield case, found


def measure(case: Case) -> dict[str, Any]:
    """Verdicts of a model for both strategies, or why it could not be built, or runs neither in double precision nor in
    single."""
    try:
        model = build(case)
        try:
            model = model.double()
            run(model)
        except Exception:  # some code mixes in tensors in single precision
            model = build(case)
            run(model)
    except Exception as problem:  # of any kind
        return {"not built": _short(f"{type(problem).__name__}: {problem}")}
    found: dict[str, Any] = {}
    for key, strategy in STRATEGIES.items():
        try:
            verdict = judge(model, run, strategy)
        except Exception as problem:  # of any kind: an error that is no refusal is ours
            verdict = Verdict("crashed", f"{type(problem).__name__}: {problem}")
        found[key] = asdict(verdict) | {"reason": _short(verdict.reason)}
    return found


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:240]


if __name__ == "__main__":
    main()
