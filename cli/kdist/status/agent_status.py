"""An agent's `/status` document. It comes from a pod and may be stale, invalid, or of another run:
`read_agent_document` keeps the known fields of the right type and of the size that an honest agent
sends, and `AgentStatus` reads fields that are missing as None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from kdist.status import documents
from kdist.status.pods import ExitRecord
from kdist.units import count
from kdist_trainer.formats import MAX_NODES

RUNNING_STATES = ("running", "checkpointing")
JOINING_STATES = ("pending", "rendezvous", "initializing")
STANDBY_STATE = "standby"
_TRAINING_STATES = (*RUNNING_STATES, "initializing", "hung")
FINISHED_STATES = ("succeeded", "failed")

_T = TypeVar("_T")
# names in a document that differ from those of the fields
_NAMES: Final = {
    "restarts_left": "restarts_remaining",
    "checkpoint_step": "last_checkpoint_step",
    "checkpoint_time": "last_checkpoint_time",
    "at_risk": "at_risk_seconds",
}
_RANK_NAMES: Final = {
    "silence": "heartbeat_age",
    "waiting": "collective_seconds",
    "quiet": "quiet_seconds",
}


@dataclass(frozen=True)
class RankStatus:
    """One rank, as its agent reports it.

    Attributes:
        pod: name of the rank's pod.
        step_seconds: mean or smoothed seconds per step; `busy_seconds` and `all_reduce_seconds`
            are parts of it.
        silence: seconds since its last heartbeat.
        collective: the collective that it is in, such as `all_reduce(float32[1024]) #17`; empty if
            it is in none.
        waiting: seconds that it has been in the collective.
        quiet: seconds since it sent a heartbeat, or a collective of it began or ended; None if
            neither was seen, or its agent does not tell.
        line: where its main thread stood when nothing had been seen of it for a while, such as
            `train.py:24 in step`; empty if that is unknown.
        line_seconds: for how long it has stood there at least.
        group: whether a rank of a script has formed a process group with others; None if that is
            not known.
        active: whether it trains: one that has exited, or whose group has ended, says nothing about
            the present.
    """

    rank: int
    pod: str
    local_rank: int = 0
    step: int | None = None
    phase: str = ""
    step_seconds: float | None = None
    busy_seconds: float | None = None
    all_reduce_seconds: float | None = None
    silence: float | None = None
    collective: str = ""
    waiting: float | None = None
    quiet: float | None = None
    line: str = ""
    line_seconds: float | None = None
    group: bool | None = None
    active: bool = True


@dataclass(frozen=True)
class LastFailure:
    """What ended the latest worker group of an agent.

    Attributes:
        time: unix seconds.
        primary: whether it happened by itself, and followed from no other failure.
        full: a sentence about folders that had no room then; empty if all had.
        is_full: whether such a folder has none now; None if that is not known.
    """

    cause: str
    message: str = ""
    rank: int | None = None
    node: str = ""
    machine: str = ""
    step: int | None = None
    time: float | None = None
    primary: bool = True
    full: str = ""
    is_full: bool | None = None


@dataclass(frozen=True)
class PeerStatus:
    """The agents that the rendezvous lists, as one of them sees it, by their pods' addresses.

    Attributes:
        heard: those whose keep-alives arrive.
        silent: those whose keep-alives are missing, as long as they are listed.
        age: seconds since the agent has read the rendezvous.
    """

    heard: frozenset[str]
    silent: frozenset[str]
    age: float


@dataclass(frozen=True)
class MachineFaults:
    """How often a GPU or the node of a machine has failed in a run, and the last time (unix
    seconds) with its cause.
    """

    machine: str
    faults: int
    cause: str = ""
    message: str = ""
    time: float | None = None

    @property
    def summary(self) -> str:
        """The number of its faults, and what the last one was, as far as it is known."""
        last = ": ".join(filter(None, (self.cause, self.message)))
        return count(self.faults, "fault") + (f", last {last}" if last else "")

    def __str__(self) -> str:
        return f"{self.machine}: {self.summary}"


@dataclass(frozen=True)
class AgentStatus:
    """Report of one agent. Unknown numbers are None; a loss may be NaN. `peers` is None where the
    agent cannot tell, or is of a version that does not report it. `refused`: the API server
    refuses it the rendezvous. `waiting_for`: what it waits for before it tries again. `slow_start`:
    that starting takes longer than the time between losses, while its ranks start.
    `failed_saves`: checkpoints that could not be saved since the last one, `checkpoint_room`: the
    room of their folder then. `at_risk`: seconds of training that no checkpoint holds, from the
    agent that runs rank 0. `machine_faults`: those of the whole run, the latest at the end.
    """

    pod: str
    state: str
    run_id: str = ""
    generation: int = 0
    world_size: int = 0
    step: int | None = None
    target_steps: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    samples_per_second: float | None = None
    restarts: int = 0
    restarts_left: int | None = None
    lost_steps: int = 0
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None
    at_risk: float | None = None
    checkpoint_interval: float | None = None
    checkpoint_bytes: float | None = None
    ranks: tuple[RankStatus, ...] = ()
    exit: ExitRecord | None = None
    peers: PeerStatus | None = None
    refused: bool = False
    last_failure: LastFailure | None = None
    waiting_for: str = ""
    slow_start: str = ""
    devices: str = ""
    tracker: str = ""
    failed_saves: int = 0
    checkpoint_room: str = ""
    machine_faults: tuple[MachineFaults, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether the agent's work has ended. Its pod may stay alive."""
        return self.state in FINISHED_STATES

    @classmethod
    def read(cls, pod: str, document: object) -> AgentStatus | None:
        """Read a `/status` document; None if it has no state."""
        state = documents.text(document, "state")
        if not state:
            return None
        found = documents.read_fields(
            cls,
            document,
            _NAMES,
            pod=pod,
            ranks=tuple(_ranks(pod, document, active=state in _TRAINING_STATES)),
            exit=ExitRecord.read(documents.at(document, "exit")),
            peers=_read_peers(documents.mapping(document, "peers")),
            refused=documents.at(document, "rendezvous_refused") is True,
            last_failure=_read_failure(documents.mapping(document, "last_failure")),
            machine_faults=read_machine_faults(document, "machine_faults"),
        )
        return cls(**found)


