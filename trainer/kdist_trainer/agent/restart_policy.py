"""The restart policy: numbers the generations, records why each began, and counts restarts against
the job's limit.

A failure that repeats without progress ends the run early (`repetition`). The agent with group rank
0 writes the record. It reads earlier generations from the ledger of the run and from the agents'
documents, so any agent may take over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kdist_trainer.agent import run_history
from kdist_trainer.agent.coordination import (
    FAILURE,
    PLANNED,
    RESUME,
    START,
    AgentStore,
    Document,
    Generation,
    failures_of,
)
from kdist_trainer.agent.exit_record import root_cause
from kdist_trainer.agent.repetition import (
    CODE,
    alike_limit,
    count_repeats,
    count_restarts,
    have_parted,
    is_transient,
)
from kdist_trainer.agent.run_records import RunRecords
from kdist_trainer.agent.single_start import NoRule, SingleStart, judge
from kdist_trainer.agent.slow_start import AT_START, WAITED, describe_slow_start, was_starting
from kdist_trainer.causes.host import REPLICAS_DIFFER
from kdist_trainer.checkpoint.interval import at_risk_seconds, read_history, unsaved_seconds
from kdist_trainer.checkpoint.ledger import find_last_sign
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import Cause, Exit
from kdist_trainer.failure import Failure

_UNWRITTEN = "unwritten"
_MAX_BACKOFF_SECONDS = 60


def _backoff_seconds(times: int) -> int:
    """The wait after `times` occurrences, in seconds: 0 after the first one, then doubling."""
    return min(2 ** (times - 2), _MAX_BACKOFF_SECONDS) if times >= 2 else 0


class RestartLedger(RunRecords):
    """The events of one run, as the agent with group rank 0 reads and writes them.

    Args:
        agent_store: The documents that agents share.
        checkpoints: The folder with the run ledger; None keeps the events in the store.
        max_restarts: The job's limit of restarts without progress.
        single_start: Whether a script may be started again; None if it may be.
        devices: What the ranks of this node run on.
        code: What the ranks compute by, see `identify_code`.
    """

    def __init__(
        self,
        agent_store: AgentStore,
        *,
        checkpoints: StoragePath | None,
        max_restarts: int,
        single_start: SingleStart | None = None,
        devices: str = "",
        code: str = "",
    ) -> None:
        super().__init__(agent_store, checkpoints)
        self._devices = devices
        self._code = code
        self.single_start = single_start or NoRule()
        self._max_restarts = max_restarts

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
        start = {AT_START: True} if at_start else {}
        waited = {WAITED: backoff} if backoff else {}
        code = {CODE: self._code} if failure.signature == REPLICAS_DIFFER else {}
        self.append_failure(failure, **start, **waited, **code)
        ended = {"event": "failure", "generation": failure.generation, "time": failure.time}
        return describe_slow_start([*events, {**ended, **start}])

    def append_failure(self, failure: Failure, **more: Any) -> None:
        """Write the failure that ended a generation, with its time and what `more` is known."""
        fields = {
            "generation": failure.generation,
            "cause": failure.cause.value,
            "rank": failure.rank,
            "node": failure.node,
            **({"signature": failure.signature} if failure.signature else {}),
        }
        self.append_event(
            "failure",
            **fields,
            **more,
            step=failure.step,
            message=failure.message[:500],
            time=round(failure.time, 3),
        )

    def open_generation(
        self, agents: dict[str, str], *, world_size: int, bounds: tuple[int, int] = (0, 0)
    ) -> Generation:
        """Open the next generation, unless the run is over.

        Args:
            agents: The instance ids of the agents, by node.
            world_size: The number of ranks.
            bounds: The minimum and the maximum number of nodes.

        Returns:
            The generation; if it is `exhausted`, it has not begun.
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
        starting = self._was_starting(document, last, events)
        reason, failure, refusal = judge(
            document, last, rule=rule, reason=reason, failure=failure, starting=starting
        )
        step = committed if kept is None else max(committed, kept)
        restarts = 0
        if reason in (FAILURE, *PLANNED):
            restarts = count_restarts(events, step=step) + self._unwritten(step)
            restarts += 1 if failure else 0
        lost = 0 if kept is not None else self._count_lost(last, document, events, step=step)
        slow_start = self._note_end(events, failure, document, at_start=starting)
        repeats = count_repeats(events, failure) if failure and not is_transient(failure) else 0
        over = self._is_over(failure, restarts, repeats, refusal=refusal, slow=slow_start)
        generation = Generation(
            number=last + 1,
            reason=reason,
            nodes=sorted(agents),
            restarts=restarts,
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
            **self._read_clock(last, document, events, reason=reason, failure=failure),
            **run_history.sum_up(events, committed, reason=reason, lost_steps=lost),
        )
        if not over:
            self._begin(generation, agents, world_size, requested_at=rule[0])
        return generation

    def _find_last_sign(self) -> float:
        events = self._read()
        return self.ask(lambda: find_last_sign(events, self._checkpoints), time.time())

    def _count_lost(
        self, last: int, document: Document, events: list[dict[str, Any]], *, step: int
    ) -> int:
        """The steps after `step` that the generation numbered `last` had come to."""
        if not last:
            return 0
        known = failures_of(document)
        root = self._checkpoints
        find = partial(run_history.find_reached, events, known, root, generation=last)
        return max(0, self.ask(find, 0) - step)

    def _begin(
        self,
        generation: Generation,
        agents: dict[str, str],
        world_size: int,
        *,
        requested_at: str | None,
    ) -> None:
        """Write that a generation has begun, to the store first: if the agent dies between the two
        writes, the next one must not take the run for one that was restarted by hand.
        """
        self._agent_store.open_generation(
            generation.number,
            agents,
            requested_at=requested_at,
            unsaved_seconds=generation.unsaved_seconds,
        )
        self.append_generation(generation, world_size)

    def _was_starting(self, document: Document, number: int, events: list[dict[str, Any]]) -> bool:
        is_script = self.single_start.is_script
        tells = self._checkpoints is not None and not is_script
        return bool(document) and was_starting(
            document, number, events, is_script=is_script, tells=tells
        )

    def _is_over(
        self, failure: Failure | None, restarts: int, repeats: int, *, refusal: str, slow: str
    ) -> str:
        """Why the run ends with this failure; "" if it goes on."""
        if failure is None:
            return ""
        if refusal:
            return f"{failure.message}; {refusal}"
        if 0 < alike_limit(failure) <= repeats:
            times = f"the same failure {repeats} times in a row without progress"
            return f"{times}: {failure.message}"
        if restarts > self._max_restarts:
            limit = f"restart limit reached: {self._max_restarts} restarts without progress"
            limit += f"; {slow}" if slow else ""
            return f"{limit}; the last failure: {failure.message}"
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
            "at_risk_seconds": round(at_risk_seconds([*events, *ends]), 3),
        }

    def append_generation(self, generation: Generation, world_size: int) -> None:
        """Write that a generation of `world_size` ranks has begun."""
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
            **run_history.to_event(generation),
        )
        if not is_written and generation.reason == FAILURE:
            self._count_unwritten(generation.from_step)
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
        return _backoff_seconds(self._unwritten(self.committed_step()))

    def has_failed_to_save(self, latest: Document) -> bool:
        """Whether the storage ended the latest group, whose document this is, and restarts are
        left.
        """
        failure = root_cause(failures_of(latest))
        is_storage = failure is not None and failure.cause is Cause.STORAGE
        return is_storage and count_restarts(self._read()) < self._max_restarts

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
        is_last |= count_restarts(events) >= self._max_restarts
        return 0 if is_last else _backoff_seconds(times - transient)

    def _unwritten(self, step: int) -> int:
        """The restarts since `step` was committed that are in the rendezvous store only, because
        the ledger could not be written.
        """
        document = self._agent_store.read(_UNWRITTEN)
        return int(document["restarts"]) if document.get("step") == step else 0

    def _count_unwritten(self, step: int) -> None:
        count = self._unwritten(step) + 1
        self._agent_store.change(
            _UNWRITTEN, lambda document: document.update(step=step, restarts=count)
        )

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
                time=min(told) if told else self._find_last_sign(),
            )
        return FAILURE, failure or Failure.of_node(
            Cause.RENDEZVOUS, Exit.PEERS_LOST, "the worker group did not start", generation=last
        )
