"""The restart policy: numbers the generations, records why each began, and counts restarts against
the job's limit.

The agent with group rank 0 writes the record. It reads earlier generations from the ledger of the
run and from the agents' documents, so any agent may take over.

A failure that repeats at the same step, without progress in between, ends the run early. The row of
the table of causes says how many equal failures that takes; external causes (a SIGKILL, a lost
node, storage that fails a save) never count. Where no step is known, as for a script, failures
count as the same if the worker groups lived for about as long.

The job's own rules come first (`spec.restart.rules`). Faults of devices and nodes do not spend the
job's limit of restarts: they have a limit of their own (`MACHINES`), however alike they are. A node
that is asked to end, such as a pod that is evicted, is no failure, unless its ranks have not
started yet.

A script that cannot continue is started once (`SingleStart`). A script continues after a restart if
its ranks open the job's checkpoints, by a `Checkpointer` or an integration. Any other would start
from its beginning and overwrite what it has written, so a failure, a lost node or an eviction ends
its job, unless the job file names `maxRestarts`. The decision is kept where the generations are, so
that an agent that replaces a lost one decides the same.

A run whose worker groups take longer to start than the time between losses makes no progress, and
ends by its limit of restarts (`describe_slow_start`). A start lasts from the loss before it, or
from the rendezvous, to the first finished step of the group; a group that was lost before its first
step shows only that a start takes at least that long.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Final

from torch.distributed.elastic.rendezvous.api import RendezvousError

from kdist_trainer import log
from kdist_trainer.agent import coordination
from kdist_trainer.agent.coordination import (
    FAILURE,
    LIMIT,
    PLANNED,
    RESUME,
    START,
    STOP,
    AgentStore,
    Document,
    Generation,
    RunRecords,
    failure_to_event,
    failures_of,
)
from kdist_trainer.agent.exits import root_cause
from kdist_trainer.causes import BY_NAME
from kdist_trainer.causes.advice import SLOW, SLOW_START
from kdist_trainer.causes.host import REPLICAS_DIFFER
from kdist_trainer.causes.row import MAX_REPEATS
from kdist_trainer.checkpoint.interval import read_history, unsaved_seconds
from kdist_trainer.checkpoint.ledger import find_last_sign
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import Cause, Exit, TrainConfig
from kdist_trainer.config.exit_codes import Fault, Rerun
from kdist_trainer.config.train_config import COUNT, IGNORE, MACHINES, NOTHING, RESTARTS
from kdist_trainer.formats.machine_faults import list_machine_faults
from kdist_trainer.formats.untrusted_text import number_of
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.processes.liveness import RankSnapshot
from kdist_trainer.rendezvous.state import RendezvousStatus

_UNCERTAIN = 2
"""The same of a failure that is perhaps the user's."""
_LIMITS = {
    Cause.SIGNAL: MAX_REPEATS,
    Cause.HANG: MAX_REPEATS,
    Cause.COLLECTIVE_TIMEOUT: MAX_REPEATS,
    Cause.DEVICE: MAX_REPEATS,
    Cause.LOADER: MAX_REPEATS,
    Cause.NODE: MAX_REPEATS,
    Cause.EARLY_EXIT: _UNCERTAIN,
    Cause.UNKNOWN: _UNCERTAIN,
    Cause.USER_CODE: _UNCERTAIN,
}
_KEEP_NAME = {Cause.USER_CODE, Cause.UNKNOWN, Cause.EARLY_EXIT}
_EXTERNAL = re.compile(r"SIG(KILL|TERM|INT|HUP)|forkserver|KeyboardInterrupt")
_LIFETIME_RATIO = 2.0
_LIFETIME_SLACK_SECONDS = 5.0
Event = Mapping[str, Any]


