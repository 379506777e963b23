"""The report of a drill: what a job's own records show of a fault, next to what is promised
(docs/explanation/promises.md). Pure.

The step ledger decides which steps were lost: those that the old worker groups had finished and
that the new ones did again. So it is right for a group that restarts from a checkpoint and for one
that recovers in place, which does none again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kdist.drill.faults import Fault, Situation
from kdist.status import documents
from kdist.units import count, number, seconds
from kdist_trainer.formats import CLI_API_VERSION

Record = Mapping[str, Any]
HEADER = ("PROMISE", "MEASURED", "KEPT")
_KEPT = {True: "yes", False: "NO", None: "not known"}
_MOST_LISTED = 3
_STEPS_AFTER = 3
_UNKNOWN = Situation("", "local", {})


@dataclass(frozen=True)
class Ledger:
    """The lines of a run's ledger, in their order."""

    events: Sequence[Record] = ()
    steps: Sequence[Record] = ()

    def named(self, name: str, *, after: int = 0) -> list[Record]:
        return [each for each in self.events[after:] if documents.text(each, "event") == name]

    def generations(self, after: int) -> list[Record]:
        """The worker groups that formed after the generation `after`, by number."""
        found = [each for each in self.named("generation") if _generation(each) > after]
        return sorted(found, key=_generation)

    def steps_of(self, *, until: int | None = None, after: int | None = None) -> list[Record]:
        """The lines of the generations up to `until`, or after `after`."""
        return [
            line
            for line in self.steps
            if documents.integer(line, "step") is not None
            and (until is None or _generation(line) <= until)
            and (after is None or _generation(line) > after)
        ]


def _generation(record: Record) -> int:
    return documents.integer(record, "generation") or 0


def _step(record: Record) -> int:
    return documents.integer(record, "step") or 0


def _first_step(record: Record) -> int:
    """The first of the steps that one record may stand for (`kdist_trainer.formats.step_lines`)."""
    return _step(record) - (documents.integer(record, "steps") or 1) + 1


@dataclass(frozen=True)
class Observation:
    """What was observed of a drill.

    Attributes:
        fault: the fault.
        target: what it struck, in words.
        before: the job just before.
        ledger_before: the ledger just before.
        interval: seconds between two looks at the job.
        began: when it struck, in Unix time.
        struck_at: when it struck, in monotonic time.
        lasted: seconds that it lasted; 0 for one that does not last.
        after: the job at the end.
        ledger: the ledger at the end.
        progress: monotonic time, generation and step of each finished step that was seen.
        waited: seconds from the fault, or from its end, to the end of the observation.
        in_time: whether the job trained again before the time was up.
    """

    fault: Fault
    target: str
    before: Situation
    ledger_before: Ledger
    interval: float
    began: float = 0.0
    struck_at: float = 0.0
    lasted: float = 0.0
    after: Situation = _UNKNOWN
    ledger: Ledger = field(default_factory=Ledger)
    progress: Sequence[tuple[float, int, int]] = ()
    waited: float = 0.0
    in_time: bool = False

    @property
    def generation_after(self) -> int:
        """The last generation that has formed."""
        formed = [_generation(each) for each in self.ledger.named("generation")]
        return max([self.after.generation, *formed])

    @property
    def reached(self) -> int | None:
        """The last step that the struck worker group has finished, as far as it is known."""
        number_before = self.before.generation
        steps = [step for _, generation, step in self.progress if generation <= number_before]
        steps += [_step(line) for line in self.ledger.steps_of(until=number_before)]
        if self.before.step is not None:
            steps.append(self.before.step)
        return max(steps, default=None)

    @property
    def resumed(self) -> int | None:
        """The first step of the worker group that followed; None if it is not known."""
        later = [_first_step(line) for line in self.ledger.steps_of(after=self.before.generation)]
        return min(later, default=None)

    @property
    def lost(self) -> int | None:
        """Finished steps that were done again; None if that is not known."""
        if self.generation_after == self.before.generation:
            return 0 if self.reached is not None else None
        if self.reached is None or self.resumed is None:
            return None
        return max(0, self.reached - (self.resumed - 1))

    @property
    def has_moved_on(self) -> bool:
        """Whether the job seems to train again, as far as its agents say."""
        if self.lasted:
            return _has_passed(self)
        if self.after.generation <= self.before.generation:
            return False
        reached = max(
            (step for _, old, step in self.progress if old <= self.before.generation), default=0
        )
        return self.after.step is None or self.after.step > reached

    @property
    def stall(self) -> float | None:
        """The longest time without a finished step, from the last one before the fault on."""
        times = [at for at, _, _ in self.progress]
        earlier = [at for at in times if at <= self.struck_at]
        later = [at for at in times if at > self.struck_at]
        if not later:
            return None
        return max(b - a for a, b in pairwise([*(earlier[-1:] or [self.struck_at]), *later]))

    @property
    def restarts(self) -> int:
        formed = self.ledger.generations(self.before.generation)
        return sum(documents.text(each, "reason") == "failure" for each in formed)


