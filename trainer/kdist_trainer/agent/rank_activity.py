"""What the ranks of this node do, as `/status` shows it: since when a rank waits in its collective,
for how long nothing has been seen of it, and the line at which such a rank stands.

The heartbeat of a rank says what it is in, and not since when; an unchanged script sends none. A
rank of which nothing was seen for a while, and which is in no collective, is asked for its line by
a signal that only writes its stack: its peers may wait for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist_trainer.instrumentation.fault_handler import LOOK, look_path, read_line
from kdist_trainer.liveness import RankSnapshot
from kdist_trainer.process_tree import catches

LOOK_SECONDS = 15.0
"""How long nothing was seen of a rank before its line is asked for; then twice as long, and so on.
"""
MAX_LOOK_SECONDS = 60.0
_ANSWER_SECONDS = 0.5  # which a stack takes to be written


@dataclass
class _Rank:
    """What is known of one rank; times are monotonic."""

    seen: tuple[object, ...]
    moved_at: float | None = None
    entered_at: float | None = None
    next_look: float = 0.0
    pause: float = LOOK_SECONDS
    asked_at: float | None = None
    line: str = ""
    line_since: float | None = None
    ended: bool = False


class RankActivity:
    """Follows the ranks of one generation. `observe` is called on each pass of the agent's loop,
    `entries` by the exporter's threads.

    Args:
        scratch: The agent's scratch folder.
        pids: The process id of each rank, by local rank.
    """

    def __init__(self, scratch: Path, pids: Mapping[int, int]) -> None:
        self._scratch = scratch
        self._pids = pids
        self._ranks: dict[int, _Rank] = {}

    def observe(self, snapshots: Sequence[RankSnapshot], *, living: Collection[int]) -> None:
        """Take in the latest heartbeats; `living` are the local ranks that have not exited."""
        now = time.monotonic()
        for local_rank, snapshot in enumerate(snapshots):
            seen = (snapshot.count, snapshot.sequence, snapshot.inside)
            rank = self._ranks.get(local_rank)
            if rank is None:
                first = _Rank(seen, moved_at=now if any(seen) else None)
                rank = self._ranks[local_rank] = first
                rank.next_look = now + LOOK_SECONDS
                rank.entered_at = now if snapshot.inside else None
            elif seen != rank.seen:
                self._move(rank, snapshot, seen, now)
            rank.ended = local_rank not in living
            if not rank.ended and not snapshot.inside:
                self._look(local_rank, rank, now)

    def _move(
        self, rank: _Rank, snapshot: RankSnapshot, seen: tuple[object, ...], now: float
    ) -> None:
        if not snapshot.inside:
            rank.entered_at = None
        elif rank.entered_at is None or seen[1] != rank.seen[1]:
            rank.entered_at = now
        rank.seen, rank.moved_at = seen, now
        rank.next_look, rank.pause = now + LOOK_SECONDS, LOOK_SECONDS
        rank.asked_at, rank.line, rank.line_since = None, "", None

    def _look(self, local_rank: int, rank: _Rank, now: float) -> None:
        """Ask for the line if it is time, and read what was written since."""
        if rank.asked_at is not None and now - rank.asked_at >= _ANSWER_SECONDS:
            line = read_line(self._scratch, local_rank)
            if line != rank.line:
                rank.line, rank.line_since = line, rank.asked_at if line else None
            rank.asked_at = None
        if now < rank.next_look or rank.asked_at is not None:
            return
        rank.next_look, rank.pause = now + rank.pause, min(2 * rank.pause, MAX_LOOK_SECONDS)
        pid = self._pids[local_rank]
        # without a handler the signal would end the process: one that is another program by now
        if LOOK is not None and catches(pid, LOOK):
            with contextlib.suppress(OSError):
                os.truncate(look_path(self._scratch, local_rank), 0)
                os.kill(pid, LOOK)
                rank.asked_at = now

    def entries(self) -> dict[int, dict[str, Any]]:
        """Fields of `/status` by local rank, see `kdist_trainer.metrics.status`."""
        now = time.monotonic()
        return {number: _describe(rank, now) for number, rank in list(self._ranks.items())}


def _describe(rank: _Rank, now: float) -> dict[str, Any]:
    def since(at: float | None) -> float | None:
        return None if at is None else round(max(0.0, now - at), 1)

    return {
        "ended": rank.ended,
        "quiet_seconds": since(rank.moved_at),
        "collective_seconds": since(rank.entered_at),
        "line": rank.line or None,
        "line_seconds": since(rank.line_since),
    }
