"""What becomes of a job that was edited since its checkpoint was written: one table says it of
every field of `spec.train`.

The document that a checkpoint and DONE keep of their job is {"train": …} or {"script": …}, as
`train.json` has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

Document = Mapping[str, Any]
_LONGEST_VALUE = 80


class Fate(StrEnum):
    """What becomes of an edited field where a training goes on from a checkpoint."""

    FREE = "free"
    """The new value holds and nothing is said: it changes how the work is done, and no bit of what
    comes out.
    """
    TAKEN = "taken over"
    """The new value holds from the checkpoint's position on, and is told."""
    FRESH = "needs --fresh"
    """Only a run that begins anew reads it: the training goes on with what it began with, and this
    is told.
    """
    REFUSED = "refused"
    """The checkpoint does not fit the new value: exit code 73."""


@dataclass(frozen=True)
class Rule:
    """The fate of a field, and why. `refused_if` looks at the two `train` sections, the old one
    first.
    """

    fate: Fate
    why: str
    refused_if: Callable[[Document, Document], bool] | None = None

    def decide(self, before: Document, now: Document) -> Fate:
        """The fate of this very edit."""
        refused = self.refused_if is not None and self.refused_if(before, now)
        return Fate.REFUSED if refused else self.fate


def _changes_weights_type(before: Document, now: Document) -> bool:
    return "bf16-params" in (before["precision"], now["precision"])


def _comes_or_goes(*path: str) -> Callable[[Document, Document], bool]:
    def differs(before: Document, now: Document) -> bool:
        return bool(_at(before, path)) != bool(_at(now, path))

    return differs


def _changes_momentum(before: Document, now: Document) -> bool:
    return now["optimizer"]["name"] == "sgd" and _comes_or_goes("optimizer", "momentum")(
        before, now
    )


def _at(document: Document, path: tuple[str, ...]) -> Any:
    value: Any = document
    for key in path:
        value = value[key]
    return value


_DEALING = "other sums and other randomness in a step; every sample is still used once"
RULES: Final[Mapping[str, Rule]] = {
    "workload": Rule(Fate.TAKEN, "refused where another model, optimizer or data set comes of it"),
    "options": Rule(Fate.TAKEN, "refused where another model, optimizer or data set comes of it"),
    "epochs": Rule(
        Fate.TAKEN, "the end moves; a run that is past it says so, and ends where it is"
    ),
    "steps": Rule(Fate.TAKEN, "the end moves; a run that is past it says so, and ends where it is"),
    "globalBatch": Rule(
        Fate.TAKEN,
        (
            "the position is in samples: epochs end at the same sample, `steps` stays the "
            "number of steps; refused for streams"
        ),
    ),
    "microBatch": Rule(Fate.TAKEN, _DEALING),
    "virtualShards": Rule(Fate.TAKEN, f"{_DEALING}; refused for streams"),
    "strategy": Rule(Fate.TAKEN, "every strategy reads every checkpoint"),
    "modelParallel": Rule(Fate.TAKEN, "every strategy reads every checkpoint"),
    "offload": Rule(
        Fate.TAKEN, "the CPU's arithmetic instead of the device's, or the other way round"
    ),
    "pipeline": Rule(Fate.TAKEN, _DEALING),
    "precision": Rule(
        Fate.TAKEN,
        "weights stay what they are; refused from and to bf16-params, which would round them",
        _changes_weights_type,
    ),
    "seed": Rule(Fate.REFUSED, "a position means other samples under another seed"),
    "optimizer.name": Rule(Fate.REFUSED, "the state in the checkpoint is the other optimizer's"),
    "optimizer.learningRate": Rule(Fate.TAKEN, "the schedule is computed from it at the position"),
    "optimizer.weightDecay": Rule(Fate.TAKEN, "for all parameters"),
    "optimizer.momentum": Rule(
        Fate.TAKEN, "refused from and to 0 for sgd, which keeps no state for 0", _changes_momentum
    ),
    "optimizer.betas": Rule(Fate.TAKEN, "for all parameters"),
    "schedule": Rule(
        Fate.TAKEN, "as if it had been so from the first step on: the rate is that of the position"
    ),
    "clipGradNorm": Rule(Fate.TAKEN, "from the next step on"),
    "onNonfinite": Rule(Fate.TAKEN, "from the next step on"),
    "gradSpikeFactor": Rule(Fate.TAKEN, "from the next step on"),
    "syncEverySteps": Rule(Fate.FREE, "when ranks confer changes no weight"),
    "evaluate": Rule(Fate.TAKEN, "when the training ends"),
    "evaluateEverySteps": Rule(Fate.TAKEN, "from the next step on"),
    "earlyStop": Rule(Fate.TAKEN, "evaluations so far are forgotten"),
    "emaDecay": Rule(
        Fate.TAKEN,
        "refused where the average is new or gone: the checkpoint has none, or one",
        _comes_or_goes("emaDecay"),
    ),
    "activationCheckpointing": Rule(Fate.FREE, "the same bits with less memory"),
    "compile": Rule(Fate.TAKEN, "other arithmetic for the same model"),
    "bucketMib": Rule(Fate.TAKEN, "another order of sums over three ranks or more"),
    "collectiveTiming": Rule(Fate.FREE, "measures, and changes nothing"),
    "tensorboard": Rule(Fate.FREE, "draws, and changes nothing"),
    "init": Rule(Fate.FRESH, "only a run that starts over reads it"),
    "loader": Rule(Fate.FREE, "the same samples by other processes"),
    "checkpoint": Rule(Fate.FREE, "when and how state is saved changes none of it"),
}
"""Field of `spec.train`, or of a section in it, by its name in job.yaml: what becomes of an
edit.
"""

