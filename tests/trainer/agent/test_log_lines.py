"""A rank's output as lines that carry the rank, with progress bars as tqdm draws them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist_trainer.agent.logs import LIVE_SECONDS, LOG_SECONDS, RankLines

EVENT = json.dumps({"time": "2026-01-31T12:00:00.000Z", "event": "progress", "step": 1}).encode()


class Stream:
    """What rank 3 writes, at times that the test chooses; `lines` is what the log has got."""

    def __init__(self, *, live: bool = False) -> None:
        self.now = 100.0
        self.rank_lines = RankLines(live=live, clock=lambda: self.now)
        self.rank_lines.begin(3)
        self.lines: list[str] = []

    def write(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._take(self.rank_lines.feed(piece))

    def pause(self, seconds: float) -> None:
        """Let time pass as the relay does: it looks again whenever something is due."""
        end = self.now + seconds
        while (wait := self.rank_lines.wait_seconds()) is not None and self.now + wait <= end:
            self.now += wait
            self._take(self.rank_lines.due())
        self.now = end

    def end(self) -> None:
        self._take(self.rank_lines.finish())

    def _take(self, lines: list[bytes]) -> None:
        self.lines += [line.decode() for line in lines]


def test_every_line_carries_its_rank_also_one_that_looks_like_an_event() -> None:
    stream = Stream()
    stream.write(b"he", b"llo\n\n", EVENT + b"\n", b"\r" + EVENT, b"\n", b"\x1b[A" + EVENT + b"\n")
    stream.end()
    event = EVENT.decode()
    assert stream.lines[:3] == ["[rank3]: hello\n", "[rank3]: \n", f"[rank3]: {event}\n"]
    assert all(line.startswith("[rank3]: ") for line in stream.lines)


def test_a_worker_without_a_rank_prints_with_a_prefix_too() -> None:
    assert RankLines().feed(EVENT + b"\n") == [b"[worker]: " + EVENT + b"\n"]


@given(
    st.lists(
        st.sampled_from([b"\n", b"\r", b"\x1b[A", EVENT, b"x", b"\xe2\x80\xa8", b"[" * 70_000])
    )
)
def test_no_line_of_a_rank_is_without_its_prefix_or_longer_than_its_bound(
    pieces: list[bytes],
) -> None:
    stream = Stream()
    stream.write(*pieces)
    stream.pause(10)
    stream.end()
    lines = "".join(stream.lines).split("\n")
    assert lines.pop() == ""
    assert all(line.startswith("[rank3]: ") for line in lines)
    assert all(len(line) <= (1 << 16) + 100_000 for line in lines)


def test_what_torch_marks_with_the_rank_itself_is_not_marked_twice() -> None:
    stream = Stream()
    stream.write(b"[rank3]: Traceback (most recent call last):\n[rank1]: not mine\n")
    reported = ["[rank3]: Traceback (most recent call last):\n", "[rank3]: [rank1]: not mine\n"]
    assert stream.lines == reported


def test_a_line_without_an_end_is_shown_after_a_second() -> None:
    stream = Stream()
    stream.write(b"epoch 1:")
    stream.pause(0.9)
    assert stream.lines == []
    stream.pause(0.2)
    assert stream.lines == ["[rank3]: epoch 1:\n"]


@pytest.mark.parametrize(("live", "interval", "end"), [(False, 5.0, "\n"), (True, 0.4, "\r\n")])
def test_states_of_a_progress_bar_come_at_once_then_in_intervals_and_the_last_one_always(
    live: bool, interval: float, end: str
) -> None:
    assert interval == (LIVE_SECONDS if live else LOG_SECONDS)
    stream, times = Stream(live=live), []
    for percent in range(100):
        before = len(stream.lines)
        stream.write(b"\r%2d%%" % percent)
        stream.pause(0.1)
        times += [stream.now] if len(stream.lines) > before else []
    assert stream.lines[0] == f"[rank3]:  0%{end}"
    assert len(times) == pytest.approx(10 / interval, abs=1)
    assert all(late - early >= interval - 0.11 for early, late in pairwise(times))
    stream.write(b"\r100%", b"\n", b"saved\n")
    assert stream.lines[-2:] == ["[rank3]: 100%\n", "[rank3]: saved\n"]
    stream.pause(60)
    assert stream.lines[-1] == "[rank3]: saved\n", "no older state follows"


def test_a_bar_that_stands_still_is_shown_once() -> None:
    stream = Stream()
    stream.write(b"\r50%", b"\r50%")
    stream.pause(60)
    stream.write(b"\r50%")
    stream.pause(60)
    assert stream.lines == ["[rank3]: 50%\n"]


def test_bars_below_each_other_are_no_line_for_each_state() -> None:
    stream = Stream()
    for state in range(50):
        stream.write(b"\n", b"\rinner %d" % state, b"\x1b[A") if state else stream.write(b"\router")
        stream.pause(0.1)
    assert stream.lines == ["[rank3]: outer\n"]
    stream.pause(1)
    assert stream.lines[1:] == ["[rank3]: inner 49\n"]
    stream.write(b"\router done", b"\n")
    stream.pause(1)
    assert stream.lines[2:] == ["[rank3]: outer done\n"]


def test_a_bar_that_wipes_itself_out_leaves_no_line() -> None:
    stream = Stream()
    stream.write(b"\r50%", b"\r    \r", b"done\n")
    stream.pause(60)
    assert stream.lines == ["[rank3]: 50%\n", "[rank3]: done\n"]


@pytest.mark.parametrize("left", [b"\r98%\r99%", b"\r99%", b"\r99%\n"])
def test_the_end_of_the_rank_leaves_nothing_behind(left: bytes) -> None:
    stream = Stream()
    stream.write(b"\r97%", left)
    stream.end()
    assert stream.lines[-1] == "[rank3]: 99%\n"


def test_a_line_without_any_end_is_cut() -> None:
    stream = Stream()
    stream.write(*[b"x" * 50_000] * 4)
    assert [len(line) for line in stream.lines] == [len("[rank3]: \n") + (1 << 16)] * 3


@pytest.mark.parametrize(
    "pieces",
    [
        [b"one\r\ntwo\r\n"],
        [b"one\r", b"\ntwo\r", b"\n"],
        [b"one\r\n", b"two\r\n"],
        [b"one\r\r\ntwo\r\r\n"],
    ],
    ids=["at once", "cut between both", "a line at a time", "through two terminals"],
)
def test_lines_that_end_as_on_a_terminal_are_shown_once_each(pieces: list[bytes]) -> None:
    stream = Stream()
    stream.write(*pieces)
    stream.end()
    assert [line.strip() for line in stream.lines] == ["[rank3]: one", "[rank3]: two"]
