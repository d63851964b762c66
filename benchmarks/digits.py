"""Subnetworks beside data parallelism on scikit-learn's digits, at equal FLOPs, from several seeds. No network, no GPU.

python benchmarks/digits.py --output benchmarks/results/digits.json    # about half an hour on two cores

Each run is launch/train_vision.py as a user starts it, on four CPU ranks: the small ResNet and the settings of
configs/vision. The data-parallel run makes --epochs epochs of 1437 images, the others as many more as cost the same.
Runs that the output file has already are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the repository's root
from benchmarks.common.provenance import write_result  # noqa: E402
from sdp_deepspeed.config import KEY, MODES  # noqa: E402

NUM_RANKS = 4
MODEL, CONFIG = ROOT / "configs/vision/models/digits.json", ROOT / "configs/vision/digits.json"
# Name of a subject -> its block; None is data parallelism.
SUBJECTS: dict[str, dict[str, Any] | None] = {
    "data parallelism": None,
    **{f"{mode}, C = 1/2": {"regime": mode.regime, "strategy": mode.strategy, "coverage": 0.5} for mode in MODES},
    "forward x block, C = 1/2, re-drawn every 10 steps": {"coverage": 0.5, "redraw_interval": 10},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights, plan, order, crops")
    parser.add_argument("--epochs", type=float, default=16.0, help="of data parallelism (default 16)")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    options = parser.parse_args()
    result = _begun(options)
    for seed in options.seeds:
        for subject in options.subjects:
            if not any((run["subject"], run["seed"]) == (subject, seed) for run in result["runs"]):
                print(f"{subject}, seed {seed}", flush=True)
                result["runs"].append(
                    {"subject": subject, "seed": seed} | train(SUBJECTS[subject], seed, options.epochs)
                )
                write_result(options.output, result)


def _begun(options: argparse.Namespace) -> dict[str, Any]:
    """What the output file has of the same study; nothing of it yet where there is none."""
    fresh = {"what": "digits", "ranks": NUM_RANKS, "epochs": options.epochs, "model": _read(MODEL), "runs": []}
    path = Path(options.output)
    if not path.exists():
        return fresh
    found = _read(path)
    if any(found.get(key) != fresh[key] for key in ("what", "ranks", "epochs", "model")):
        sys.exit(f"error: {path} is of another study: remove it, or choose another --output")
    return fresh | {"runs": found["runs"]}


def train(block: dict[str, Any] | None, seed: int, epochs: float) -> dict[str, Any]:
    """One run: its accuracy, loss, steps, FLOPs of all ranks, and seconds with start, evaluation and export."""
    config = _read(CONFIG)
    config.pop(KEY)
    if block is not None:
        config[KEY] = block | {"seed": seed}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "data.json").write_text(json.dumps({"dataset": "digits", "seed": seed}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
        command += [str(ROOT / "launch/train_vision.py"), "--model", str(MODEL), "--data", str(folder / "data.json")]
        command += ["--deepspeed_config", str(folder / "config.json"), "--run-folder", str(folder / "run")]
        command += ["--epochs", str(epochs), "--equal-flops", "--label-smoothing", "0.1", "--seed", str(seed)]
        command += ["--eval-interval", "1000000", "--save-interval", "1000000"]
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        start = time.perf_counter()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        report = _read(folder / "run" / "report.json")
    kept = ("dense_top1", "dense_validation_loss", "steps", "flops", "coverage", "step_seconds")
    return {key: report[key] for key in kept} | {"seconds": seconds}


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


if __name__ == "__main__":
    main()
