"""The events of one rank, which come through a pipe of their own, so that nothing that a training
prints is taken for an event.

The agent writes them into its log as events of its own: in its own encoding, with the rank as the
agent knows it, and only those that ranks have. Anything else becomes text with the rank's prefix.
"""

from __future__ import annotations

from typing import Final

from kdist_trainer import log
from kdist_trainer.agent.rank_lines import NO_RANK
from kdist_trainer.untrusted_text import MalformedTextError, parse_object

NAMES: Final = frozenset(
    {
        "attributes-not-kept",
        "bench-begun",
        "bench-done",
        "bench-pairs",
        "bench-row",
        "bench-slow",
        "buffers-late",
        "checkpoint-committed",
        "checkpoint-failed",
        "checkpoint-fallback",
        "checkpoints-off",
        "continued",
        "control-unreachable",
        "data-parallel",
        "done",
        "early-stop",
        "evaluated",
        "evaluation-left",
        "first-step",
        "job-edited",
        "ledger-write-failed",
        "loss-not-finite",
        "not-reproducible",
        "observer-failed",
        "past-end",
        "preflight",
        "pretrained-loaded",
        "pretrained-mismatch",
        "profile",
        "profile-failed",
        "progress",
        "rank-parts-changed",
        "recovery-restarts",
        "replicas-differ",
        "resumed",
        "rolled-back",
        "save-interval",
        "save-waits",
        "settings-edited",
        "step-skipped",
        "stopped",
        "storage-not-shared",
        "storage-unavailable",
        "store-unbound",
        "tensorboard-missing",
        "tensorboard-not-written",
        "thread-failed",
        "timing-ended",
        "timing-failed",
        "training-started",
    }
)
"""The events that ranks log; all others are the agent's."""
_MAX_DEPTH = 20
_LEVELS = ("info", "warning", "error")


class RankEvents:
    """Splits the stream of one rank's events into lines for the log."""

    def __init__(self) -> None:
        self._prefix = NO_RANK
        self._known: dict[str, int] = {}
        self._rest = b""

    def begin(self, rank: int, *, generation: int) -> None:
        """The following events are of this rank and generation."""
        self._prefix = b"[rank%d]: " % rank
        self._known = {"rank": rank, "generation": generation}

    def feed(self, data: bytes) -> list[bytes]:
        """Add what the rank has written; returns the lines that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > log.MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [self._to_line(line) for line in lines]

    def finish(self) -> list[bytes]:
        """What is left at the end of the rank."""
        rest, self._rest = self._rest, b""
        return [self._to_line(rest)] if rest else []

    def _to_line(self, text: bytes) -> bytes:
        try:
            event = parse_object(text, max_bytes=log.MAX_LINE, max_depth=_MAX_DEPTH)
        except MalformedTextError:
            event = {}
        if (
            str(event.get("event")) not in NAMES
            or str(event.get("level")) not in _LEVELS
            or not isinstance(event.get("time"), str)
        ):
            return self._prefix + text + b"\n"
        return log.encode({**event, **log.bound_fields(), **self._known})
