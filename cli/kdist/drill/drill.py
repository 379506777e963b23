"""`kdist drill`: hurts a job on purpose, watches it recover, and returns the report.

`run_drill` knows jobs only by a `DrillTarget`: `local` has one for a run on this machine,
`cluster` one for a job in a cluster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Self

from kdist.drill import faults
from kdist.drill.faults import Fault, Situation
from kdist.drill.report import DrillReport, Ledger, Observation, build_drill_report, is_over
from kdist.drill.target import DrillTarget, FaultPlan, Program
from kdist.errors import KdistError, NotFoundError, UsageError
from kdist.job.job import Notify
from kdist.status import documents
from kdist.threads import OnError, start_thread
from kdist.units import seconds
from kdist_trainer.formats import ranges

TIMEOUT: Final = 300.0
"""Seconds that a job gets to train again, after the end of a fault that lasts."""
_INJECT_SECONDS = 30.0  # for the program next to the agent to start and to strike
_SPARE_SECONDS = 10.0  # for it to end, in addition to how long the fault lasts
_LINE_SECONDS = 0.5
_LEDGER_SECONDS = 0.5
_REREAD_SECONDS = 10.0
_FIRST_SECONDS = 5.0
_ACTIONS: Final[dict[Fault, str]] = {
    "rank": "kill-rank",
    "agent": "kill-agent",
    "pod": "kill-node",
    "silence": "silence",
}


def examine(place: DrillTarget, fault: Fault | None = None) -> Situation:
    """All that decides whether the job would survive this fault, or any. Raises `KdistError`."""
    found = place.look()
    if found.inactive:
        raise KdistError(
            f"{found.name} cannot be drilled: {found.inactive}", next_command=found.check
        )
    forbidden: Mapping[Fault, str] = {}
    if fault is None:
        forbidden = place.find_forbidden()
    else:
        place.require_rights(fault)
    return replace(
        found,
        drill=place.find_drill(),
        forbidden=forbidden,
        saved=_find_saved(place.read_ledger()),
    )


def _find_saved(ledger: Ledger) -> int | None:
    """The step of the newest checkpoint in the ledger."""
    steps = [documents.integer(each, "step") or 0 for each in ledger.named("commit")]
    return max(steps, default=0) or None


def plan_fault(
    situation: Situation,
    fault: Fault,
    *,
    rank: int | None = None,
    node: int | None = None,
    lasts: float | None = None,
) -> FaultPlan:
    """Choose what a fault strikes: by default the last rank, or the last node. Raises `UsageError`
    for an option that does not belong to the fault, `NotFoundError` without such a rank or node,
    and `KdistError` that says why if the job would not survive it.
    """
    if rank is not None and fault != "rank":
        raise UsageError(f"--rank belongs to --fault rank, not {fault}", hint="use --node")
    if node is not None and fault == "rank":
        raise UsageError(f"--node does not belong to --fault {fault}")
    if lasts is not None and fault != "silence":
        raise UsageError(f"--for belongs to silence; {fault} does not last")
    _refuse(fault, situation)
    if fault == "rank":
        known = situation.ranks
        chosen = max(known, default=-1) if rank is None else rank
        if chosen not in known:
            raise NotFoundError(
                f"{situation.name} has no rank {chosen}; its ranks: {ranges(sorted(known))}",
                next_command=situation.check,
            )
        struck, local_rank = known[chosen]
    else:
        chosen, local_rank = None, 0
        index = len(situation.nodes) - 1 if node is None else node
        if not 0 <= index < len(situation.nodes):
            raise NotFoundError(
                f"{situation.name} has no node {index}; it has {len(situation.nodes)}",
                next_command=situation.check,
            )
        struck = situation.nodes[index]
    _refuse(fault, situation, struck)
    agent = documents.integer(situation.documents.get(struck), "pid")
    if agent is None:
        raise KdistError(f"the agent of {struck} does not answer", next_command=situation.check)
    lasting = faults.default_seconds(fault, situation) if lasts is None else lasts
    return FaultPlan(fault, struck, chosen, local_rank, agent, lasting)


def _refuse(fault: Fault, situation: Situation, node: str = "") -> None:
    if obstacle := faults.why_refused(fault, situation, node=node):
        raise KdistError(
            f"the fault {fault} is refused for {situation.name}: {obstacle}",
            next_command=situation.check,
        )


def run_drill(
    place: DrillTarget, plan: FaultPlan, *, timeout: float | None, notify: Notify
) -> DrillReport:
    """Inject the planned fault, and watch the job until it trains again, for `timeout` seconds, by
    default `TIMEOUT`. Raises `KdistError` if the fault could not be caused; nothing was hurt then.
    """
    limit = TIMEOUT if timeout is None else timeout
    with place.claim(plan):
        ledger = place.read_ledger()
        before = replace(place.look(), saved=_find_saved(ledger))
        _refuse(plan.fault, before, plan.node)
        if documents.integer(before.documents.get(plan.node), "pid") != plan.agent:
            raise KdistError(
                f"the agent of {plan.node} was restarted meanwhile: nothing was hurt",
                next_command=before.check,
            )
        seen = Observation(plan.fault, plan.target, before, ledger, place.interval)
        with _Watcher(place) as watcher:
            began, struck_at = (
                time.time(),
                _inject(place, plan, watcher, notify, check=before.check),
            )
            lasted = time.monotonic() - struck_at if plan.seconds else 0.0
            seen = replace(seen, began=began, struck_at=struck_at, lasted=lasted)
            if plan.seconds:
                notify(f"the fault is over after {seconds(lasted)}")
            return build_drill_report(_observe(place, seen, watcher, limit))


def _observe(place: DrillTarget, seen: Observation, watcher: _Watcher, limit: float) -> Observation:
    """Look at the job until it trains again, has ended, or the time is up."""
    began = read_at = time.monotonic()
    while True:
        waited = time.monotonic() - began
        found = watcher.latest or seen.before
        seen = replace(seen, after=found, progress=watcher.progress, waited=waited)
        ends = waited > limit or bool(found.inactive)
        # a ledger may be large: it is read where it is likely to have what is missing
        if ends or seen.has_moved_on or time.monotonic() - read_at > _REREAD_SECONDS:
            read_at = time.monotonic()
            ledger = place.read_ledger()
            if ledger.events:
                seen = replace(seen, ledger=ledger)
            if is_over(seen):
                return replace(seen, in_time=True)
        if ends:
            return seen
        time.sleep(_LEDGER_SECONDS)


def _inject(
    place: DrillTarget, plan: FaultPlan, watcher: _Watcher, notify: Notify, *, check: str
) -> float:
    """Cause the fault, and wait for the end of one that lasts; returns the monotonic time of its
    start.
    """
    watcher.wait_for_step()
    notify(f"the drill {plan.action}")
    if plan.fault == "pod" and place.delete_pod(plan.node):
        return time.monotonic()
    with place.start_program(plan, _ACTIONS[plan.fault]) as program:
        answer = _read(program, _INJECT_SECONDS)
        if answer.get("state") == "refused":
            raise KdistError(f"nothing was hurt: {documents.text(answer, 'reason')}")
        if not answer:
            raise KdistError(
                f"the program that {plan.action} ended without an answer: whether it did so is "
                "not known",
                next_command=check,
            )
        struck_at = time.monotonic()
        if not plan.seconds:
            return struck_at
        watcher.without = plan.node
        ended = _read(program, plan.seconds + _SPARE_SECONDS)
    watcher.without = ""
    if ended.get("state") != "over":
        # the program has ended too early
        with place.start_program(plan, "wake") as program:
            _read(program, _INJECT_SECONDS)
    return struck_at


def _read(program: Program, timeout: float) -> Mapping[str, Any]:
    """The next line of the program; empty if it ended, or printed nothing in time."""
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        line = program.read_line(min(left, _LINE_SECONDS))
        if line is None:
            if not program.is_open():
                line = program.read_line(0)
            if line is None and not program.is_open():
                return {}
        if found := documents.parse(line):
            return found
    return {}


class _Watcher:
    """Looks at a job in a thread of its own while a drill is in progress.

    Attributes:
        progress: monotonic time, generation and step of each finished step that it saw.
        latest: the job as it was last; None before the first look.
        without: an agent that is not asked.
    """

    def __init__(self, place: DrillTarget) -> None:
        self.progress: tuple[tuple[float, int, int], ...] = ()
        self.latest: Situation | None = None
        self.without = ""
        self._place = place
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        start_thread(self._watch, name="drill", on_error=OnError.RESTART)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def wait_for_step(self) -> None:
        """Wait for a finished step, so that the stall has a beginning; a job whose steps take
        long has one that is not seen.
        """
        end = time.monotonic() + _FIRST_SECONDS
        while len(self.progress) < 2 and time.monotonic() < end:
            time.sleep(self._place.interval)

    def _watch(self) -> None:
        last = (0, 0)
        while not self._closed.is_set():
            with suppress(KdistError):  # an API server that is away; the next look may succeed
                self.latest = found = self._place.look(without=self.without)
                now = time.monotonic()
                if found.step is not None and (found.generation, found.step) != last:
                    last = (found.generation, found.step)
                    self.progress = (*self.progress, (now, *last))
            self._closed.wait(self._place.interval)
