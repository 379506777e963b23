"""The history of a run as its agents record and read it: its events, in the ledger next to the
checkpoints or, of a run without them, in the rendezvous store.

The counters of an agent know only what its process has seen, so what a run did before its next
worker group is computed from the events. The agent supervises ranks that may continue without the
folder: no error of the storage ends it, and storage that does not answer is not waited for, but
what was known last counts (`RunRecords`).

The history shows whether starting a worker group takes longer than the time between losses: such a
run makes no progress, and ends by its limit of restarts (`describe_slow_start`). A start lasts from
the loss before it, or from the rendezvous, to the first finished step of the group; a group that
was lost before its first step shows only that a start takes at least that long.

`identify_code` is the digest of what a training computes by, so that two starts with the same
digest run the same code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol, TypeVar

import torch

import kdist_trainer
from kdist_trainer import log
from kdist_trainer.agent.coordination import FAILURE, PLANNED, AgentStore, Document, Generation
from kdist_trainer.agent.exit_record import read_done
from kdist_trainer.agent.settings import Settings
from kdist_trainer.checkpoint.ledger import RunLedger, StepLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import TrainConfig
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import finite_number
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.processes.threads import BoundedCalls

_RESTARTS: Final = "total_restarts"
_LOST_STEPS: Final = "total_lost_steps"
"""Fields of a generation in the events: what the run had come to when it began. Those of before
need not stay in the ledger.
"""

Event = Mapping[str, Any]


def read_totals(events: Iterable[Event]) -> tuple[int, int]:
    """The restarts after a failure and the lost steps since the run began."""
    restarts = lost = 0
    for event in _generations(events):
        if isinstance(event.get(_RESTARTS), int) and isinstance(event.get(_LOST_STEPS), int):
            restarts, lost = event[_RESTARTS], event[_LOST_STEPS]
        elif event.get("reason") == FAILURE:  # of a version that wrote no totals
            restarts += 1
    return restarts, lost


def find_reached(
    events: Iterable[Event],
    failures: Sequence[Failure],
    checkpoints: StoragePath | None,
    *,
    generation: int,
) -> int:
    """The last step that a worker group came to, as far as its failures, its events and the ledger
    of its steps tell.
    """
    began = [each for each in _generations(events) if each.get("generation") == generation]
    steps = [one.step for one in failures] + [each.get("from_step") for each in began]
    if checkpoints is not None:
        steps.append(StepLedger.find_last_step(checkpoints, generation))
    return max((step for step in steps if isinstance(step, int)), default=0)


def find_commit_time(events: Iterable[Event], step: int) -> float | None:
    """When the checkpoint of a step was committed, in Unix seconds; None if no event tells."""
    times = [
        finite_number(each.get("time"))
        for each in events
        if each.get("event") == "commit" and each.get("step") == step
    ]
    return next((at for at in reversed(times) if at is not None), None)


def sum_up(
    events: Sequence[Event], committed: int, *, reason: str, lost_steps: int
) -> dict[str, Any]:
    """Fields of a generation: what the run has come to as it begins.

    Args:
        events: Those before it.
        committed: The step of the newest checkpoint; 0 if there is none.
        reason: Why it begins.
        lost_steps: The steps that it begins below.
    """
    restarts, lost = read_totals(events)
    return {
        _RESTARTS: restarts + (reason == FAILURE),
        _LOST_STEPS: lost + lost_steps,
        "committed_step": committed or None,
        "committed_at": find_commit_time(events, committed) if committed else None,
    }


def to_event(generation: Generation) -> dict[str, int]:
    """What the event of a generation keeps of it; empty for one that sums nothing up."""
    if generation.total_restarts is None or generation.total_lost_steps is None:
        return {}
    return {_RESTARTS: generation.total_restarts, _LOST_STEPS: generation.total_lost_steps}


def _generations(events: Iterable[Event]) -> list[Event]:
    return [each for each in events if each.get("event") == "generation"]


_KEPT_EVENTS: Final = 1000


class EventLog(Protocol):
    """The storage of a run's events."""

    def append(self, event: str, **fields: Any) -> None: ...

    def events(self) -> list[dict[str, Any]]: ...

    def write_late(self) -> bool:
        """Write what could not be written before; returns whether there was anything. Raises
        `OSError`.
        """
        ...