def alike_limit(failure: Failure) -> int:
    """How many equal failures in a row, without progress in between, end the run; 0 if they never
    do, since each comes from outside.
    """
    if failure.is_of_machine or failure.action in (IGNORE, COUNT):
        return 0
    if failure.signature in BY_NAME:
        return BY_NAME[failure.signature].alike
    if failure.cause is Cause.NODE_LOST and not failure.primary:
        return MAX_REPEATS  # no node is gone: what the ranks lost of each other is not known
    if failure.cause is Cause.SIGNAL and _EXTERNAL.search(failure.message):
        return 0
    return _LIMITS.get(failure.cause, 0)


def limit_of(failure: Failure) -> str:
    """The limit that a restart after this failure is counted against."""
    if failure.action == IGNORE:
        return NOTHING
    return MACHINES if failure.is_of_machine and failure.action != COUNT else RESTARTS


def is_transient(failure: Failure) -> bool:
    """Whether a failure probably does not repeat after a restart."""
    return alike_limit(failure) == 0


def count_repeats(events: Iterable[Event], failure: Failure) -> int:
    """Count the consecutive groups, up to that of `failure`, that the same failure ended without
    progress in between. `events` are the run's so far, in order, with or without that of `failure`.
    """
    started_at, earlier = _since_progress(events)
    signature = _signature(failure.cause.value, failure.step, failure.message)
    lifetimes = [failure.time - started_at.get(failure.generation, failure.time)]
    for event in reversed(earlier):
        number = event.get("generation", 0)
        if number >= failure.generation:
            continue
        if (
            _signature(event.get("cause"), event.get("step"), str(event.get("message")))
            != signature
        ):
            break
        lifetimes.append(event.get("time", 0.0) - started_at.get(number, 0.0))
        longest = _LIFETIME_RATIO * min(lifetimes) + _LIFETIME_SLACK_SECONDS
        if failure.step is None and max(lifetimes) > longest:
            lifetimes.pop()
            break
    return len(lifetimes)


CODE: Final = "code"
"""The field of a failure in the events: what the ranks that differed have computed by."""


def have_parted(events: Iterable[Event], failure: Failure | None, *, code: str) -> bool:
    """Whether ranks of this run that run this code have held different states after a recovery in
    place: those that stay would differ again from those that are new. Other code may be mended.
    """
    if failure is not None and failure.signature == REPLICAS_DIFFER:
        return True
    return any(
        one.get("signature") == REPLICAS_DIFFER and one.get(CODE, code) == code
        for one in events
        if one["event"] == "failure"
    )


def count_restarts(events: Iterable[dict[str, Any]], *, step: int = -1) -> Counter[str]:
    """Count the failures since the step that the run can continue from last rose, or since the run
    was restarted by hand, by the limit that each is counted against. `events` are the run's, in
    order; the next group continues from `step`.
    """
    failures: Counter[str] = Counter()
    best = committed = -1
    for event in events:
        if event["event"] == "generation":
            if event.get("from_step", -1) > best >= 0:
                failures.clear()
            best = max(best, event.get("from_step", -1))
            if event.get("kept_step") is None:
                committed = max(committed, event.get("from_step", -1))
            if event.get("reason") == FAILURE:
                failures[event.get(LIMIT, RESTARTS)] += 1
            elif event.get("reason") not in PLANNED:
                failures.clear()
        elif (
            event["event"] == "commit"
            and isinstance(event.get("step"), int)
            and event["step"] > committed
        ):
            # also below a step that ranks had kept, and that was lost with them
            failures.clear()
            committed = event["step"]
            best = max(best, committed)
    return Counter() if step > best >= 0 else failures


def _since_progress(events: Iterable[Event]) -> tuple[dict[int, float], list[Event]]:
    """The start times of the groups since the last progress, by number, and the failures that ended
    them.
    """
    started_at: dict[int, float] = {}
    failures: list[Event] = []
    best = -1
    for event in events:
        name = event["event"]
        if name == "generation":
            if event.get("reason") not in (FAILURE, *PLANNED):  # the run was restarted by hand
                failures.clear()
            started_at[event.get("generation", 0)] = event.get("time", 0.0)
        elif name == "failure":
            failures.append(event)
        elif name == "commit" and isinstance(event.get("step"), int) and event["step"] > best:
            best = event["step"]
            failures.clear()
    return started_at, failures


