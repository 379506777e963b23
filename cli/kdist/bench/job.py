"""The job that a bench is: a job file's machines, or this machine's, with the bench as its program.
Pure.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from kdist import load
from kdist.errors import UsageError
from kdist.spec import TrainingJob
from kdist.units import size

_LONGEST_NAME = 45  # what 4096 nodes leave of the 63 characters of a pod of a JobSet
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# of a job whose machines are measured
_NOT_NEEDED = ("train", "script", "code", "data", "checkpoints", "preflight")


@dataclass(frozen=True, kw_only=True)
class BenchSpec:
    """What is measured; sizes in bytes."""

    collective: str
    min: int
    max: int
    factor: int
    rounds: int
    warmup: int
    seconds: float
    slow: float

    def arguments(self) -> list[str]:
        """What the bench is told on its command line."""
        names = ("min", "max", "factor", "rounds", "warmup", "seconds", "slow")
        return [
            self.collective,
            *(word for name in names for word in (f"--{name}", str(getattr(self, name)))),
        ]


def read_size(text: str) -> int:
    """Bytes of `1024`, `1K`, `1KiB` or `64M`: as in nccl-tests, K is 1024 with or without more
    letters. Raises `ValueError`.
    """
    match = re.fullmatch(r"(\d{1,15})\s*([kmg]?)i?b?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"`{text}` is no size; write 1024, 1KiB or 64MiB")
    return int(match[1]) * _UNITS[match[2]]


def make_job(
    wanted: BenchSpec, base: TrainingJob | None = None, *, overrides: list[str] | None = None
) -> TrainingJob:
    """The bench as a job: on the machines of `base`, else on one node of two ranks, changed by
    `overrides`.

    Raises `InvalidJobError` where that is none, `UsageError` for a ladder that leads nowhere.
    """
    if wanted.min > wanted.max:
        raise UsageError(
            f"the smallest size (-b, {size(wanted.min)}) is larger than the largest (-e, "
            f"{size(wanted.max)})"
        )
    document: dict[str, Any] = {"apiVersion": "kdist.dev/v1alpha1", "kind": "TrainingJob"}
    name = f"bench-{wanted.collective.replace('_', '-')}"
    metadata: dict[str, Any] = {"name": name}
    spec: dict[str, Any] = {"nodes": 1, "procsPerNode": 2}
    if base is not None:
        given = base.model_dump(mode="json", by_alias=True, exclude_unset=True)
        metadata = {
            **given["metadata"],
            "name": f"{base.metadata.name[: _LONGEST_NAME - len(name) - 1]}-{name}",
        }
        spec = {field: value for field, value in given["spec"].items() if field not in _NOT_NEEDED}
    spec["script"] = {"module": "kdist_trainer.bench", "args": wanted.arguments()}
    spec["maxRestarts"] = 0  # a figure that took two tries is none
    document |= {"metadata": metadata, "spec": spec}
    return load.load_text(json.dumps(document), source="kdist bench", overrides=overrides or [])
