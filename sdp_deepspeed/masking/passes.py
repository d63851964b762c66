"""Forward passes of the dense model where units travel (forward regime): what comes, what stays, what all ranks agree
on before each.

Whatever way the parts come, ranks make the same number of passes, and weights that somebody changed between two passes
are the ones that the next one has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from sdp_deepspeed.distributed.monitored_barrier import MonitoredBarrier, Phase
from sdp_deepspeed.exchange.exchange import Steps
from sdp_deepspeed.masking.batch_norm import RunningStatistics
from sdp_deepspeed.masking.free_memory import free_memory
from sdp_deepspeed.masking.keeping import Decision, Vote, decide, fingerprint
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.part import DenseTensors
from sdp_deepspeed.masking.part_stream import PartStream, Targets

_WANTS = {"auto": None, "resident": True, "prefetch": False, "stream": False}


class Fetcher(Protocol):
    """Where parts come from; every rank calls `fetch` for the same parts in the same order."""

    def fetch(self, index: int, targets: Targets, num_rounds: int) -> Steps:
        """What this rank lacks of a part, to where `targets` makes room; yields when the first collectives run."""

    def held(self) -> Iterator[torch.Tensor]:
        """All weights that other ranks get from this one."""


class DensePasses:
    """Every rank calls the same, but for `take`.

    Args:
        mask: applied to a module.
        fetcher: of the mask's parts.
        barrier: where all ranks agree.
        device: of the module.
        report: told, on every rank, when the dense model begins to stay, or does not.
        statistics: of the module's batch norms, averaged when an evaluation begins.
    """

    def __init__(
        self,
        mask: Mask,
        fetcher: Fetcher,
        barrier: MonitoredBarrier,
        *,
        device: torch.device,
        report: Callable[[str], None],
        statistics: RunningStatistics,
    ) -> None:
        self.statistics = statistics
        self._mask = mask
        self._barrier = barrier
        self._device = device
        self._report = report
        self._reported: bool | None = None
        self._fetcher = fetcher
        self._stream = PartStream(mask.parts, fetcher.fetch, agree=self._agree, device=device)
        self._fingerprint: torch.Tensor | None = None  # of what is kept
        self._gave_way = False  # to something else that needed the memory, in this evaluation

    @property
    def are_running(self) -> bool:
        """Whether there is something to `end`."""
        return self._stream.in_pass

    def begin(self, evaluation: str) -> None:
        """A forward pass, once all ranks are there."""
        with _as_in_training():
            is_first = not self._barrier.num_forwards  # of an evaluation; of nothing that is kept
            found = self._weights_now() if self._stream.kept else None
            decision = decide(self._barrier.wait(Phase.FORWARD, self._vote(evaluation, found)))
            if is_first:
                self.statistics.average()
            if not decision.is_valid:
                self._gave_way |= bool(self._stream.kept) and not decision.keeps
                self._stream.drop()
                self._fingerprint = (self._weights_now() if found is None else found) if decision.keeps else None
            self._stream.begin(keeps=decision.keeps, ahead=evaluation != "stream")
        if evaluation == "auto":
            self._tell(decision)

    @contextmanager
    def all_at_once(self) -> Iterator[None]:
        """A pass in which each part is taken once, in order, for the whole model at once; all ranks are there."""
        self.drop()
        self.statistics.average()
        self._stream.begin(keeps=False, ahead=True)
        try:
            yield
        except Exception:  # of this rank alone, perhaps: others wait for its share of what is left
            self.end()
            raise
        self.end()

    def take(self, index: int) -> DenseTensors:
        """As `PartStream.take`."""
        with _as_in_training():
            return self._stream.take(index)

    def end(self) -> None:
        """Of the pass, however it ended."""
        with _as_in_training():
            self._stream.end()

    def drop(self) -> None:
        """An evaluation is over: give back what was kept for its next pass. A rank may do it alone; then all fetch."""
        self._stream.drop()
        self._fingerprint = None
        self._gave_way = False

    def _agree(self, where: tuple[int, int, bool]) -> None:
        notes = self._barrier.wait(Phase.PART, where)
        if len(set(notes)) > 1:
            names = [self._mask.parts[index].name for index, *_ in notes]
            raise RuntimeError(
                f"ranks run parts of the dense model in other orders than one another ({names[0]} on rank 0, here "
                f"{self._mask.parts[where[0]].name}): {self._barrier.words.order}"
            )

    def _vote(self, evaluation: str, found: torch.Tensor | None) -> Vote:
        parts, kept = self._mask.parts, self._stream.kept
        return Vote(
            wants=False if evaluation == "auto" and self._gave_way else _WANTS[evaluation],
            memory=free_memory(self._device) if evaluation == "auto" else None,
            has=sum(parts[index].num_bytes for index in kept),
            needs=sum(part.num_bytes for part in parts),
            is_valid=len(kept) == len(parts) and self._is_known(found),
        )

    def _is_known(self, found: torch.Tensor | None) -> bool:
        return found is not None and self._fingerprint is not None and torch.equal(found, self._fingerprint)

    def _weights_now(self) -> torch.Tensor:
        """What stands for all weights that other ranks get from this one, or that are in what it keeps."""
        return fingerprint((tensor.reshape(-1) for tensor in self._fetcher.held()), self._device)

    def _tell(self, decision: Decision) -> None:
        if self._reported != decision.keeps:
            self._reported = decision.keeps
            how = "stays on every rank" if decision.keeps else "comes part by part, each one ahead of its use"
            self._report(f"evaluation: the dense model {how} ({decision.reason})")


@contextmanager
def _as_in_training() -> Iterator[None]:
    """So that what is made in an evaluation is of use after it."""
    with torch.inference_mode(False), torch.no_grad():
        yield
