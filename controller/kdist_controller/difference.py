"""What differs between the job that a TrainingJob asks for and the one that its pods were made
from, in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kdist.backends import Backend
from kdist.spec import TrainingJob
from kdist_controller.record import _LIVE
from kdist_trainer.json_text import encode_json

_NOT_COMPARED: Final = (*_LIVE, "restartedAt")
"""Fields of the spec that take effect without new pods, or are no part of them."""
_FORMER_INTERVAL: Final = {"seconds": 300, "steps": None}
"""What earlier versions wrote out for jobs that name no interval: their pods keep it."""
_SHOWN = 4
_LONGEST_VALUE = 60


def find_differences(
    wanted: TrainingJob, applied: TrainingJob, backend: Backend | None
) -> list[str]:
    """Each difference that needs new pods, such as `spec.image: trainer:1 → trainer:2`.

    Args:
        wanted: the job that is asked for.
        applied: the job that the pods were made from.
        backend: the kind of its workload; None if it is not decided yet.
    """
    before, after = _comparable(applied), _comparable(wanted)
    found = list(_compare(before, after, ""))
    if wanted.spec.nodes != applied.spec.nodes and not can_resize(wanted, applied, backend):
        found += _compare(_nodes(applied), _nodes(wanted), "spec.nodes")
    return found


def can_resize(wanted: TrainingJob, applied: TrainingJob, backend: Backend | None) -> bool:
    """Whether the job can get its number of nodes without new pods for the others."""
    if wanted.spec.nodes.standby != applied.spec.nodes.standby:
        return False
    return can_scale(applied, backend)


def can_scale(job: TrainingJob, backend: Backend | None) -> bool:
    """Whether the number of nodes of a job that runs can be changed."""
    if backend is None:
        return False
    return not backend.scalable and (job.spec.queue is None or backend.name == "job")


def describe(differences: Sequence[str]) -> str:
    """The differences as one sentence, the first few in full."""
    shown = "; ".join(differences[:_SHOWN])
    more = len(differences) - _SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown


def _comparable(job: TrainingJob) -> dict[str, Any]:
    document = job.to_document()
    spec = {name: value for name, value in document["spec"].items() if name not in _NOT_COMPARED}
    checkpoint = (spec.get("train") or {}).get("checkpoint", {})
    if checkpoint.get("every") == _FORMER_INTERVAL:
        del checkpoint["every"]
    return {"spec": spec}  # labels and annotations come with the next restart, and matter to none


def _nodes(job: TrainingJob) -> Any:
    return job.to_document()["spec"]["nodes"]


def _compare(before: Any, after: Any, path: str) -> Iterator[str]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            inner = f"{path}.{key}" if path else str(key)
            yield from _compare(before.get(key), after.get(key), inner)
    else:
        yield f"{path}: {_show_value(before)} → {_show_value(after)}"


def _show_value(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else encode_json(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
