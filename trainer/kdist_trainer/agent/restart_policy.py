"""The restart policy: numbers the generations, records why each began, and counts restarts against
the job's budget.

A failure that repeats at the same step without progress ends the run early; external causes (a
SIGKILL, a lost node, a full disk) never count as a repetition. Where no step is known, as for a
script, failures count as the same if the worker groups lived for about as long. The agent with
group rank 0 keeps the record. It reads earlier generations from the run ledger in the checkpoint
folder and from the agents' documents, so any agent may take over.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from kdist_trainer import log
from kdist_trainer.agent.coordination import AgentStore, Document, failures_of
from kdist_trainer.agent.exit_record import root_cause
from kdist_trainer.checkpoint.layout import CheckpointDirectory
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import Failure

MOST = 3
"""Times that the same failure may end a group in a row before it is held to come again for ever."""
_ITS_OWN = {Cause.SIGNAL, Cause.HANG, Cause.COLLECTIVE_TIMEOUT}
_FROM_OUTSIDE = re.compile(r"SIG(KILL|TERM|INT|HUP)|forkserver|KeyboardInterrupt")
_ALIKE, _ALIKE_SECONDS = 2.0, 5.0

Event = Mapping[str, Any]


def is_chance(failure: Failure) -> bool:
    """Whether a restart may well get past this failure."""
    return failure.cause not in _ITS_OWN or bool(_FROM_OUTSIDE.search(failure.message))


def count(events: Iterable[Event], failure: Failure) -> int:
    """The number of consecutive groups, up to that of `failure`, that ended alike without progress.

    `events` are the run's so far, in order; the event of `failure` may be among them or not.
    """
    began, earlier = _since_progress(events)
    wanted = _signature(failure.cause.value, failure.step, failure.message)
    lives = [failure.time - began.get(failure.generation, failure.time)]
    for event in reversed(earlier):
        number = event.get("generation", 0)
        if number >= failure.generation:
            continue
        if _signature(event.get("cause"), event.get("step"), str(event.get("message"))) != wanted:
            break
        lives.append(event.get("time", 0.0) - began.get(number, 0.0))
        if failure.step is None and max(lives) > _ALIKE * min(lives) + _ALIKE_SECONDS:
            lives.pop()
            break
    return len(lives)


def _since_progress(events: Iterable[Event]) -> tuple[dict[int, float], list[Event]]:
    """The start times of the groups since the last progress, by number, and the failures that ended
    them.
    """
    began: dict[int, float] = {}
    failures: list[Event] = []
    best = -1
    for event in events:
        name = event["event"]
        if name == "generation":
            if event.get("reason") not in ("failure", "join"):  # somebody has started the run again
                failures.clear()
            began[event.get("generation", 0)] = event.get("time", 0.0)
        elif name == "failure":
            failures.append(event)
        elif name == "commit" and isinstance(event.get("step"), int) and event["step"] > best:
            best = event["step"]
            failures.clear()
    return began, failures


def _signature(cause: object, step: object, message: str) -> tuple[object, object, str]:
    """The properties that identify a repeated failure, whichever rank had it first."""
    return cause, step, re.sub(r"\d+", "#", message.partition("\n")[0])


START, RESUME, JOIN, FAILURE = "start", "resume", "join", "failure"
_KEPT_EVENTS = 1000
_UNWRITTEN = "unwritten"
_LONGEST_PAUSE = 60


class EventLog(Protocol):
    """The storage of a run's events."""

    def append(self, event: str, **fields: Any) -> None: ...

    def events(self) -> list[dict[str, Any]]: ...


class StoreEventLog:
    """Events of a run without checkpoints: kept in the rendezvous store, and lost with it."""

    def __init__(self, exchange: AgentStore) -> None:
        self._exchange = exchange

    def append(self, event: str, **fields: Any) -> None:
        def edit(document: Document) -> None:
            events = [
                *document.get("events", []),
                {"time": round(time.time(), 3), "event": event, **fields},
            ]
            document["events"] = events[-_KEPT_EVENTS:]

        self._exchange.change("events", edit)

    def events(self) -> list[dict[str, Any]]:
        return list(self._exchange.read("events").get("events", []))