@dataclass(frozen=True)
class Line:
    """One promise, what was measured, and whether it was kept; None if that is not known."""

    promise: str
    measured: str
    kept: bool | None

    def cells(self) -> tuple[str, str, str]:
        return self.promise, self.measured, _KEPT[self.kept]


@dataclass(frozen=True)
class DrillReport:
    """The promises that a drill has tried, and facts that no promise is about."""

    observation: Observation
    lines: tuple[Line, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        """Whether no promise was broken."""
        return all(line.kept is not False for line in self.lines)

    def to_document(self) -> dict[str, Any]:
        """The report for programs; what is not known is null."""
        seen = self.observation
        return {
            "apiVersion": CLI_API_VERSION,
            "kind": "DrillReport",
            "job": seen.before.name,
            "fault": seen.fault,
            "struck": seen.target,
            "time": round(seen.began, 3),
            "lastedSeconds": round(seen.lasted, 3),
            "stallSeconds": (None if seen.stall is None else round(seen.stall, 3)),
            "stepReached": seen.reached,
            "stepResumed": seen.resumed,
            "stepsLost": seen.lost,
            "generation": {"before": seen.before.generation, "after": seen.generation_after},
            "worldSize": {"before": seen.before.world_size, "after": seen.after.world_size},
            "restarts": seen.restarts,
            "restartsLeft": seen.after.restarts_left,
            "promises": [
                {"promise": line.promise, "measured": line.measured, "kept": line.kept}
                for line in self.lines
            ],
            "kept": self.kept,
        }


def is_over(seen: Observation) -> bool:
    """Whether the job trains again and all that the report needs is recorded."""
    if seen.ledger.named("done", after=len(seen.ledger_before.events)):
        return True
    follows = seen.generation_after > seen.before.generation
    if seen.before.is_script and seen.reached is None:
        return follows and seen.after.trains and seen.after.generation > seen.before.generation
    if seen.fault == "silence" and not follows:
        return _has_passed(seen) and seen.after.trains
    reached = seen.reached
    later = seen.ledger.steps_of(after=seen.before.generation)
    moved_on = reached is not None and any(_step(line) > reached for line in later)
    # The ledger may be ahead of what the watcher has seen, by which the stall is measured.
    is_measured = seen.stall is not None or not seen.progress
    # All agents train, so that another drill may follow at once.
    return moved_on and is_measured and seen.after.trains


def _has_passed(seen: Observation) -> bool:
    """Whether steps were finished after a fault that lasts. A rank that wakes up may still finish
    the one that it was in, although the others have gone on without it.
    """
    end = seen.struck_at + seen.lasted
    return sum(at > end for at, _, _ in seen.progress) >= _STEPS_AFTER


def build_drill_report(seen: Observation) -> DrillReport:
    """Compare what was observed with what is promised."""
    lines = [_continuity(seen), _loss_of_steps(seen), _samples(seen)]
    if seen.before.bits_are_promised:
        lines.append(_bits(seen))
    return DrillReport(seen, tuple(lines), dict(_facts(seen)))


def _continuity(seen: Observation) -> Line:
    promise = "it goes on by itself"
    if not seen.in_time:
        ended = seen.after.inactive
        return Line(promise, ended or f"not within {seen.waited:.0f} s", False)
    stall = seen.stall
    if stall is None:
        return Line(promise, f"its ranks run again after {seconds(seen.waited)}", True)
    return Line(promise, f"{seconds(stall)} without a finished step", True)


def _loss_of_steps(seen: Observation) -> Line:
    committed = seen.before.committed
    promise = "no step is lost"
    if committed is not None:
        promise = f"at most the steps since the checkpoint of step {committed:,} are repeated"
    lost = seen.lost
    if lost is None or seen.reached is None:
        return Line(promise, "the job does not report its steps", None)
    if not lost:
        return Line(promise, f"none, step {seen.reached:,} was the last before", True)
    allowed = max(0, seen.reached - (committed or 0))
    first = seen.reached - lost + 1
    measured = f"{count(lost, 'step')} ({first:,} to {seen.reached:,}), {allowed:,} allowed"
    return Line(promise, measured, lost <= allowed)


def _samples(seen: Observation) -> Line:
    promise = "every sample is used once"
    since = seen.before.committed or 0
    counted = [line for line in _effective(seen.ledger.steps) if _step(line) >= since]
    pairs = list(pairwise(counted))
    if not pairs:
        return Line(promise, "the job does not report its samples", None)
    for one, following in pairs:
        last, first = documents.integer(one, "last"), documents.integer(following, "first")
        if last is None or first is None:
            return Line(promise, "the ledger has no positions of samples", None)
        if _first_step(following) != _step(one) + 1 or first != last + 1:
            goes_on = _first_step(following)
            where = f"after step {_step(one):,} the ledger goes on with step {goes_on:,}"
            return Line(promise, f"{where}, sample {first:,} after {last:,}", False)
    samples = sum(
        (documents.integer(each, "last") or 0) - (documents.integer(each, "first") or 0) + 1
        for each in counted
    )
    measured = (
        f"{number(samples)} in the steps {_first_step(counted[0]):,} to {_step(counted[-1]):,}"
    )
    return Line(promise, f"{measured}, without a gap", True)


def _effective(steps: Iterable[Record]) -> list[Record]:
    """The steps that count: one that was done again replaces it and all that followed."""
    kept: list[Record] = []
    for line in steps:
        if documents.integer(line, "step") is None:
            continue
        while kept and _step(kept[-1]) >= _first_step(line):
            kept.pop()
        kept.append(line)
    return kept


def _bits(seen: Observation) -> Line:
    promise = "repeated steps have the same loss, to the bit"
    if seen.lost == 0:
        return Line(promise, "no step was repeated", True)
    before = {_step(line): line for line in seen.ledger.steps_of(until=seen.before.generation)}
    again = {_step(line): line for line in seen.ledger.steps_of(after=seen.before.generation)}
    both = sorted(
        step
        for step in before.keys() & again.keys()
        if documents.text(before[step], "loss") and documents.text(again[step], "loss")
    )
    sizes = {
        documents.integer(each[step], "world_size") for each in (before, again) for step in both
    }
    if not both:
        return Line(promise, "the ledger has the loss of none of them twice", None)
    if len(sizes) > 1:
        ranks = " and ".join(str(size) for size in sorted(size or 0 for size in sizes))
        return Line(promise, f"groups of {ranks} ranks add in another order", None)
    different = [
        step
        for step in both
        if documents.text(before[step], "loss") != documents.text(again[step], "loss")
    ]
    if different:
        shown = ", ".join(map(str, different[:_MOST_LISTED]))
        return Line(promise, f"{len(different)} of {len(both)} differ: step {shown}", False)
    return Line(promise, f"{len(both)} of {len(both)}", True)


def _facts(seen: Observation) -> Iterable[tuple[str, str]]:
    if seen.before.step_seconds is not None:
        yield "a step takes", seconds(seen.before.step_seconds)
    if seen.stall is not None:
        yield "looked every", seconds(seen.interval)
    yield "generation", f"{seen.before.generation} before, {seen.generation_after} after"
    left = seen.after.restarts_left
    budget = f" of {seen.before.max_restarts}" if seen.before.max_restarts is not None else ""
    yield "restarts", f"{seen.restarts} used" + ("" if left is None else f", {left}{budget} left")
    if seen.after.world_size and seen.after.world_size != seen.before.world_size:
        yield "ranks", f"{seen.before.world_size} before, {seen.after.world_size} now"
    recorded = seen.ledger.named("failure", after=len(seen.ledger_before.events))
    if recorded:
        cause, message = (documents.text(recorded[0], key) for key in ("cause", "message"))
        words = message.splitlines()[:1]
        yield "recorded as", ": ".join([cause, *words])