class FolderEventLog:
    """Events of a run with checkpoints, in their folder. A folder that does not answer is not
    waited for, and what it refuses is written with the next event that it takes: the numbers of the
    generations, which the lock of the folder knows, must not be given twice.
    """

    def __init__(self, ledger: RunLedger, calls: BoundedCalls) -> None:
        self._ledger = ledger
        self._calls = calls
        self._late: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_KEPT_EVENTS)

    def append(self, event: str, **fields: Any) -> None:
        """Append an event. Raises `OSError`."""
        self._late.append((event, {"time": round(time.time(), 3), **fields}))
        self.write_late()

    def write_late(self) -> bool:
        """See `EventLog`."""
        if not self._late:
            return False
        self._calls.call(self._write)
        return True

    def events(self) -> list[dict[str, Any]]:
        """All events that were written. Raises `OSError`."""
        return self._calls.call(self._ledger.events)

    def _write(self) -> None:
        while self._late:
            event, fields = self._late[0]
            self._ledger.append(event, **fields)
            self._late.popleft()


class StoreEventLog:
    """Events of a run without checkpoints: kept in the rendezvous store, and lost with it."""

    def __init__(self, agent_store: AgentStore) -> None:
        self._agent_store = agent_store

    def append(self, event: str, **fields: Any) -> None:
        def edit(document: Document) -> None:
            told = {"time": round(time.time(), 3), "event": event, **fields}
            document["events"] = [*document.get("events", []), told][-_KEPT_EVENTS:]

        self._agent_store.change("events", edit)

    def events(self) -> list[dict[str, Any]]:
        return list(self._agent_store.read("events").get("events", []))

    def write_late(self) -> bool:
        """See `EventLog`."""
        return False


T = TypeVar("T")