def _signature(cause: object, step: object, message: str) -> tuple[object, object, str]:
    """The properties that identify a repeated failure; numbers in the message do not count."""
    return cause, step, re.sub(r"0x[0-9a-f]+|\d+", "#", message.partition("\n")[0])


def final_failure(
    last: Failure, generation: Generation, message: str, *, collectives: tuple[str, ...]
) -> Failure:
    """The failure that ends the run instead of `generation`, after `last`: the user's and what is
    in no table keep their name if they came back alike, and are final, as an error that the user's
    code raised is where no restart is allowed; others have exhausted the limit of restarts.
    """
    is_alike = 0 < alike_limit(last) <= generation.repeats
    kept = last.fault in (Fault.USER, Fault.UNKNOWN, Fault.KDIST) and last.cause in _KEEP_NAME
    is_only = kept and last.cause is Cause.USER_CODE and generation.restarts == 1
    named = is_only or (is_alike and kept)
    if generation.slow_start and not named:
        last = replace(last, signature=SLOW_START, advice=SLOW.advice)
    return replace(
        last,
        cause=last.cause if named else Cause.BUDGET,
        code=Exit.USER if named else Exit.BUDGET,
        primary=True,
        message=last.message if is_only else message,
        collectives=collectives,
        rerun=Rerun.FIXED if named else last.rerun,
    )


RULE: Final = (
    "if a rank or a node is lost, the script is not started again, unless it has opened a "
    "Checkpointer: its files are its own; spec.maxRestarts: N starts it again all the same"
)
REFUSAL: Final = (
    "the script is not started again: no rank has opened a Checkpointer, and its files are its "
    "own; spec.maxRestarts: N starts it again; it begins from the start, unless its arguments "
    "resume it"
)
ASKED_TO_END: Final = "a node was asked to end, like a pod that is evicted or deleted"
OTHERS_SECONDS: Final = 15.0
"""How long a node whose ranks have lost their peers waits to hear what has happened elsewhere."""
_RETRY_SECONDS, _POLL_SECONDS = 5.0, 0.1


def end_for_good(failure: Failure, refusal: str) -> Failure:
    """The failure that ends the job, with the reason why it is not started again."""
    message = f"{failure.message}; {refusal}"
    code = Exit.USER if failure.cause is Cause.USER_CODE else Exit.BUDGET
    return replace(failure, code=code, primary=True, message=message)


def judge(
    document: Document,
    number: int,
    *,
    rule: tuple[str | None, str],
    reason: str,
    failure: Failure | None,
    starting: bool = False,
) -> tuple[str, Failure | None, str]:
    """Why the next generation begins, the failure that ended the last one, and why there is none. A
    node that is asked to end as its ranks start counts as a failure: a run whose nodes are always
    taken so early would otherwise restart for ever. `document` is the last generation's, `rule` is
    what `examine` has found, and `starting` says whether that generation had not come to a step.
    """
    asked_at, refusal = rule
    if asked_at is not None and document.get("requested_at", asked_at) != asked_at:
        return RESUME, None, ""
    is_lost = bool(refusal) or (starting and "rank_states" in document)
    if is_lost and failure is None and reason == RESUME:
        failure = Failure.of_node(Cause.PREEMPTED, Exit.STOPPED, ASKED_TO_END, generation=number)
        reason = reason if refusal else FAILURE
    return reason, failure, refusal if failure is not None and reason not in PLANNED else ""


def _has_lost_nodes(status: Callable[[], RendezvousStatus]) -> bool:
    try:
        found = status()
    except RendezvousError:
        return False
    return bool(found.left or found.silent)


