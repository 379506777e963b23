r"""One stream of a rank's output, cut into lines that carry the rank.

A line becomes `[rank3]: text`, as torch marks the lines of a rank's traceback. Events of kdist stay as they are. The states
of a progress bar, which it draws over with `\r`, become lines from time to time, and its last state always does.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

LOG_SECONDS, LIVE_SECONDS = 5.0, 0.4
"""Between two states of a progress bar: in a log, and where a live view draws them in one place."""
_UNFINISHED_SECONDS = 1.0  # that a line may wait for its end
_BELOW_SECONDS = 0.1  # after which a bar that ended its line did not do so to draw the bar below it
_LONGEST_LINE = 1 << 16
_UP = b"\x1b[A"
_EVENT_START = b'{"time"'
_CONTROL = re.compile(rb"(\n|\r|\x1b\[A)")
_INVISIBLE = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]|\s")


class RankLines:
    r"""Lines of one stream. `live` ends the states of a progress bar by `\r\n`, by which the live view tells them."""

    def __init__(self, *, live: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._end_of_state = b"\r\n" if live else b"\n"
        self._interval = LIVE_SECONDS if live else LOG_SECONDS
        self._clock = clock
        self._prefix = b""
        self._row = b""
        self._drawn = False  # whether the row was begun by \r, as bars are
        self._grown_at = 0.0
        self._above: list[tuple[bytes, float]] = []  # rows of bars that may go on, and when they were left
        self._is_back = False  # whether the row is an older state, back from a bar below it
        self._state = b""  # a bar's state that was drawn over and is not shown yet
        self._shown, self._shown_at = b"", float("-inf")

    def begin(self, rank: int) -> None:
        """What comes now is written by this rank."""
        self._prefix = b"[rank%d]: " % rank

    def feed(self, data: bytes) -> list[bytes]:
        """Lines that are complete with `data`, and what else is due."""
        self._grown_at = self._clock()
        found: list[bytes] = []
        if self._drawn or self._above or b"\r" in data or _UP in data:
            for piece in _CONTROL.split(data):
                found += self._take(piece)
        else:
            *lines, self._row = (self._row + data).split(b"\n")
            found += [marked for line in lines for marked in self._mark(line)]
        while len(self._row) > _LONGEST_LINE:
            found += self._mark(self._row[:_LONGEST_LINE])
            self._row = self._row[_LONGEST_LINE:]
        return found + self.due()

    def due(self) -> list[bytes]:
        """What has waited long enough."""
        now, found = self._clock(), []
        while self._above and now >= self._above[0][1] + _BELOW_SECONDS:
            found += self._leave(self._above.pop(0)[0])
        if self._row and not self._drawn and now >= self._grown_at + _UNFINISHED_SECONDS:
            found += self._mark(self._row)
            self._row = b""
        state = self._newest_state()
        if state and now >= self._shown_at + self._interval:
            found.append(self._prefix + state + self._end_of_state)
            self._state, self._shown, self._shown_at = b"", state, now
        return found

    def wait_seconds(self) -> float | None:
        """In how long something is due; None if nothing waits."""
        times = [left_at + _BELOW_SECONDS for _, left_at in self._above[:1]]
        if self._row and not self._drawn:
            times.append(self._grown_at + _UNFINISHED_SECONDS)
        if self._newest_state():
            times.append(self._shown_at + self._interval)
        return max(0.0, min(times) - self._clock()) if times else None

    def finish(self) -> list[bytes]:
        """All that is left, at the end of the stream."""
        rows = [*(row for row, _ in self._above), self._row or self._state]
        self._above, self._row, self._drawn, self._state = [], b"", False, b""
        return [line for row in rows for line in self._leave(row)]

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
        if _EVENT_START in row or not (drawn or self._above) or (not drawn and _is_visible(row)):
            above, self._above = self._above, []
            left = [line for text, _ in above for line in self._leave(text)]
            return [*left, *self._mark(row)]
        if not self._is_back:
            self._state = b""
        self._above.append((row, self._clock()))
        return []

    def _leave(self, row: bytes) -> list[bytes]:
        """The last state of a bar as a line, nothing of a bar that was wiped out."""
        if not _is_visible(row):
            return []
        self._state = b""
        return self._mark(row)

    def _mark(self, text: bytes) -> list[bytes]:
        """The text as a line behind its rank, an event as it is; torch's own tracebacks name their rank already."""
        text = text.removesuffix(b"\r")
        start = text.find(_EVENT_START)
        if start >= 0 and _is_event(text[start:]):
            printed = text[:start]
            return [*(self._mark(printed) if _is_visible(printed) else []), text[start:] + b"\n"]
        prefix = b"" if text.startswith(self._prefix) else self._prefix
        return [prefix + text + b"\n"]


def _is_visible(text: bytes) -> bool:
    return bool(_INVISIBLE.sub(b"", text))


def _is_event(text: bytes) -> bool:
    try:
        event = json.loads(text)
    except ValueError:
        return False
    return isinstance(event, dict) and isinstance(event.get("event"), str)
