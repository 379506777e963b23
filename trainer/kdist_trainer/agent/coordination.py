"""What the agents of a run agree on, in documents that they share through the rendezvous store: one
per generation, with its number and why it began, and the result of the run. The events of the run
they record in the ledger next to the checkpoints or, without any, in the store.

An agent that joins late or is restarted can read the documents; they disappear with the store. They
are changed by compare-and-set, so any number of agents may write at once. The end of a script is
also announced over the exchange of the round (`FinishExchange`), which works where the API server
refuses requests.

Agents also agree on which process of a rank is to be replaced (`choose_rank_to_renew`). A rank that
recovers in place holds threads, descriptors and memory for each broken group that it has left,
until that group's time-out. When there are too many, a new process takes the rank's place, so
another rank must hold the state. This happens when a group forms after a loss; if none forms, the
agents begin one for it. The agent with group rank 0 decides for all, so that never two ranks are
replaced at once.

The counters of an agent know only what its process has seen, so what a run did before its next
worker group is computed from the events. The agent supervises ranks that may continue without the
folder: no error of the storage ends it, and storage that does not answer is not waited for, but
what was known last counts (`RunRecords`).
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from torch.distributed import DistError

from kdist_trainer import log
from kdist_trainer.agent.exits import read_done, root_cause
from kdist_trainer.agent.settings import Settings
from kdist_trainer.checkpoint.interval import HISTORY_VARIABLE, UNSAVED_VARIABLE
from kdist_trainer.checkpoint.ledger import RunLedger, StepLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config.train_config import RESTARTS
from kdist_trainer.formats import REQUESTED_AT
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import finite_number, parse_json
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.processes.liveness import RankSnapshot
from kdist_trainer.processes.threads import BoundedCalls
from kdist_trainer.rendezvous.handler import Rendezvous
from kdist_trainer.rendezvous.stores import KubernetesStore

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from kdist_trainer.config import TrainConfig


_FINISHED, _SEEN = "finished/", "finish-seen/"
_PAUSE_SECONDS = 1.0
_SEEN_SECONDS = 10.0
"""How long agents wait for each other to see that all are done: one of them is the host."""


class FinishExchange:
    """Which agents of the latest round have finished, by its exchange, if it has one."""

    def __init__(self, rendezvous: Rendezvous, node: str, nodes: Sequence[str]) -> None:
        self._rendezvous = rendezvous
        self._node = node
        self._nodes = nodes
        self._asked_at = 0.0
        self._post(_FINISHED)

    def all_finished(self) -> bool:
        """Whether all nodes are done, and know it of each other; asks at most once a second."""
        if len(self._nodes) == 1:
            return True
        now = time.monotonic()
        if now - self._asked_at < _PAUSE_SECONDS:
            return False
        self._asked_at = now
        if not self._all(_FINISHED):
            return False
        self._post(_SEEN)
        while time.monotonic() < now + _SEEN_SECONDS and not self._all(_SEEN):
            if self._is_alone():
                break
            time.sleep(_PAUSE_SECONDS / 10)
        return True

    def has_lost_members(self) -> bool:
        """Whether a node has gone before all were done, or there is no exchange that could tell."""
        return self._is_alone() and not self._all(_FINISHED)

    def _is_alone(self) -> bool:
        """Whether a node has gone, or there is no exchange."""
        exchange = self._rendezvous.exchange
        try:
            self._rendezvous.check_connections()
            return exchange is None or not exchange.peek([self._node])
        except DistError:
            return True

    def _post(self, prefix: str) -> None:
        if self._rendezvous.exchange is not None:
            with suppress(DistError):  # the host is gone: who waits notices
                self._rendezvous.exchange.set(f"{prefix}{self._node}", "1")

    def _all(self, prefix: str) -> bool:
        exchange = self._rendezvous.exchange
        keys = [f"{prefix}{each}" for each in self._nodes]
        try:
            return exchange is not None and exchange.check(keys)
        except DistError:
            return False


NOBODY = ("", -1)


class KeptRank(NamedTuple):
    """A rank that has left its group, as its agent tells the others; a list in JSON."""

    local_rank: int
    step: int
    """The step whose state it has; -1 for none."""
    crowd: int
    """The groups that are still waited in, if they are too many; else 0."""


def choose_rank_to_renew(kept: Mapping[str, Iterable[Sequence[int]]]) -> tuple[str, int]:
    """The rank whose process is to be replaced, of those that are kept, by node: the node and the
    local rank; `NOBODY` if none is to be, or none can be without losing the newest state.
    """
    ranks = [(node, KeptRank(*each)) for node, those in kept.items() for each in those]
    newest = max((each.step for _, each in ranks), default=-1)
    holders = sum(each.step == newest for _, each in ranks)
    crowded = [
        (-each.crowd, node, each.local_rank)
        for node, each in ranks
        if each.crowd and newest >= 0 and (each.step < newest or holders > 1)
    ]
    _, node, local_rank = min(crowded, default=(0, *NOBODY))
    return node, local_rank


def is_renewal_due(
    crowds: Collection[int], snapshots: Iterable[RankSnapshot], *, nodes: int, from_step: int
) -> bool:
    """Whether the agents are to begin a new group, in which one of the ranks of this node is
    replaced: only where there are others, and a step shows that they hold the state. `crowds` is
    what each rank of this node has told, and `from_step` the step that the group has begun with.
    """
    others = nodes > 1 or len(crowds) > 1
    return others and any(crowds) and all(each.step > from_step for each in snapshots)


Document = dict[str, Any]
_ATTEMPTS = 1000
_WRITER = "writer"
_RUN_RESULT = "run_result"
_CHECKPOINTS = "checkpoints"
NOTHING_KEPT = -1
"""The step of a node none of whose workers has left its generation with a state."""
_MAX_PRIMARY = 3
_SECONDARY_LINES = 5


class AgentStore:
    """The documents of one run in `store`, as the agent of `node` reads and writes them."""

    def __init__(self, store: Store, *, run_id: str, node: str) -> None:
        self._store = store
        self._prefix = f"kdist/{run_id}/"
        self._node = node

    def refusal(self) -> str:
        """How the API server rejects what it has served before; empty if it does not."""
        return self._store.config_map.refusal if isinstance(self._store, KubernetesStore) else ""

    def limit_refusals(self, seconds: float) -> None:
        """Have operations raise `StoreRefusedError` once an API server has refused them for so
        long.
        """
        if isinstance(self._store, KubernetesStore):
            self._store.config_map.refused_seconds = seconds

    def read(self, key: str) -> Document:
        """The document at `key`; empty if there is none. Raises what the store raises."""
        return self._read(self._prefix + key)[0]

    def change(self, key: str, edit: Callable[[Document], Any]) -> Document:
        """Change the document at `key` atomically: `edit` changes it in place, maybe more than
        once. Returns the changed document. Raises `RuntimeError` if other agents change it all the
        time, or from the store.
        """
        full = self._prefix + key
        for _ in range(_ATTEMPTS):
            document, before = self._read(full)
            as_read = encode_json(document)
            edit(document)
            if encode_json(document) == as_read:
                return document
            # The store returns the value and not its writer, so two writers need different values.
            after = encode_json(
                {**document, _WRITER: uuid.uuid4().hex}, separators=(",", ":")
            ).encode()
            if self._store.compare_set(full, before.decode(), after.decode()) == after:
                return document
        raise RuntimeError(f"{key} changes too fast to be written")

    def _read(self, full: str) -> tuple[Document, bytes]:
        """The document at a full key, and its stored bytes; both empty if there is none."""
        raw = bytes(self._store.get(full)) if self._store.check([full]) else b""
        document: Document = parse_json(raw) if raw else {}
        document.pop(_WRITER, None)
        return document, raw

    def generation(self, number: int) -> Document:
        """The document of a generation: `agents`, `failures`, `planned_stop`, `finished`,
        `machine_faults` and `rank_states`, as far as they were written.
        """
        return self.read(f"generation/{number}")

    def requested_at(self) -> str:
        """When a user last asked for the job to start again, as kdist has written it; empty if
        nobody has.
        """
        if not isinstance(self._store, KubernetesStore):
            return ""  # the invocations of `kdist run` have a store each
        annotations = self._store.fetch().document["metadata"].get("annotations") or {}
        return str(annotations.get(REQUESTED_AT, ""))

    def mark_checkpoints(self) -> None:
        """Record that a rank of the run has opened its checkpoints."""
        self.change(_CHECKPOINTS, lambda document: document.update(opened=True))

    def has_checkpoints(self) -> bool:
        """Whether a rank of the run has opened its checkpoints."""
        return bool(self.read(_CHECKPOINTS).get("opened"))

    def open_generation(
        self,
        number: int,
        agents: dict[str, str],
        *,
        requested_at: str | None = None,
        unsaved_seconds: float = 0.0,
        active_since: float = 0.0,
        agents_before: dict[str, str] | None = None,
    ) -> None:
        """Record that a generation has begun, with the instance ids of its agents by node: the id
        of a restarted agent differs from that of its predecessor.

        Args:
            number: The generation.
            agents: The instance ids, by node.
            requested_at: When a user last asked for the job to start again, if it matters.
            unsaved_seconds: The training time before it that no checkpoint holds.
            active_since: When the job became active.
            agents_before: Those of the generation before, if it only saves what one of them kept.

        Raises:
            RuntimeError: If other agents have begun it, such as while this one was paused.
        """

        def edit(document: Document) -> None:
            if document.setdefault("agents", agents) != agents:
                raise RuntimeError(f"generation {number} was begun by other agents")
            if requested_at is not None:
                document["requested_at"] = requested_at
            document.setdefault("active_since", active_since)
            if agents_before is not None:
                document["agents_before"] = agents_before
            document.setdefault("unsaved", [round(time.time(), 3), unsaved_seconds])

        self._change_generation(number, edit)
        self.change(
            "last",
            lambda document: document.update(generation=max(number, document.get("generation", 0))),
        )

    def last_generation(self) -> int:
        """The highest generation begun in this store; 0 if there was none."""
        return int(self.read("last").get("generation", 0))

    def post_failures(
        self,
        number: int,
        failures: list[Failure],
        *,
        rank_states: list[Document] | None = None,
        kept_step: int = NOTHING_KEPT,
    ) -> list[Failure]:
        """Add the most relevant of this node's failures to a generation, and the states of all its
        ranks; `kept_step` is as in `post_kept_step`. Returns the failures that all nodes have
        posted so far.
        """
        # the first few primary failures, or else the decisive secondary one with a short
        # traceback: the failures of hundreds of ranks must fit into one store
        primary = sorted(
            (failure for failure in failures if failure.primary), key=lambda failure: failure.time
        )
        secondary = root_cause(failures)
        selected = primary[:_MAX_PRIMARY] or (
            [replace(secondary, traceback=secondary.traceback[-_SECONDARY_LINES:])]
            if secondary
            else []
        )

        def edit(document: Document) -> None:
            if rank_states:
                document.setdefault("rank_states", {})[self._node] = rank_states
            document.setdefault("failures", []).extend(
                failure.to_document() for failure in selected
            )
            if kept_step > NOTHING_KEPT:
                _note_kept(document, kept_step)

        return failures_of(self._change_generation(number, edit))

    def plan_stop(
        self, number: int, reason: str, *, rank_states: list[Document] | None = None
    ) -> Document:
        """Record that a generation ends on purpose, so that losing peers in it is no failure. The
        first reason is kept, and what the ranks of this node were in. Returns the document.
        """

        def edit(document: Document) -> None:
            if rank_states:
                document.setdefault("rank_states", {})[self._node] = rank_states
            document.setdefault("planned_stop", reason)

        return self._change_generation(number, edit)

    def post_kept_step(self, number: int, step: int) -> None:
        """Record that a worker of this node has left the generation with the state of `step`."""
        self._change_generation(number, lambda document: _note_kept(document, step))

    def post_machine_faults(self, read: Callable[[], list[Document]]) -> None:
        """Tell the agents of the latest generation the faults of machines so far, as `read` when
        nobody else tells them.
        """
        if number := self.last_generation():
            self._change_generation(number, lambda found: found.update(machine_faults=read()))

    def mark_finished(self, number: int) -> Document:
        """Record that this node's workers have succeeded; returns the document."""

        def edit(document: Document) -> None:
            finished = document.setdefault("finished", [])
            if self._node not in finished:
                finished.append(self._node)

        return self._change_generation(number, edit)

    def post_rank_states(self, number: int, rank_states: list[Document]) -> Document:
        """Post the states of this node's ranks, when they make no progress; returns
        the document.
        """

        def edit(document: Document) -> None:
            document.setdefault("rank_states", {})[self._node] = rank_states

        return self._change_generation(number, edit)

    def run_result(self) -> Document:
        """The exit record of the run; empty while it has not ended."""
        return self.read(_RUN_RESULT)

    def commit_result(self, record: Document) -> Document:
        """End the run with `record` unless it has ended before; returns the record that it ended
        with.
        """

        def edit(document: Document) -> None:
            if not document:
                document.update(record)

        return self.change(_RUN_RESULT, edit)

    def _change_generation(self, number: int, edit: Callable[[Document], Any]) -> Document:
        return self.change(f"generation/{number}", edit)