class SingleStart:
    """Whether the workers may be started again; the calls of its store fail soon."""

    def __init__(self, config: TrainConfig, agent_store: AgentStore) -> None:
        self._config = config
        self._agent_store = agent_store
        self._opened = False
        self._is_told = False
        self._next_try = -math.inf

    @property
    def is_script(self) -> bool:
        """Whether the workers run a script."""
        return self._config.script is not None

    @property
    def applies(self) -> bool:
        """Whether the job is one whose ranks must open checkpoints to be started again."""
        return self._config.starts_once

    def observe(self, snapshots: Iterable[RankSnapshot]) -> bool:
        """Look whether a rank of this node has opened the job's checkpoints, and tell the other
        agents; an error of the store is tried again later. Returns whether this is the first time
        that one has.
        """
        if self._config.script is None or self._is_told:
            return False
        is_first = not self._opened
        self._opened = self._opened or any(one.has_checkpoints for one in snapshots)
        if self._opened and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + _RETRY_SECONDS
            try:
                if self.applies:
                    self._agent_store.mark_checkpoints()
                self._is_told = True
            except RuntimeError as error:
                log.warn(
                    "rendezvous-unreachable",
                    message=f"the other nodes cannot be told that the script resumes: {error}",
                )
        return is_first and self._opened

    def examine(self, document: Document, *, committed: int) -> tuple[str | None, str]:
        """Examine whether a generation may follow the one with this document. The document is empty
        if there is none in this store, and `committed`, the step of the newest checkpoint, is 0
        without one. Raises `RuntimeError` if the store is unreachable.

        Returns:
            When a user last asked for the job to start again, None where that does not matter; and
            why it is not started by itself, empty if it is.
        """
        if not self.applies:
            return None, ""
        asked_at = self._agent_store.requested_at()
        return asked_at, self.refuse(committed=committed) if document else ""

    def refuse(self, *, committed: int) -> str:
        """Why the workers are not started again; empty if they may be. `committed` is the step of
        the newest checkpoint, 0 without one. Raises `RuntimeError` if the store is unreachable.
        """
        if not self.applies or self._opened or committed:
            return ""
        self._opened = self._agent_store.has_checkpoints()
        return "" if self._opened else REFUSAL

    def find_end(
        self,
        cause: Failure,
        *,
        others: Sequence[str],
        committed: int,
        read: Callable[[], Document],
        status: Callable[[], RendezvousStatus],
    ) -> Failure | None:
        """The failure that ends the job, if its script is not started again: that of whichever node
        it began on.

        Where nodes were asked to end there is none: the agent that replaces one decides, which
        knows whether a user has started the job again. `others` are the other nodes of the
        generation. Raises `RuntimeError` if the store is unreachable.
        """
        refusal = self.refuse(committed=committed)
        deadline = time.monotonic() + OTHERS_SECONDS
        while refusal and "planned_stop" not in (document := read()):
            first = root_cause([cause, *failures_of(document)]) or cause
            if not first.primary and _has_lost_nodes(status):
                lost = others[0] if len(others) == 1 else "a node of the group"
                return end_for_good(replace(first, message=f"lost {lost}", rank=None), refusal)
            if first.primary or time.monotonic() > deadline:
                return end_for_good(first, refusal)
            time.sleep(_POLL_SECONDS)
        return None


_KEY: Final = "environment"
"""The field of a generation with what its ranks compute with, where that has changed."""
_UNWRITTEN = "unwritten"
_MAX_BACKOFF_SECONDS = 60


def _backoff_seconds(times: int) -> int:
    """The wait after `times` occurrences, in seconds: 0 after the first one, then doubling."""
    return min(2 ** (times - 2), _MAX_BACKOFF_SECONDS) if times >= 2 else 0


