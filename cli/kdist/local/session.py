"""One invocation of a job on this machine: agents kept going, logs followed, signals obeyed, until all is over."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from kdist.local.follow import Entry, LogTail
from kdist.local.interrupts import Interrupts
from kdist.local.kubelet import AgentCommand, Kubelet, Outcome
from kdist.local.lifeline import Lifeline
from kdist.local.narrate import Narrator
from kdist.local.poll import StatusPoller
from kdist.local.progress import Progress

TICK = 0.25  # seconds between two looks at logs and agents; a signal or the end of an agent shortens it
FRAME = 0.5  # seconds between two drawings of the view: it shares the machine with the training
_WAITING_AGAIN = 30.0  # seconds after which a line off the terminal says the same once more


class Screen(Protocol):
    """Where the session shows itself: a live view, or plain lines. It never waits for whoever looks at it."""

    def show(self, entry: Entry) -> None:
        """One line that stays."""

    def draw(self, progress: Progress) -> None:
        """The state of now, which replaces the one before."""


@dataclass
class Session:
    """What `run` needs. `stopped_by` is the signal that asked for the end, if one did."""

    commands: Sequence[AgentCommand]
    kubelet: Kubelet
    progress: Progress
    lifeline: Lifeline
    poller: StatusPoller
    narrator: Narrator
    screen: Screen
    stopped_by: signal.Signals | None = None
    _tails: dict[str, LogTail] = field(init=False)
    _waiting: tuple[str, float] = field(init=False, default=("", 0.0))
    _drawn_at: float = field(init=False, default=-FRAME)
    _blind: bool = field(init=False, default=False)  # the screen has gone: a closed terminal, a pipe that nobody reads

    def __post_init__(self) -> None:
        self._tails = {command.node: LogTail(command.node, command.log) for command in self.commands}

    def run(self) -> Outcome:
        """Start the agents and see them to their end. Raises `OSError` when they cannot be started."""
        with Interrupts() as interrupts:
            try:
                self.poller.start()
                self.kubelet.start()
                while self.kubelet.poll():
                    self._obey(interrupts.received)
                    self._look()
                    interrupts.wait(0 if any(tail.behind for tail in self._tails.values()) else TICK)
                self._look(last=True)
            finally:
                self.poller.close()
                self.kubelet.close()
                self.lifeline.close()
        return self.kubelet.outcome

    def tell(self, node: str, event: str, /, **fields: object) -> None:
        """Take an event of kdist's own, in the form of the trainer's. What a node said before its agent ended comes first."""
        if event in ("agent-ended", "agent-restarting"):
            for entry in self._tails[node].read(last=True):
                self._take(entry)
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._take(Entry(node, {"time": stamp, "event": event, "level": "info", **fields}, ""))

    def _obey(self, received: list[signal.Signals]) -> None:
        while received:
            number = received.pop(0)
            if self.stopped_by is None:
                self.stopped_by = number
                self.tell("kdist", "stopping", reason=f"{number.name}; once more ends it now, without saving")
                self.kubelet.stop()
            else:
                self.tell("kdist", "killing", message=f"{number.name} again: ends now, without saving")
                self.kubelet.kill()

    def _look(self, *, last: bool = False) -> None:
        read = [entry for tail in self._tails.values() for entry in _dated(tail.read(last=last))]
        for _, entry in sorted(read, key=lambda dated: dated[0]):  # so that a cause is told before what follows from it elsewhere
            self._take(entry)
        for node, answer in self.poller.answers().items():
            self.progress.observe_answer(node, answer)
        self._tell_what_it_waits_for()
        now = self.progress.clock()
        if last or now - self._drawn_at >= FRAME:
            self._drawn_at = now
            self._show(lambda: self.screen.draw(self.progress))

    def _take(self, entry: Entry) -> None:
        if entry.event is not None:
            before = self.progress.step
            self.progress.observe(entry.node, entry.event)
            if self.progress.step > before or entry.event["event"] == "checkpoint-committed":
                self.kubelet.note_progress()
            if not self.narrator.is_news(entry.event):
                return
        else:
            self.progress.observe_print(entry)
        self._show(lambda: self.screen.show(entry))

    def _show(self, what: Callable[[], None]) -> None:
        """A training does not end because nobody can watch it any more."""
        if not self._blind:
            try:
                what()
            except OSError:
                self._blind = True

    def _tell_what_it_waits_for(self) -> None:
        sentence = self.progress.waiting_for()
        words = re.sub(r"no step for.*", "no step", sentence or "")
        said, at = self._waiting
        now = self.progress.clock()
        if words != said or (words and now - at > _WAITING_AGAIN):
            self._waiting = (words, now)
            if sentence:
                self.tell("kdist", "waiting", message=sentence)


def _dated(entries: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
    """Each entry with its time, as text that sorts; what is printed counts with the event before it."""
    time = ""
    for entry in entries:
        time = str((entry.event or {}).get("time", time))
        yield time, entry