_OF_STREAMS = Rule(
    Fate.REFUSED, "a stream is dealt to shards by the batch: another one reads other samples"
)
_BY_BATCH = ("globalBatch", "virtualShards")


@dataclass(frozen=True)
class Change:
    """One edited field, by its name below `spec.train`."""

    field: str
    before: Any
    now: Any
    fate: Fate
    why: str

    def __str__(self) -> str:
        return f"{self.edit}: {self.fate}" + (
            f" ({self.why})" if self.fate in (Fate.FRESH, Fate.REFUSED) else ""
        )

    @property
    def edit(self) -> str:
        """The edit alone."""
        return f"{self.field} {_shown(self.before)} -> {_shown(self.now)}"


def compare(before: Document, now: Document, *, stream: bool = False) -> list[Change]:
    """What was edited between two `train` sections, and what becomes of each; fields that one of
    them lacks are left out.

    `stream`: the training's data is a stream, whose position goes by steps of equal batches.
    """
    changes = []
    for field, old, new in _edits(before, now):
        rule = _OF_STREAMS if stream and field in _BY_BATCH else RULES[_ruled(field)]
        changes.append(Change(field, old, new, rule.decide(before, now), rule.why))
    return changes


def _ruled(field: str) -> str:
    return field if field in RULES else field.partition(".")[0]


def _edits(before: Document, now: Document, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key in now:
        old, new, field = before.get(key, now[key]), now[key], f"{prefix}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping) and field != "options":
            yield from _edits(old, new, f"{field}.")
        elif old != new:
            yield field, old, new


def _shown(value: Any) -> str:
    text = (
        "none"
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
    )
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def refuse(changes: list[Change]) -> str | None:
    """Why a training cannot go on under these changes, and what helps; None where it can."""
    bad = [change for change in changes if change.fate is Fate.REFUSED]
    if not bad:
        return None
    told = "; ".join(f"spec.train.{change.edit} ({change.why})" for change in bad)
    return (
        f"the job was edited so that its checkpoints do not fit it: {told}. Put the old value "
        "back, or begin anew with --fresh"
    )


@dataclass(frozen=True)
class Finished:
    """A run that has ended, and the job as it is now."""

    changes: list[Change]
    goes_on: bool
    """Its end was moved further away, and nothing keeps it from going on to there."""
    at: str = ""
    """Where it ended."""

    @property
    def problem(self) -> str | None:
        """Why the job is neither done nor can go on; None where one of them holds."""
        told = [change for change in self.changes if change.fate is not Fate.FREE]
        if self.goes_on or not told:
            return None
        edits = "; ".join(
            str(change) if change.fate is Fate.REFUSED else change.edit for change in told
        )
        way = "put the old values back to see its report, or begin anew with --fresh"
        return f"the run is done{self.at}, and the job was edited since: {edits}; {way}"

    @property
    def is_over(self) -> bool:
        """Whether what was done is what the job asks for."""
        return not self.goes_on and self.problem is None


def judge_done(done: Document, job: Document) -> Finished:
    """Compare the document in DONE with the job as it is now; a DONE that does not say what job it
    was is taken to be of it.
    """
    before, now = done.get("job"), {name: job.get(name) for name in ("train", "script")}
    if not isinstance(before, Mapping):
        return Finished([], goes_on=False)
    was, train = before.get("train"), now["train"]
    if not isinstance(was, Mapping) or not isinstance(train, Mapping):
        old, new = (
            {"script": each.get("script"), "train": bool(each.get("train"))}
            for each in (before, now)
        )
        edits = [edit for edit in _edits(old, new) if edit[1] != edit[2]]
        return Finished(
            [Change(*edit, Fate.REFUSED, "what a script makes of it is its own") for edit in edits],
            goes_on=False,
        )
    changes = compare(was, train)
    refused = any(change.fate is Fate.REFUSED for change in changes)
    at = (
        f" with step {done.get('step')}, after {done.get('samples_seen')} samples"
        if "step" in done
        else ""
    )
    return Finished(changes, goes_on=not refused and _ends_later(was, train, done), at=at)


def _ends_later(before: Document, now: Document, done: Document) -> bool:
    if now["epochs"] is not None:
        return before["epochs"] is None or now["epochs"] > before["epochs"]
    reached = done.get("step") if before["steps"] is None else before["steps"]
    return isinstance(reached, int) and now["steps"] > reached


def table() -> str:
    """The rules in Markdown."""
    rows = [f"| `{field}` | {rule.fate} | {rule.why} |" for field, rule in RULES.items()]
    return "\n".join(["| field | an edit is | |", "|---|---|---|", *rows]) + "\n"
