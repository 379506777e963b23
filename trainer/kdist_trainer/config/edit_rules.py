"""The effect of editing a job after its checkpoint was written: one rule per `spec.train` field.

Checkpoints and DONE contain the document {"train": …} or {"script": …} of their job, as in
`train.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kdist_trainer.formats.json_text import encode_json

Document = Mapping[str, Any]
_MAX_VALUE_LENGTH = 80


class EditEffect(StrEnum):
    """The effect of an edited field on a run that resumes from a checkpoint."""

    FREE = "free"
    """The new value applies and is not reported: results stay bitwise identical."""
    APPLIED = "taken over"
    """The new value applies from the checkpoint's position on, and is reported."""
    NEEDS_FRESH = "needs --fresh"
    """Only a new run reads the field. The training continues with the old value, and this is
    reported.
    """
    REFUSED = "refused"
    """The checkpoint does not fit the new value: the run fails with exit code 73."""


@dataclass(frozen=True)
class Rule:
    """The effect of editing a field, and the reason. `refused_if` gets the old and the new `train`
    section.
    """

    effect: EditEffect
    why: str
    refused_if: Callable[[Document, Document], bool] | None = None

    def decide(self, before: Document, now: Document) -> EditEffect:
        """The effect of the edit from `before` to `now`."""
        refused = self.refused_if is not None and self.refused_if(before, now)
        return EditEffect.REFUSED if refused else self.effect


_SHARDING = "changes the order of sums and the randomness in a step; every sample is used once"
RULES: Final[Mapping[str, Rule]] = {
    "workload": Rule(
        EditEffect.APPLIED, "refused if the model, the optimizer or the data set changes"
    ),
    "options": Rule(
        EditEffect.APPLIED, "refused if the model, the optimizer or the data set changes"
    ),
    "epochs": Rule(
        EditEffect.APPLIED, "the end moves; a run that is already past it reports so and ends there"
    ),
    "steps": Rule(
        EditEffect.APPLIED, "the end moves; a run that is already past it reports so and ends there"
    ),
    "globalBatch": Rule(
        EditEffect.APPLIED,
        (
            "the position is in samples: epochs end at the same sample, `steps` stays the "
            "number of steps; refused for streams"
        ),
    ),
    "microBatch": Rule(EditEffect.APPLIED, _SHARDING),
    "virtualShards": Rule(EditEffect.APPLIED, f"{_SHARDING}; refused for streams"),
    "strategy": Rule(EditEffect.APPLIED, "every strategy reads every checkpoint"),
    "modelParallel": Rule(EditEffect.APPLIED, "every strategy reads every checkpoint"),
    "offload": Rule(
        EditEffect.APPLIED, "the optimizer computes on the CPU instead of the device, or vice versa"
    ),
    "pipeline": Rule(EditEffect.APPLIED, _SHARDING),
    "precision": Rule(
        EditEffect.APPLIED,
        "weights do not change; refused from and to bf16-params, which would round them",
        lambda before, now: "bf16-params" in (before["precision"], now["precision"]),
    ),
    "seed": Rule(EditEffect.REFUSED, "a position denotes other samples under another seed"),
    "optimizer.name": Rule(
        EditEffect.REFUSED, "the checkpoint contains the state of the other optimizer"
    ),
    "optimizer.learningRate": Rule(
        EditEffect.APPLIED, "the schedule is computed from it at the current position"
    ),
    "optimizer.weightDecay": Rule(EditEffect.APPLIED, "for all parameters"),
    "optimizer.momentum": Rule(
        EditEffect.APPLIED,
        "refused from and to 0 for sgd, which keeps no state for 0",
        lambda before, now: (
            now["optimizer"]["name"] == "sgd"
            and bool(before["optimizer"]["momentum"]) != bool(now["optimizer"]["momentum"])
        ),
    ),
    "optimizer.betas": Rule(EditEffect.APPLIED, "for all parameters"),
    "schedule": Rule(
        EditEffect.APPLIED, "the learning rate is that of the new schedule at the current position"
    ),
    "clipGradNorm": Rule(EditEffect.APPLIED, "from the next step on"),
    "onNonfinite": Rule(EditEffect.APPLIED, "from the next step on"),
    "gradSpikeFactor": Rule(EditEffect.APPLIED, "from the next step on"),
    "syncEverySteps": Rule(EditEffect.FREE, "the sync interval does not affect the weights"),
    "evaluate": Rule(EditEffect.APPLIED, "when the training ends"),
    "evaluateEverySteps": Rule(EditEffect.APPLIED, "from the next step on"),
    "earlyStop": Rule(EditEffect.APPLIED, "earlier evaluations are discarded"),
    "emaDecay": Rule(
        EditEffect.APPLIED,
        "refused if it is added or removed: the checkpoint has no average, or has one",
        lambda before, now: bool(before["emaDecay"]) != bool(now["emaDecay"]),
    ),
    "activationCheckpointing": Rule(EditEffect.FREE, "the same results with less memory"),
    "compile": Rule(EditEffect.APPLIED, "other arithmetic for the same model"),
    "bucketMib": Rule(EditEffect.APPLIED, "changes the order of sums over three or more ranks"),
    "recovery": Rule(EditEffect.FREE, "how ranks recover does not affect the weights"),
    "collectiveTiming": Rule(EditEffect.FREE, "only measures"),
    "tensorboard": Rule(EditEffect.FREE, "only writes event files"),
    "tracker": Rule(
        EditEffect.FREE, "only shows the steps; another one is given them from the first"
    ),
    "init": Rule(
        EditEffect.NEEDS_FRESH,
        "only a new run reads it; `endpoint`, `region`, `secret` and `size` are free",
    ),
    "loader": Rule(EditEffect.FREE, "the same samples, loaded by other processes"),
    "checkpoint": Rule(EditEffect.FREE, "when and how the state is saved does not affect it"),
}
"""The rule of each field of `spec.train`, or of a section in it, by the field's name in
job.yaml.
"""