def _note_kept(document: Document, step: int) -> None:
    document["kept_step"] = max(step, document.get("kept_step", 0))


def failures_of(document: Document) -> list[Failure]:
    """The failures in a generation's document."""
    return [Failure.from_json(encode_json(failure)) for failure in document.get("failures", [])]


START, RESUME, JOIN, FAILURE = "start", "resume", "join", "failure"
RENEW = "renew"
"""A rank's process is to be replaced, see `choose_rank_to_renew`."""
PLANNED = (JOIN, RENEW)
"""The reasons of groups that the agents begin by themselves, without a failure or a request."""
STOP = "stop"
"""Why a generation ends, if it is not for a node that joins: its agents were asked to stop."""
DEADLINE = "deadline"
"""The same: the job has been active for as long as it may be."""


@dataclass(frozen=True)
class Generation:
    """One worker group, which corresponds to one completed round of torch's rendezvous.

    Attributes:
        number: Counts from 1 over the whole run.
        reason: Why it began: `start`, `resume`, `join`, `renew` or `failure`.
        nodes: The names of the nodes.
        counts: The restarts without progress so far, by the limit that each is counted against.
        limit: The limit that this restart is counted against.
        cause: The cause of the failure that ended the previous generation.
        lost_steps: The steps of the group before that are after `from_step`, and are done again; 0
            if a rank has kept the state.
        exhausted: Whether the run ends: the restarts exceed the limit, or one failure repeats.
        bounds: The minimum and the maximum number of nodes, as the agent with group rank 0 reads
            them: all ranks must use the same ones.
        message: The message of that failure.
        from_step: The step that the workers continue from: the newest one that a rank has kept or
            that is committed; 0 if there is none.
        repeats: How often in a row the same failure ended a group, unless it is transient.
        over: Why the run ends, with the failure, if it is `exhausted`.
        refusal: Why the workers are not started again, though restarts are left; empty if they are.
        kept_step: The step that the survivors have kept in memory, if any has.
        unsaved_seconds: The training time since the state of the newest checkpoint, work that was
            lost included: the clock of the saves goes on from it.
        at_risk_seconds: The part of it that ranks have kept in memory.
        continues_in_place: Whether ranks may keep their state for the group after this one: not
            after a recovery in place has left ranks that differ, until the job's code changes.
        save_history: What the run's saves and losses were before it; see `SaveHistory.to_text`.
        renewed: The node and the local rank whose process is replaced as it begins.
        slow_start: That starting takes longer than the time between losses, in a sentence; empty
            if it does not.
        machine_faults: The faults of machines so far; see `list_machine_faults`.
        total_restarts: The restarts after failures since the run began, this one included; None for
            a group that no restart counts.
        total_lost_steps: The steps that the run has lost since it began.
        committed_step: The step of the newest checkpoint as it begins; None without one.
        committed_at: When that was committed, in Unix seconds; None if that is not known.
        active_since: When the job became active, in Unix seconds.
    """

    number: int
    reason: str
    nodes: list[str]
    counts: dict[str, int] = field(default_factory=dict)
    limit: str = RESTARTS
    cause: str | None = None
    lost_steps: int = 0
    exhausted: bool = False
    bounds: tuple[int, int] = (0, 0)
    message: str = ""
    from_step: int = 0
    repeats: int = 0
    refusal: str = ""
    kept_step: int | None = None
    over: str = ""
    unsaved_seconds: float = 0.0
    at_risk_seconds: float = 0.0
    save_history: str = ""
    renewed: tuple[str, int] = NOBODY
    continues_in_place: bool = True
    slow_start: str = ""
    machine_faults: list[Document] = field(default_factory=list)
    total_restarts: int | None = None
    total_lost_steps: int | None = None
    committed_step: int | None = None
    committed_at: float | None = None
    active_since: float = 0.0

    def is_past_deadline(self, config: TrainConfig, *, at: float | None = None) -> bool:
        """Whether the job has been active for as long as it may be, less the time that it needs to
        save: its grace period, but no more than a tenth; `at` a monotonic time, now without one.
        """
        limit, grace = config.active_deadline_seconds, config.termination_grace_period_seconds
        if limit is None:
            return False
        ago = 0.0 if at is None else time.monotonic() - at
        return time.time() - ago >= self.active_since + limit - min(grace, limit / 10)

    @property
    def restarts(self) -> int:
        """The restarts without progress so far."""
        return sum(self.counts.values())

    @property
    def environment(self) -> dict[str, str]:
        """What its ranks are told of it."""
        return {
            "KDIST_GENERATION": str(self.number),
            "KDIST_NODES": "{}:{}".format(*self.bounds),
            UNSAVED_VARIABLE: str(self.unsaved_seconds),
            HISTORY_VARIABLE: self.save_history,
        }

    def to_json(self) -> str:
        return encode_json(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Generation:
        return cls(**parse_json(text))


_RESTARTS: Final = "total_restarts"
_LOST_STEPS: Final = "total_lost_steps"
"""Fields of a generation in the events: what the run had come to when it began. Those of before
need not stay in the ledger.
"""
LIMIT: Final = "limit"
"""The same: what its restart is counted against, if that is not the job's `maxRestarts`."""
Event = Mapping[str, Any]


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


def sum_up_run(
    events: Sequence[Event], committed: int, *, reason: str, lost_steps: int
) -> dict[str, Any]:
    """Fields of a generation: what the run has come to as it begins, by the events before it.
    `committed` is the step of the newest checkpoint, 0 if there is none; `lost_steps` are those
    that it begins below.
    """
    restarts = lost = 0
    for event in _generations(events):
        if isinstance(event.get(_RESTARTS), int) and isinstance(event.get(_LOST_STEPS), int):
            restarts, lost = event[_RESTARTS], event[_LOST_STEPS]
        elif event.get("reason") == FAILURE:  # of a version that wrote no totals
            restarts += 1
    commits = [
        finite_number(each.get("time"))
        for each in reversed(events)
        if committed and each.get("event") == "commit" and each.get("step") == committed
    ]
    return {
        _RESTARTS: restarts + (reason == FAILURE),
        _LOST_STEPS: lost + lost_steps,
        "committed_step": committed or None,
        "committed_at": next((at for at in commits if at is not None), None),
    }


def generation_to_event(generation: Generation) -> dict[str, Any]:
    """What the event of a generation keeps of it; empty for one that sums nothing up."""
    if generation.total_restarts is None or generation.total_lost_steps is None:
        return {}
    limit = {} if generation.limit == RESTARTS else {LIMIT: generation.limit}
    return {**limit, _RESTARTS: generation.total_restarts, _LOST_STEPS: generation.total_lost_steps}


def failure_to_event(failure: Failure) -> dict[str, Any]:
    """The event of a failure; it says whose fault that is if it is the machine's."""
    return {
        "event": "failure",
        "generation": failure.generation,
        "cause": failure.cause.value,
        "rank": failure.rank,
        "node": failure.node,
        **({"signature": failure.signature} if failure.signature else {}),
        **({"machine": failure.machine} if failure.machine else {}),
        **({"fault": failure.fault.value} if failure.is_of_machine else {}),
        "step": failure.step,
        "message": failure.message[:500],
        "time": round(failure.time, 3),
    }


def _generations(events: Iterable[Event]) -> list[Event]:
    return [each for each in events if each.get("event") == "generation"]


_KEPT_EVENTS: Final = 1000


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
        """Write what could not be written before; returns whether there was anything. Raises
        `OSError`.
        """
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
            written = {"time": round(time.time(), 3), "event": event, **fields}
            document["events"] = [*document.get("events", []), written][-_KEPT_EVENTS:]

        self._agent_store.change("events", edit)

    def events(self) -> list[dict[str, Any]]:
        return list(self._agent_store.read("events").get("events", []))


T = TypeVar("T")


class RunRecords:
    """The events, the checkpoints and the end of one run; without a folder, the store keeps the
    events.
    """

    def __init__(self, agent_store: AgentStore, checkpoints: StoragePath | None) -> None:
        self._agent_store = agent_store
        self._checkpoints = checkpoints
        self._committed = 0
        self._known: list[dict[str, Any]] = []
        self._calls = BoundedCalls(f"the checkpoint folder {checkpoints}")
        self._events: StoreEventLog | FolderEventLog = (
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
        if isinstance(self._events, FolderEventLog):
            with suppress(OSError):
                self._events.write_late()

    def read_done(self, settings: Settings) -> dict[str, Any] | None:
        """See `exits.read_done`; None too if the storage does not answer."""
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