class RunRecords:
    """The events, the checkpoints and the end of one run.

    Args:
        agent_store: The documents that agents share.
        checkpoints: The folder; None keeps the events in the store.
    """

    def __init__(self, agent_store: AgentStore, checkpoints: StoragePath | None) -> None:
        self._agent_store = agent_store
        self._checkpoints = checkpoints
        self._committed = 0
        self._known: list[dict[str, Any]] = []
        self._calls = BoundedCalls(f"the checkpoint folder {checkpoints}")
        self._events: EventLog = (
            StoreEventLog(agent_store)
            if checkpoints is None
            else FolderEventLog(RunLedger(checkpoints), self._calls)
        )

    def append_event(self, event: str, **fields: Any) -> bool:
        """Write an event; returns whether it was written. A disk error is logged only, and the
        event is written with the next one.
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

    def _read(self) -> list[dict[str, Any]]:
        """The events; those that were known last if the storage fails."""
        try:
            self._known = self._events.events()
        except OSError as error:
            log.warn("ledger-unreadable", message=f"the run ledger could not be read: {error}")
        return list(self._known)

    def ask(self, read: Callable[[], T], otherwise: T) -> T:
        """What `read` finds in the checkpoint folder; `otherwise` if that fails, or does not answer
        in time.
        """
        try:
            return self._calls.call(read)
        except OSError:
            return otherwise

    def close(self) -> None:
        """Write what the storage has refused before, if it takes it now."""
        with suppress(OSError):
            self._events.write_late()

    def read_done(self, settings: Settings) -> dict[str, Any] | None:
        """See `exit_record.read_done`; None too if the storage does not answer."""
        root, config = settings.checkpoints, settings.config
        return self.ask(lambda: read_done(root, config, run_id=settings.run_id), None)

    def committed_step(self) -> int:
        """The step of the newest committed checkpoint, 0 if there is none; the one that was known
        last if the storage fails.
        """
        if self._checkpoints is None:
            return 0
        try:
            newest = self._calls.call(Lock(self._checkpoints).find_newest)
        except OSError as error:
            message = f"the checkpoints could not be listed: {error}"
            log.warn("checkpoints-unreadable", message=message)
        else:
            self._committed = newest.step if newest else 0
        return self._committed


AT_START: Final = "at_start"
"""The field of a failure in the events: the group had not begun its first step."""
WAITED: Final = "waited"
"""The field of a failure in the events: the seconds that agents waited after it, starting nothing.
"""
LOSSES: Final = 3
"""So many groups in a row must have been lost as they started."""
_RECENT: Final = 5


def was_starting(
    document: Document, number: int, events: Sequence[Event], *, is_script: bool, tells: bool
) -> bool:
    """Whether the ranks of a group that has ended had not come to a step of their own. If nothing
    tells, they had.

    Args:
        document: The group's document.
        number: Its generation.
        events: The run's events so far.
        is_script: Whether its ranks run a script. Of one that reports no steps a collective shows
            that it has started.
        tells: Whether the events have the first step of each group.
    """
    firsts = {one.get("generation") for one in events if one["event"] == "first_step"}
    if number in firsts:
        return False
    begun = [one for one in events if one["event"] == "generation"]
    from_step = next(
        (one.get("from_step", 0) for one in begun if one.get("generation") == number), 0
    )
    states = [state for node in document.get("rank_states", {}).values() for state in node]
    if any(state["step"] > (0 if is_script else from_step) for state in states):
        return False
    if tells or firsts:
        return True
    return bool(states) and not (is_script and any(state["sequence"] for state in states))


def describe_slow_start(events: Iterable[Event]) -> str:
    """A sentence with both times, if the latest groups were all lost as they started; else empty.

    Args:
        events: The run's events so far, with the failure that ended the latest group.
    """
    apart, starts = _measure(events)
    if len(apart) < LOSSES:
        return ""
    lost = f"the last {len(apart)} worker groups were lost {median(apart[-_RECENT:]):.1f} s apart"
    known = median(starts[-_RECENT:]) if starts else 0.0
    took = f"takes {known:.1f} s"
    if known <= (longest := max(apart[-_RECENT:])):
        took = f"takes more than {longest:.1f} s"
    return (
        f"starting takes longer than the time between losses: {lost}, before their first step, and "
        f"a start {took}"
    )


def _measure(events: Iterable[Event]) -> tuple[list[float], list[float]]:
    """The seconds between the losses at the end of the events, each of which ended a group that
    started, and what starts have taken, oldest first.
    """
    apart: list[float] = []
    starts: list[float] = []
    began: dict[Any, float] = {}
    since: float | None = None
    for event in events:
        name, number = event["event"], event.get("generation")
        at = finite_number(event.get("time")) or 0.0
        if name == "generation":
            began[number] = at
            if event.get("reason") not in (FAILURE, *PLANNED):  # by hand: nothing was lost
                apart, since = [], None
        elif name == "first_step" and number in began:
            first = began.pop(number)  # of steps that are rolled back there may be another one
            starts.append(max(0.0, at - (first if since is None else since)))
            apart, since = [], None  # a later loss is not a loss of this start
        elif name == "commit":
            apart = []
        elif name == "failure":
            before = began.get(number, at) if since is None else since
            apart = [*apart, max(0.0, at - before)] if event.get(AT_START) else []
            since = at + (finite_number(event.get(WAITED)) or 0.0)
    return apart, starts


_MOST_FILES: Final = 2000
_MOST_NAMES: Final = 100_000
"""Names after which no further folder is looked into: there may be data below the code."""
_MOST_BYTES: Final = 1 << 20


def identify_code(config: TrainConfig, code: Path | None) -> str:
    """The digest. Files that cannot be read count by their names.

    Args:
        config: train.json.
        code: The folder of the job's code.
    """
    parts = {"job": config.to_job(), "kdist": kdist_trainer.__version__, "torch": torch.__version__}
    digest = hashlib.sha256(encode_json(parts, sort_keys=True).encode())
    workload = config.train.workload if config.train is not None else ""
    for root in ([] if code is None else [code]) + _find_package(workload):
        for path in _list_files(root):
            digest.update(os.fsencode(path.relative_to(root)) + b"\0")
            with suppress(OSError), path.open("rb") as file:
                digest.update(file.read(_MOST_BYTES))
    return digest.hexdigest()[:16]


def _find_package(workload: str) -> list[Path]:
    """The folders of the package of a workload `module:Class`, which is not imported."""
    module, separator, _ = workload.partition(":")
    if not separator:
        return []  # it is kdist's own
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    return [Path(each) for each in spec.submodule_search_locations or ()]


def _list_files(root: Path) -> Iterator[Path]:
    """The Python files below a folder in a fixed order, without those that are hidden."""
    left, names_left = _MOST_FILES, _MOST_NAMES
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__pycache__")))
        names_left -= len(names)
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(".py") and left and path.is_file():
                left -= 1
                yield path
        if not left or names_left < 0:
            return
