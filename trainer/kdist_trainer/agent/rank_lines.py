r"""Splits the output of a rank into lines with its prefix, such as `[rank3]: text`, as torch
prefixes the lines of a rank's traceback.

The states of a progress bar, which it overwrites with `\r`, become lines from time to time, and its
last state always does. Every line has a prefix, whatever the rank prints: only the agent writes
lines without one, so that no print is taken for an event.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

LOG_SECONDS, LIVE_SECONDS = 5.0, 0.4
"""The interval of the states of a progress bar: in a log, and in a live view that redraws them."""
_UNFINISHED_SECONDS = 1.0  # how long an incomplete line waits for its end
_BELOW_SECONDS = 0.1  # after which a bar that ended its line did not do so to draw the bar below it
_LONGEST_LINE = 1 << 16
NO_RANK = b"[worker]: "
"""The prefix of the output of a worker that has no rank yet: no line is without a prefix."""
_UP = b"\x1b[A"
END_OF_STATE = b"\r\n"
"""By which a live view recognizes the states of a progress bar."""
_CONTROL = re.compile(rb"(\n|\r|\x1b\[A)")
_INVISIBLE = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]|\s")


class RankLines:
    r"""Splits one stream into lines. `live` ends the states of a progress bar by `\r\n`, by which
    the live view recognizes them.
    """

    def __init__(self, *, live: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._end_of_state = END_OF_STATE if live else b"\n"
        self._interval = LIVE_SECONDS if live else LOG_SECONDS
        self._clock = clock
        self._prefix = NO_RANK
        self._row = b""
        self._drawn = False  # whether the row was begun by \r, as bars are
        self._grown_at = 0.0
        # rows of bars that may go on, and when they were left
        self._above: list[tuple[bytes, float]] = []
        self._is_back = False  # whether the row is an older state, back from a bar below it
        self._state = b""  # a bar's state that was drawn over and is not shown yet
        self._shown = b""
        self._shown_at = float("-inf")

    def begin(self, rank: int, *, generation: int = 0) -> None:  # noqa: ARG002 - as for events
        """Prefix the following output with this rank."""
        self._prefix = b"[rank%d]: " % rank

    def feed(self, data: bytes) -> list[bytes]:
        """Add output; returns the lines that are complete now, and those that are due."""
        self._grown_at = self._clock()
        found: list[bytes] = []
        if self._drawn or self._above or b"\r" in data or _UP in data:
            for piece in _CONTROL.split(data):
                found += self._take(piece)
        else:
            *lines, self._row = (self._row + data).split(b"\n")
            found += [marked for line in lines for marked in self._prefixed(line)]
        while len(self._row) > _LONGEST_LINE:
            found += self._prefixed(self._row[:_LONGEST_LINE])
            self._row = self._row[_LONGEST_LINE:]
        return found + self.due()

    def due(self) -> list[bytes]:
        """The lines that have waited long enough."""
        now, found = self._clock(), []
        while self._above and now >= self._above[0][1] + _BELOW_SECONDS:
            found += self._finish_row(self._above.pop(0)[0])
        if self._row and not self._drawn and now >= self._grown_at + _UNFINISHED_SECONDS:
            found += self._prefixed(self._row)
            self._row = b""
        state = self._newest_state()
        if state and now >= self._shown_at + self._interval:
            found.append(self._prefix + state + self._end_of_state)
            self._state, self._shown, self._shown_at = b"", state, now
        return found

    def wait_seconds(self) -> float | None:
        """The time until a line is due; None if nothing waits."""
        times = [left_at + _BELOW_SECONDS for _, left_at in self._above[:1]]
        if self._row and not self._drawn:
            times.append(self._grown_at + _UNFINISHED_SECONDS)
        if self._newest_state():
            times.append(self._shown_at + self._interval)
        return max(0.0, min(times) - self._clock()) if times else None

    def finish(self) -> list[bytes]:
        """All remaining lines, at the end of the stream."""
        rows = [*(row for row, _ in self._above), self._row or self._state]
        self._above, self._row, self._drawn, self._state = [], b"", False, b""
        return [line for row in rows for line in self._finish_row(row)]

    def _newest_state(self) -> bytes:
        is_row = self._drawn and not self._is_back and _is_visible(self._row)
        state = self._row if is_row else self._state
        return b"" if state == self._shown else state

    def _take(self, piece: bytes) -> list[bytes]:
        if piece == b"\n":
            return self._end_row()
        if piece in (b"\r", _UP):
            if _is_visible(self._row) and not self._is_back:
                self._state = self._row
            self._is_back = piece == _UP and bool(self._above)
            self._row = self._above.pop()[0] if self._is_back else b""
            self._drawn = True
        elif piece:
            self._row += piece
            self._is_back = False
        return []

    def _end_row(self) -> list[bytes]:
        row, drawn, self._row, self._drawn = self._row, self._drawn, b"", False
        if not (drawn or self._above) or (not drawn and _is_visible(row)):
            above, self._above = self._above, []
            left = [line for text, _ in above for line in self._finish_row(text)]
            return [*left, *self._prefixed(row)]
        if not self._is_back:
            self._state = b""
        self._above.append((row, self._clock()))
        return []

    def _finish_row(self, row: bytes) -> list[bytes]:
        """The last state of a bar as a line; no line for a bar that was erased."""
        if not _is_visible(row):
            return []
        self._state = b""
        return self._prefixed(row)

    def _prefixed(self, text: bytes) -> list[bytes]:
        """The text as a line with the prefix of its rank, which torch's own tracebacks have
        already.
        """
        text = text.removesuffix(b"\r")
        prefix = b"" if text.startswith(self._prefix) else self._prefix
        return [prefix + text + b"\n"]


def _is_visible(text: bytes) -> bool:
    return bool(_INVISIBLE.sub(b"", text))
