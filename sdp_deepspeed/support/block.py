"""Rows of the support table about the block itself, as DeepSpeed's engine takes it."""

from __future__ import annotations

from sdp_deepspeed.config import KEY
from sdp_deepspeed.support.conditions import fetches_in_backward_regime, scales_backward_branches
from sdp_deepspeed.support.rows import Row, refused, works

BLOCK: tuple[Row, ...] = (
    works("forward regime", f"{KEY}.regime", "forward"),
    works("backward regime", f"{KEY}.regime", "backward"),
    works("block strategy", f"{KEY}.strategy", "block"),
    works("neuron strategy", f"{KEY}.strategy", "neuron"),
    works("strategy by part", f"{KEY}.strategy", {"attention": "neuron", "mlp": "block"}),
    works("coverage over depth and by name", f"{KEY}.coverage", [{"units": "mlp", "coverage": 0.5}]),
    works(
        "coverage over time; no compiled modules",
        f"{KEY}.schedule",
        [{"until_step": 1, "coverage": 0.5}, {"coverage": 1.0}],
    ),
    works("another assignment from time to time, under the same conditions", f"{KEY}.redraw_interval", 100),
    works("groups of neurons", f"{KEY}.neuron_groups", 4),
    works("scaled dense branches, forward regime", f"{KEY}.dense_branch_scale", "coverage"),
    refused(
        "scaled dense branches, backward regime",
        f"{KEY}.dense_branch_scale",
        "coverage",
        scales_backward_branches,
        "its workers train the whole model, which needs no scale; remove the key",
    ),
    works("learning rates by coverage", f"{KEY}.lr_by_coverage", "sqrt"),
    Row(
        "learning rates by coverage of an optimizer whose steps no lr decides",
        "",
        "refused",
        note="lr=None, relative_step, PyTorch's Adafactor: there is nothing to multiply; remove the key",
    ),
    works("dense model in evaluation: resident, prefetched, streamed", f"{KEY}.evaluation", "prefetch"),
    refused(
        "ways of the dense model, backward regime",
        f"{KEY}.evaluation",
        "prefetch",
        fetches_in_backward_regime,
        "every rank has the dense model; remove the key",
    ),
    works("one subnetwork for each data-parallel rank", f"{KEY}.subnetworks", "auto"),
    works("replicas of subnetworks", f"{KEY}.subnetworks", 1),
    works("bits of holders compared after each step", f"{KEY}.check_agreement", True),
    works("permission for unknown optimizers", f"{KEY}.allow_optimizer", True),
    works("limit for silent ranks", f"{KEY}.silence_limit", 60.0),
    works("checkpoints in the background", f"{KEY}.checkpoint", {"asynchronous": True}),
)