@dataclass(frozen=True)
class Generation:
    """One worker group. `restarts` is the part of the budget used without progress; `spent` means
    that it is exceeded.
    """

    number: int
    reason: str
    nodes: list[str]
    restarts: int = 0
    cause: str | None = None
    lost_steps: int = 0
    spent: bool = False
    bounds: tuple[int, int] = (0, 0)
    """The fewest and the most nodes, as the leader's train.json says: all ranks shall go by the
    same.
    """
    message: str = ""
    from_step: int = 0
    """The committed step that it goes on from; 0 where there is none."""
    same: int = 0
    """How often in a row the same failure ended a group, if it is no chance."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Generation:
        return cls(**json.loads(text))


def count_restarts(events: Iterable[dict[str, Any]]) -> int:
    """The failures since the committed step last rose, or since the run was ended and started again
    by hand.
    """
    failures, best = 0, -1
    for event in events:
        if event["event"] == "generation":
            failures = (
                failures + 1
                if event.get("reason") == FAILURE
                else failures
                if event.get("reason") == JOIN
                else 0
            )
        elif (
            event["event"] == "commit"
            and isinstance(event.get("step"), int)
            and event["step"] > best
        ):
            failures, best = 0, event["step"]
    return failures


def _pause(times: int) -> int:
    """Seconds to wait after something happened `times` times: 0 after the first,
    then increasing.
    """
    return min(2 ** (times - 2), _LONGEST_PAUSE) if times >= 2 else 0


class RestartLedger:
    """The events of one run, as its leader reads and writes them."""

    def __init__(
        self,
        exchange: AgentStore,
        *,
        checkpoints: Path | None,
        max_restarts: int,
        is_script: bool = False,
    ) -> None:
        self._exchange = exchange
        self._checkpoints = checkpoints
        self._events: EventLog = (
            StoreEventLog(exchange) if checkpoints is None else RunLedger(checkpoints)
        )
        self._max_restarts = max_restarts
        self._is_script = is_script

    def note(self, event: str, **fields: Any) -> bool:
        """Write an event; returns whether it was written. A disk error is logged and
        ends nothing.
        """
        try:
            self._events.append(event, **fields)
        except OSError as error:
            log.warn(
                "ledger-write-failed",
                message=f"{event} could not be written to the run ledger: {error}",
            )
            return False
        return True

    def note_failure(self, failure: Failure) -> None:
        """Write the failure that ended a generation, with its time."""
        fields = {
            "generation": failure.generation,
            "cause": failure.cause.value,
            "rank": failure.rank,
            "node": failure.node,
        }
        self.note(
            "failure",
            **fields,
            step=failure.step,
            message=failure.message[:500],
            time=round(failure.time, 3),
        )

    def open_generation(
        self, agents: dict[str, str], *, world_size: int, bounds: tuple[int, int] = (0, 0)
    ) -> Generation:
        """Begin the next generation, with `agents` (their incarnations by node), or find that the
        budget is used up.
        """
        events = self._read()
        last = max(
            self._exchange.last_generation(),
            *(one.get("generation", 0) for one in events if one["event"] == "generation"),
            0,
        )
        document = self._exchange.generation(last) if last else {}
        reason, failure = self._explain(last, document, agents)
        step = self.committed_step()
        restarts = 0
        if reason in (FAILURE, JOIN):
            restarts = count_restarts(events) + self._unwritten(step) + (1 if failure else 0)
        reached = max((one.step or 0 for one in failures_of(document)), default=0)
        if failure:
            self.note_failure(failure)
        same = count(events, failure) if failure and not is_chance(failure) else 0
        spent = failure is not None and (restarts > self._max_restarts or same >= MOST)
        generation = Generation(
            number=last + 1,
            reason=reason,
            nodes=sorted(agents),
            restarts=restarts,
            cause=failure.cause.value if failure else None,
            lost_steps=max(0, reached - step) if failure else 0,
            spent=spent,
            bounds=bounds,
            message=failure.message if failure else "",
            from_step=step,
            same=same,
        )
        if not spent:
            # First: an agent that dies between the two must not be taken for one that starts the
            # run anew.
            self._exchange.open_generation(last + 1, agents)
            fields: dict[str, Any] = {
                "world_size": world_size,
                "nodes": sorted(agents),
                "from_step": step,
            }
            if self._is_script:
                fields["entrypoint"] = "script"
            if (
                not self.note("generation", generation=last + 1, reason=reason, **fields)
                and reason == FAILURE
            ):
                self._count_unwritten(step)
        return generation

    def pause_seconds(self) -> int:
        """The wait before the next group: 0, or increasing once the disk has refused the events of
        two restarts.
        """
        return _pause(self._unwritten(self.committed_step()))

    def repeat_seconds(self) -> int:
        """The wait before the next group if the latest groups ended by the same failure; one more
        of them is needed if it may be chance.

        There is none after lost nodes, since restarting their agents takes time by itself, and none
        before the end of the run.
        """
        last = self._exchange.last_generation()
        failure = root_cause(failures_of(self._exchange.generation(last))) if last else None
        if failure is None or failure.cause is Cause.NODE_LOST:
            return 0
        events, chance = self._read(), is_chance(failure)
        times = count(events, failure)
        if (times >= MOST and not chance) or count_restarts(events) >= self._max_restarts:
            return 0
        return _pause(times - chance)

    def _unwritten(self, step: int) -> int:
        """Restarts since `step` was committed that are only in the rendezvous store, because the
        ledger could not be written.
        """
        document = self._exchange.read(_UNWRITTEN)
        return int(document["restarts"]) if document.get("step") == step else 0

    def _count_unwritten(self, step: int) -> None:
        count = self._unwritten(step) + 1
        self._exchange.change(
            _UNWRITTEN, lambda document: document.update(step=step, restarts=count)
        )

    def _explain(
        self, last: int, document: Document, agents: dict[str, str]
    ) -> tuple[str, Failure | None]:
        """Why a generation follows the one with this document."""
        if last == 0:
            return START, None
        if not document:
            return RESUME, None  # nobody of this store has seen it: the run was started anew
        known = failures_of(document)
        failure = root_cause(known)
        before: dict[str, str] = document.get("agents", {})
        gone = sorted(
            node for node, incarnation in before.items() if agents.get(node) != incarnation
        )
        lost_while_joining = failure is not None and gone and document.get("plan") == JOIN
        if "plan" in document and not (failure and failure.primary) and not lost_while_joining:
            return (JOIN if document["plan"] == JOIN else RESUME), None
        if failure and failure.primary:
            return FAILURE, failure
        if gone:
            return FAILURE, Failure(
                cause=Cause.NODE_LOST,
                code=Exit.PEERS_LOST,
                primary=True,
                message=f"{', '.join(gone)} went away",
                node=gone[0],
                generation=last,
                step=max((one.step for one in known if one.step is not None), default=None),
                time=min((one.time for one in known), default=time.time()),
            )
        return FAILURE, failure or Failure(
            Cause.RENDEZVOUS,
            Exit.PEERS_LOST,
            True,
            "the group did not come about",
            generation=last,
            time=time.time(),
        )

    def _read(self) -> list[dict[str, Any]]:
        try:
            return self._events.events()
        except OSError as error:
            log.warn("ledger-unreadable", message=f"the run ledger could not be read: {error}")
            return []

    def committed_step(self) -> int:
        """The step of the newest committed checkpoint; 0 if there is none."""
        if self._checkpoints is None:
            return 0
        newest = CheckpointDirectory(self._checkpoints).committed()
        return newest[0].step if newest else 0