def _read_peers(document: object) -> PeerStatus | None:
    age = documents.number(document, "age_seconds")
    if age is None or not math.isfinite(age):
        return None
    return PeerStatus(
        frozenset(documents.texts(document, "heard")),
        frozenset(documents.texts(document, "silent")),
        age,
    )


def read_machine_faults(document: object, name: str) -> tuple[MachineFaults, ...]:
    """The faults of machines under this name; those without a machine are left out."""
    found = [each for each in documents.items(document, name) if documents.text(each, "machine")]
    counts = [clamp_faults(documents.integer(each, "faults") or 0) for each in found]
    return tuple(
        MachineFaults(**documents.read_fields(MachineFaults, each, faults=faults))
        for each, faults in zip(found, counts, strict=True)
    )


def clamp_faults(faults: int) -> int:
    """A number of faults that somebody tells, within what the status of a TrainingJob takes."""
    return min(max(0, faults), _MOST_FAULTS)


def _read_failure(document: object) -> LastFailure | None:
    if not documents.text(document, "cause"):
        return None
    primary = documents.at(document, "primary") is not False
    return LastFailure(**documents.read_fields(LastFailure, document, primary=primary))


def _ranks(pod: str, document: object, *, active: bool) -> Iterator[RankStatus]:
    for each in documents.items(document, "ranks"):
        if documents.integer(each, "rank") is None:
            continue
        # agents of versions without `ended` report the last phase of an exited rank for ever
        ended = documents.at(each, "ended")
        exited = ended is True or (ended is None and documents.text(each, "phase") == "exit")
        trains = active and not exited
        yield RankStatus(
            **documents.read_fields(RankStatus, each, _RANK_NAMES, pod=pod, active=trains)
        )


def read_reports(documents: Mapping[str, object], *, run_id: str) -> dict[str, AgentStatus]:
    """Read the `/status` documents of one run, by pod. Reports with another run's id are left out,
    unless `run_id` is empty.
    """
    read = {pod: AgentStatus.read(pod, document) for pod, document in documents.items()}
    return {
        pod: report
        for pod, report in read.items()
        if report and (not run_id or report.run_id in ("", run_id))
    }