class RestartLedger(RunRecords):
    """The events of one run, as the agent with group rank 0 reads and writes them. `code` is what
    `settings.identify_code` has given, and `environment` what `settings.describe_environment` has.
    """

    def __init__(
        self,
        agent_store: AgentStore,
        *,
        checkpoints: StoragePath | None,
        limits: Mapping[str, int],
        single_start: SingleStart,
        devices: str = "",
        code: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(agent_store, checkpoints)
        self._devices = devices
        self._code = code
        self._environment = environment
        self.single_start = single_start
        self._limits = limits

    def _note_end(
        self,
        events: list[dict[str, Any]],
        failure: Failure | None,
        document: Document,
        *,
        at_start: bool,
    ) -> str:
        """Write the failure that ended the latest generation, whose document this is, if one did;
        returns a sentence if the latest ones were all lost as they started, else an empty one.
        """
        if failure is None:
            return ""
        backoff = self._find_backoff(root_cause(failures_of(document)), lambda: events)
        # what a broken machine or a rule explains does not show that starting takes too long
        start = (
            {AT_START: True} if at_start and not (failure.is_of_machine or failure.action) else {}
        )
        waited = {WAITED: backoff} if backoff else {}
        code = {CODE: self._code} if failure.signature == REPLICAS_DIFFER else {}
        self.append_failure(failure, **start, **waited, **code)
        return describe_slow_start([*events, {**failure_to_event(failure), **start}])

    def list_machine_faults(self) -> list[dict[str, Any]]:
        """The faults of machines so far."""
        return list_machine_faults(self._read())

    def append_failure(self, failure: Failure, **known: Any) -> None:
        """Write the failure that ended a generation, with what else is `known` of it."""
        self.append_event(**failure_to_event(failure), **known)

    def open_generation(
        self, agents: dict[str, str], *, world_size: int, bounds: tuple[int, int] = (0, 0)
    ) -> Generation:
        """Open the next generation, unless the run is over. `agents` has their instance ids by
        node, `bounds` the minimum and the maximum number of nodes. Returns it; if it is
        `exhausted`, it has not begun.
        """
        events = self._read()
        last = max(
            self._agent_store.last_generation(),
            *(one.get("generation", 0) for one in events if one["event"] == "generation"),
            0,
        )
        document = self._agent_store.generation(last) if last else {}
        reason, failure = self._determine_reason(last, document, agents)
        committed, kept = self.committed_step(), document.get("kept_step")
        rule = self.single_start.examine(document, committed=committed)
        is_script = self.single_start.is_script
        tells = self._checkpoints is not None and not is_script
        starting = bool(document) and was_starting(
            document, last, events, is_script=is_script, tells=tells
        )
        reason, failure, refusal = judge(
            document, last, rule=rule, reason=reason, failure=failure, starting=starting
        )
        step = committed if kept is None else max(committed, kept)
        counts: Counter[str] = Counter()
        if reason in (FAILURE, *PLANNED):
            counts = count_restarts(events, step=step) + self._unwritten(step)
            counts += Counter([limit_of(failure)] if failure else [])
        lost = 0
        if last and kept is None:
            root, known = self._checkpoints, failures_of(document)
            find = partial(coordination.find_reached, events, known, root, generation=last)
            lost = max(0, self.ask(find, 0) - step)
        slow_start = self._note_end(events, failure, document, at_start=starting)
        repeats = count_repeats(events, failure) if failure and not is_transient(failure) else 0
        over = self._is_over(failure, counts, repeats, refusal=refusal, slow=slow_start)
        ended = [failure_to_event(failure)] if failure else []
        generation = Generation(
            number=last + 1,
            reason=reason,
            nodes=sorted(agents),
            counts=dict(counts),
            limit=limit_of(failure) if failure else RESTARTS,
            cause=failure.cause.value if failure else None,
            lost_steps=lost,
            exhausted=bool(over),
            over=over,
            bounds=bounds,
            message=failure.message if failure else "",
            from_step=step,
            repeats=repeats,
            kept_step=kept,
            refusal=refusal,
            continues_in_place=not have_parted(events, failure, code=self._code),
            slow_start=slow_start,
            machine_faults=list_machine_faults([*events, *ended]),
            active_since=find_active_since(document, agents),
            **self._read_clock(last, document, events, reason=reason, failure=failure),
            **coordination.sum_up_run(events, committed, reason=reason, lost_steps=lost),
        )
        if not over:
            # to the store first: if the agent dies between the two writes, the next one must not
            # take the run for one that was restarted by hand
            self._agent_store.open_generation(
                generation.number,
                agents,
                requested_at=rule[0],
                unsaved_seconds=generation.unsaved_seconds,
                active_since=generation.active_since,
            )
            former = next((one[_KEY] for one in reversed(events) if _KEY in one), None)
            changed = {} if self._environment in (None, former) else {_KEY: self._environment}
            self.append_generation(generation, world_size, **changed)
        return generation

    def _is_over(
        self,
        failure: Failure | None,
        counts: Mapping[str, int],
        repeats: int,
        *,
        refusal: str,
        slow: str,
    ) -> str:
        """Why the run ends with this failure; "" if it goes on."""
        if failure is None:
            return ""
        if refusal:
            return f"{failure.message}; {refusal}"
        if 0 < alike_limit(failure) <= repeats:
            times = f"the same failure {repeats} times in a row without progress"
            return f"{times}: {failure.message}"
        kind = limit_of(failure)
        if counts[kind] > self._limits.get(kind, math.inf):
            what = (
                "restart limit"
                if kind == RESTARTS
                else "limit of device faults (spec.restart.deviceFaults)"
            )
            limit = f"{what} reached: {self._limits[kind]} restarts without progress"
            limit += f"; {slow}" if slow else ""
            where = f", on {failure.machine}" if failure.is_of_machine and failure.machine else ""
            return f"{limit}; the last failure{where}: {failure.message}"
        return ""

    @staticmethod
    def _read_clock(
        last: int,
        document: Document,
        events: list[dict[str, Any]],
        *,
        reason: str,
        failure: Failure | None,
    ) -> dict[str, Any]:
        """The training time that no checkpoint holds, and what saves and losses were, after the
        generation numbered `last`: by the events, or by the store if they are on a disk that
        another node has.
        """
        kept, now = document.get("kept_step"), time.time()
        if "unsaved" in document and not any(
            one["event"] == "generation" and one.get("generation") == last for one in events
        ):
            began, before = document["unsaved"]
            seconds = before + max(0.0, (failure.time if failure else now) - began)
            return {
                "unsaved_seconds": seconds,
                "at_risk_seconds": 0.0 if kept is None else seconds,
                "save_history": read_history(events).to_text(),
            }
        ends: list[dict[str, Any]] = [
            {"event": "generation", "reason": reason, "kept_step": kept, "time": now}
        ]
        if failure is not None:
            ends.insert(0, {"event": "failure", "generation": last, "time": failure.time})
        return {
            "save_history": read_history([*events, *ends]).to_text(),
            "unsaved_seconds": round(unsaved_seconds([*events, *ends]), 3),
            "at_risk_seconds": round(unsaved_seconds([*events, *ends], in_memory=True), 3),
        }

    def append_generation(self, generation: Generation, world_size: int, **known: Any) -> None:
        """Write that a generation of `world_size` ranks has begun, with what else is known."""
        is_written = self.append_event(
            "generation",
            generation=generation.number,
            reason=generation.reason,
            world_size=world_size,
            nodes=generation.nodes,
            from_step=generation.from_step,
            **({"entrypoint": "script"} if self.single_start.is_script else {}),
            **({"devices": self._devices} if self._devices else {}),
            **({} if generation.kept_step is None else {"kept_step": generation.kept_step}),
            **coordination.generation_to_event(generation),
            **known,
        )
        if not is_written and generation.reason == FAILURE:
            step = generation.from_step
            counts = self._unwritten(step) + Counter([generation.limit])
            self._agent_store.change(
                _UNWRITTEN, lambda document: document.update(step=step, counts=counts)
            )
        elif is_written and self._unwritten(generation.from_step):
            self._agent_store.change(_UNWRITTEN, dict.clear)  # they are in the ledger by now

    def read_latest_generation(self) -> Document:
        """The document of the latest generation; empty if there is none."""
        last = self._agent_store.last_generation()
        return self._agent_store.generation(last) if last else {}

    def storage_backoff_seconds(self) -> int:
        """The wait before the next group, in seconds, while the ledger cannot be written."""
        if not self._agent_store.read(_UNWRITTEN):
            return 0  # whatever is committed
        return _backoff_seconds(self._unwritten(self.committed_step()).total())

    def has_failed_to_save(self, latest: Document) -> bool:
        """Whether the storage ended the latest group, whose document this is, and restarts are
        left.
        """
        failure = root_cause(failures_of(latest))
        is_storage = failure is not None and failure.cause is Cause.STORAGE
        return is_storage and count_restarts(self._read())[RESTARTS] < self._limits[RESTARTS]

    def failure_backoff_seconds(self, latest: Document) -> int:
        """The wait before the next group, in seconds, if the same failure ended the latest groups:
        two of them, or three if it may be transient. `latest` is the document of the last one.

        There is none after lost nodes, since restarting their agents takes time by itself, and none
        if the next group is not started.
        """
        return self._find_backoff(root_cause(failures_of(latest)), self._read)

    def _find_backoff(
        self, failure: Failure | None, read: Callable[[], list[dict[str, Any]]]
    ) -> int:
        """The wait after this failure; `read` returns the events, if they are needed."""
        if failure is None or failure.cause is Cause.NODE_LOST:
            return 0
        events, transient = read(), is_transient(failure)
        times = count_repeats(events, failure)
        is_last = not transient and times >= alike_limit(failure)
        kind = limit_of(failure)
        is_last |= count_restarts(events)[kind] >= self._limits.get(kind, math.inf)
        return 0 if is_last else _backoff_seconds(times - transient)

    def _unwritten(self, step: int) -> Counter[str]:
        """The restarts since `step` was committed that are in the rendezvous store only, because
        the ledger could not be written.
        """
        document = self._agent_store.read(_UNWRITTEN)
        return Counter(document.get("counts", {}) if document.get("step") == step else {})

    def _determine_reason(
        self, last: int, document: Document, agents: dict[str, str]
    ) -> tuple[str, Failure | None]:
        """The reason of the generation that follows the one numbered `last`, whose document this
        is, and the failure that ended that one.
        """
        if last == 0:
            return START, None
        if not document:
            return RESUME, None  # it began in another store: the run was restarted by hand
        known = failures_of(document)
        failure = root_cause(known)
        before: dict[str, str] = document.get("agents", {})
        lost = sorted(node for node, instance in before.items() if agents.get(node) != instance)
        planned = document.get("planned_stop")
        lost_while_joining = failure is not None and lost and planned in PLANNED
        if planned is not None and not (failure and failure.primary) and not lost_while_joining:
            return (planned if planned in PLANNED else RESUME), None
        left_early = failure is not None and failure.cause is Cause.EARLY_EXIT
        # what the ranks of a lost node did explains more than one that had left
        if failure and failure.primary and not (left_early and lost):
            return FAILURE, failure
        if lost:
            told = [one.time for one in known]
            return FAILURE, Failure(
                cause=Cause.NODE_LOST,
                code=Exit.PEERS_LOST,
                primary=True,
                message=f"lost {', '.join(lost)}",
                node=lost[0],
                generation=last,
                step=max((one.step for one in known if one.step is not None), default=None),
                time=min(told)
                if told
                else self.ask(
                    partial(find_last_sign, self._read(), self._checkpoints), time.time()
                ),
            )
        return FAILURE, failure or Failure.of_node(
            Cause.RENDEZVOUS, Exit.PEERS_LOST, "the worker group did not start", generation=last
        )


def find_active_since(document: Document, agents: dict[str, str]) -> float:
    """When a job became active, at the begin of a group after the one with this document: now, if
    that was stopped as planned and no agent of it stayed, as when the job was suspended, however
    the stop is judged otherwise; also if it has not begun in this store.
    """
    before = {*document.get("agents", {}).items(), *document.get("agents_before", {}).items()}
    is_resumed = document.get("planned_stop") == STOP and not before & agents.items()
    since = float(document.get("active_since", 0.0))
    return time.time() if is_resumed or not since else since


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
    tells, they had. `tells` says whether the events have the first step of each group; of a script
    that reports no steps a collective shows that it has started.
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
    `events` are those of the run so far, with the failure that ended the latest group.
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
        at = number_of(event, "time")
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
            since = at + number_of(event, WAITED)
    return apart, starts