_OF_STREAMS = Rule(
    EditEffect.REFUSED,
    "a stream is divided into shards by the batch: another batch reads other samples",
)
_BY_BATCH = ("globalBatch", "virtualShards")
_OF_FETCHING = Rule(EditEffect.FREE, "only says how the weights are fetched")
_HOW_FETCHED = ("init.endpoint", "init.region", "init.secret", "init.size")


@dataclass(frozen=True)
class Change:
    """One edited field, by its name below `spec.train`."""

    field: str
    before: Any
    now: Any
    effect: EditEffect
    why: str

    def __str__(self) -> str:
        explained = self.effect in (EditEffect.NEEDS_FRESH, EditEffect.REFUSED)
        return f"{self.edit}: {self.effect}" + (f" ({self.why})" if explained else "")

    @property
    def edit(self) -> str:
        """The field with its old and new value."""
        return f"{self.field} {_shown(self.before)} -> {_shown(self.now)}"


def compare(before: Document, now: Document, *, stream: bool = False) -> list[Change]:
    """List the edits from the `train` section that the checkpoint was written under. Fields that
    one of them lacks are left out. The position of a stream counts steps of equal batches.
    """
    changes = []
    for field, old, new in _edits(before, now):
        if stream and field in _BY_BATCH:
            rule = _OF_STREAMS
        elif field in _HOW_FETCHED:
            rule = _OF_FETCHING
        else:
            rule = RULES[field if field in RULES else field.partition(".")[0]]
        changes.append(Change(field, old, new, rule.decide(before, now), rule.why))
    return changes


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
        else encode_json(value, ensure_ascii=False)
    )
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 1]}…"


def explain_refusal(changes: list[Change]) -> str | None:
    """Explain why a training cannot resume under these changes and what to do; None if it can."""
    refused = [change for change in changes if change.effect is EditEffect.REFUSED]
    if not refused:
        return None
    edits = "; ".join(f"spec.train.{change.edit} ({change.why})" for change in refused)
    return (
        f"the checkpoints do not fit the edited job: {edits}. Restore the old value, or start a "
        "new run with --fresh"
    )


@dataclass(frozen=True)
class FinishedRun:
    """A run that has finished, compared with the current job."""

    changes: list[Change]
    continues: bool
    """Whether its end was moved further away and it can continue to there."""
    at: str = ""
    """Where it ended."""

    @property
    def problem(self) -> str | None:
        """Why the job is neither complete nor can continue; None if it is or can."""
        reported = [change for change in self.changes if change.effect is not EditEffect.FREE]
        if self.continues or not reported:
            return None
        edits = "; ".join(
            str(change) if change.effect is EditEffect.REFUSED else change.edit
            for change in reported
        )
        fix = "restore the old values to see its report, or start a new run with --fresh"
        return f"the run is done{self.at}, and the job was edited since: {edits}; {fix}"

    @property
    def is_complete(self) -> bool:
        """Whether the run has done what the job asks for."""
        return not self.continues and self.problem is None


def compare_done(done: Document, job: Document) -> FinishedRun:
    """Compare a finished run, by the document in DONE, with the current job, which has the keys
    `train` and `script`. If DONE does not contain its job, it is assumed to be the current one.
    """
    before, now = done.get("job"), {name: job.get(name) for name in ("train", "script")}
    if not isinstance(before, Mapping):
        return FinishedRun([], continues=False)
    was, train = before.get("train"), now["train"]
    if not isinstance(was, Mapping) or not isinstance(train, Mapping):
        old, new = (
            {"script": each.get("script"), "train": bool(each.get("train"))}
            for each in (before, now)
        )
        why = "the effect on a script is unknown"
        changes = [Change(*edit, EditEffect.REFUSED, why) for edit in _edits(old, new)]
        return FinishedRun(changes, continues=False)
    changes = compare(was, train)
    refused = any(change.effect is EditEffect.REFUSED for change in changes)
    at = (
        f" with step {done.get('step')}, after {done.get('samples_seen')} samples"
        if "step" in done
        else ""
    )
    return FinishedRun(changes, continues=not refused and _ends_later(was, train, done), at=at)


def _ends_later(before: Document, now: Document, done: Document) -> bool:
    if now["epochs"] is not None:
        return before["epochs"] is None or now["epochs"] > before["epochs"]
    reached = done.get("step") if before["steps"] is None else before["steps"]
    return isinstance(reached, int) and now["steps"] > reached