def newest_generation(reports: Mapping[str, AgentStatus]) -> list[AgentStatus]:
    """The reports of the newest generation, rank 0's first. An agent that has lost contact to the
    others still reports an older one.
    """
    newest = max((report.generation for report in reports.values()), default=0)
    current = [report for report in reports.values() if report.generation == newest]
    return sorted(
        current, key=lambda report: min((rank.rank for rank in report.ranks), default=1 << 30)
    )


def read_training(current: Sequence[AgentStatus], *, step: int | None = None) -> dict[str, Any]:
    """The training's numbers as attributes of a `JobStatus`, from the reports of
    `newest_generation`; `step` is the last one, if no report has one. What no report says is None,
    0 or empty.
    """
    ranks = sorted(
        (rank for report in current for rank in report.ranks), key=lambda rank: rank.rank
    )
    steps = [report.step for report in current if report.step is not None]
    rates = [
        rate
        for report in current
        if (rate := report.samples_per_second) is not None and math.isfinite(rate)
    ]
    all_reduces = [rank.all_reduce_seconds for rank in ranks if rank.all_reduce_seconds is not None]
    saved = max(
        (
            (report.checkpoint_step, report.checkpoint_time)
            for report in current
            if report.checkpoint_step is not None
        ),
        key=lambda one: one[0],
        default=(None, None),
    )
    # what happened by itself counts before what only followed from it
    found = [report.last_failure for report in current if report.last_failure is not None]
    # an agent without the sentence has ranks that have come further
    slow_starts = [report.slow_start for report in current]
    return {
        "generation": max((report.generation for report in current), default=0),
        "world_size": max((report.world_size for report in current), default=0),
        "step": max(steps, default=step),
        "target_steps": _first(report.target_steps for report in current),
        "loss": _first(report.loss for report in current),
        "learning_rate": _first(report.learning_rate for report in current),
        "throughput": sum(rates) if rates else None,
        "restarts_left": _first(report.restarts_left for report in current),
        "lost_steps": max((report.lost_steps for report in current), default=0),
        "last_checkpoint_step": saved[0],
        "last_checkpoint_time": saved[1],
        "at_risk": max((one.at_risk for one in current if one.at_risk is not None), default=None),
        "checkpoint_interval": _first(report.checkpoint_interval for report in current),
        "checkpoint_bytes_per_hour": _first(_bytes_per_hour(report) for report in current),
        # The shortest time is the transfer; the longer ones include waiting for slower ranks.
        "all_reduce_seconds": min(all_reduces, default=None),
        "ranks": tuple(ranks),
        "last_failure": max(found, key=lambda each: (each.primary, each.time or 0.0), default=None),
        "failed_saves": max((report.failed_saves for report in current), default=0),
        "checkpoint_room": _first(report.checkpoint_room or None for report in current) or "",
        "waiting_for": next((report.waiting_for for report in current if report.waiting_for), ""),
        "slow_start": slow_starts[0] if slow_starts and all(slow_starts) else "",
        "tracker": next((report.tracker for report in current if report.tracker), ""),
        "machine_faults": max(
            (report.machine_faults for report in current),
            key=lambda known: sum(each.faults for each in known),
            default=(),
        ),
        "devices": ", ".join(sorted({report.devices for report in current if report.devices})),
    }


def _bytes_per_hour(report: AgentStatus) -> float | None:
    """What checkpoints write in an hour at the interval of now."""
    interval, nbytes = report.checkpoint_interval, report.checkpoint_bytes
    if interval is None or nbytes is None or interval <= 0:
        return None
    rate = nbytes / interval * 3600
    return rate if math.isfinite(rate) else None


def _first(values: Iterable[_T | None]) -> _T | None:
    return next((value for value in values if value is not None), None)


RANKS: Final = 256
"""Ranks of one agent, which are those of one node."""
_MOST_FAULTS: Final = 1_000_000
_WORD: Final = 64
_LINE: Final = 256
_LINES: Final = 64
_NUMBER: Final = 1 << 63
_CATEGORIES: Final = 32


def _told(kind: type, names: Mapping[str, str]) -> set[str]:
    """The names in a document of what a dataclass keeps as a text or a number."""
    told = {names.get(each.name, each.name) for each in fields(kind) if each.type in _PLAIN}
    return told - {"pod"}


