"""Which checkpoints of a run stay, and why: its last ones, the one of its best evaluation, and some
for ever. Free of torch.

What decides is in the run's ledger, for those who only list a folder: with more than a number to
keep, each commit notes the rule, and the best evaluation so far, whose own line may have gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.manifest import MANIFEST, Checkpoint
from kdist_trainer.config import Best, Keep
from kdist_trainer.formats.untrusted_text import finite_number

Event = Mapping[str, Any]


def select(
    valid: Sequence[Checkpoint], events: Iterable[Event], *, keep: Keep, apart: float = 0.0
) -> dict[str, list[str]]:
    """The names of the checkpoints that stay, each with the fields of `keep` that it stays for.

    Args:
        valid: all that count, newest first.
        events: of the run's ledger, oldest first; only read for the best evaluation.
        keep: what stays.
        apart: seconds that must lie between the last ones besides the newest one.
    """
    found = {one.name: ["last"] for one in _select_last(valid, keep.last, apart)}
    oldest_first = list(reversed(valid))
    if keep.best is not None and valid:
        best = find_best(events, keep.best, until=valid[0].step)
        first = next((one for one in oldest_first if best and one.step >= best[0]), None)
        if first is not None:
            found.setdefault(first.name, []).append("best")
    if keep.every is not None:
        passed = 0
        for one in oldest_first:
            if one.step // keep.every > passed:
                passed = one.step // keep.every
                found.setdefault(one.name, []).append("every")
    return found


def _select_last(valid: Sequence[Checkpoint], count: int, apart: float) -> Sequence[Checkpoint]:
    """The newest checkpoint and the older ones that stay with it.

    Each is the first one that is far enough from the one before it: so the oldest stays until
    others have become old, however often a run saves. One whose time is not known is no history.
    """
    if apart <= 0 or count == 1:
        return valid[:count]
    history: list[Checkpoint] = []
    latest = -math.inf
    for one in reversed(valid[1:]):
        at = storage.modified_at(one.path / MANIFEST)
        if at is not None and at - latest >= apart:
            history.append(one)
            latest = at
    return [*valid[:1], *history[1 - count :]]


def find_best(events: Iterable[Event], best: Best, *, until: int) -> tuple[int, float] | None:
    """Step and value of the first best evaluation up to a step, which is committed: what was
    evaluated beyond it may have to be trained again. Of one step the last evaluation counts.
    """
    values: dict[int, float] = {}
    for event in events:
        evaluated = event if event.get("event") == "evaluated" else event.get("best")
        metrics = evaluated.get("metrics") if isinstance(evaluated, Mapping) else None
        if isinstance(evaluated, Mapping) and isinstance(metrics, Mapping):
            step, value = evaluated.get("step"), finite_number(metrics.get(best.metric))
            if type(step) is int and step <= until and value is not None:
                values[step] = value
    choose = min if best.goal == "min" else max
    return choose(sorted(values.items()), key=lambda one: one[1], default=None)


def note(ledger: RunLedger, step: int, *, keep: Keep, apart: float) -> dict[str, Any]:
    """What the line of a commit says besides; nothing if a number says what is kept. Raises
    `OSError`.
    """
    if keep.is_number:
        return {}
    noted: dict[str, Any] = {"keep": keep.model_dump(mode="json", by_alias=True), "apart": apart}
    best = None if keep.best is None else find_best(ledger.events(), keep.best, until=step)
    if keep.best is not None and best is not None:
        noted["best"] = {"step": best[0], "metrics": {keep.best.metric: best[1]}}
    return noted


def explain(valid: Sequence[Checkpoint], ledger: RunLedger) -> dict[str, list[str]]:
    """Why each checkpoint stays, by its name, as the newest commit has noted it; empty if a number
    says what is kept. Raises `OSError`.
    """
    events = ledger.events()
    commits = [one for one in events if one["event"] == "commit"]
    if not commits or "keep" not in commits[-1]:
        return {}
    try:
        keep = Keep.model_validate(commits[-1]["keep"], by_alias=True)
    except ValidationError:  # a newer version has more to say
        return {}
    return select(valid, events, keep=keep, apart=finite_number(commits[-1].get("apart")) or 0.0)