_PLAIN: Final = ("str", "int", "int | None", "float | None", "bool | None")
_FIELDS: Final = (
    *sorted(_told(AgentStatus, _NAMES)),
    *("job", "node", "pid", "phase", "exchange_key"),
    *("connections_refused", "rendezvous_refused", "rendezvous_refusal"),
)
_RANK_FIELDS: Final = (*sorted(_told(RankStatus, _RANK_NAMES)), "ended")
_FAILURE_FIELDS: Final = ("cause", "rank", "node", "machine", "step", "time", "primary", "is_full")
_EXIT_FIELDS: Final = (
    "code",
    "cause",
    "outcome",
    "node",
    "rank",
    "step",
    "generation",
    "time",
    "collective",
    "whole",
)


def read_agent_document(document: object) -> dict[str, Any]:
    """The document without what is not known, of another type, or too large. What is null stays."""
    found = _scalars(document, _FIELDS)
    _add(found, document, "nodes", lambda each: _scalars(each, ("min", "max")))
    _add(found, document, "wall_seconds", _read_seconds)
    _add(found, document, "exit", _trim_exit)
    _add(found, document, "peers", _trim_peers)
    _add(found, document, "last_failure", _trim_failure)
    if isinstance(documents.at(document, "ranks"), list):
        ranks = documents.items(document, "ranks")[:RANKS]
        found["ranks"] = [_scalars(each, _RANK_FIELDS) for each in ranks]
    if isinstance(documents.at(document, "machine_faults"), list):
        names, faults = ("machine", "faults", "cause", "message", "time"), "machine_faults"
        found[faults] = [
            _scalars(each, names) for each in documents.items(document, faults)[:RANKS]
        ]
    return found


def _add(
    found: dict[str, Any], document: object, name: str, read: Callable[[Any], dict[str, Any]]
) -> None:
    value = documents.at(document, name)
    if isinstance(value, Mapping):
        found[name] = read(value)
    elif value is None and isinstance(document, Mapping) and name in document:
        found[name] = None


def _scalars(document: object, names: Iterable[str]) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        return {}
    return {name: document[name] for name in names if name in document and _fits(document[name])}


def _fits(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _LINE and value.isascii()
    if isinstance(value, int):
        return -_NUMBER < value < _NUMBER
    return value is None or isinstance(value, float)


def _read_seconds(document: Mapping[Any, Any]) -> dict[str, Any]:
    kept = [
        (name, value)
        for name, value in document.items()
        if len(name) <= _WORD and isinstance(value, int | float) and _fits(value)
    ]
    return dict(kept[:_CATEGORIES])


def _trim_exit(document: Mapping[Any, Any]) -> dict[str, Any]:
    lines = {
        name: [each[:_LINE] for each in documents.texts(document, name)[-_LINES:]]
        for name in ("traceback", "collectives")
    }
    told = {
        name: documents.text(document, name)[: _LINES * _WORD]
        for name in ("message", "advice", "signature")
    }
    return {**_scalars(document, _EXIT_FIELDS), **told, **lines}


def _trim_failure(document: Mapping[Any, Any]) -> dict[str, Any]:
    texts = {name: documents.text(document, name)[: _LINES * _WORD] for name in ("message", "full")}
    return {**_scalars(document, _FAILURE_FIELDS), **texts}


def _trim_peers(document: Mapping[Any, Any]) -> dict[str, Any]:
    names = {
        name: [each for each in documents.texts(document, name) if len(each) <= _WORD][:MAX_NODES]
        for name in ("heard", "silent")
    }
    return {**_scalars(document, ("age_seconds",)), **names}


SEPARATE_RANKS_FIX: Final = (
    "to train one model on all ranks, call torch.distributed.init_process_group() and wrap the "
    "model, such as in DistributedDataParallel (docs/how-to/migrating.md); for one rank, "
    "nodes: 1 and procsPerNode: 1"
)
"""What to do about ranks of a script that train without a process group."""


def describe_separate_ranks(ranks: int) -> str:
    """What is known of a script whose ranks have formed no process group, without a full stop."""
    return (
        f"none of its {ranks} ranks has formed a process group with the others: unless they "
        "exchange by other means than torch.distributed, each has trained a model of its own"
    )
