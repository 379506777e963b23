"""The job of a bench: the machines of a job file or this machine, and the bench as its program."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kdist.errors import UsageError
from kdist.job_file import load_text
from kdist.spec import TrainingJob, job_document
from kdist.spec.models import LONGEST_POD_NAME, jobset_pod_name
from kdist.units import size
from kdist_trainer.formats import MAX_NODES
from kdist_trainer.formats.json_text import encode_json

_LONGEST_NAME = LONGEST_POD_NAME - len(jobset_pod_name("", MAX_NODES - 1))
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# sections of the job file that a bench does not use
_IGNORED = (
    *("train", "script", "code", "data", "checkpoints", "preflight"),
    *("replicas", "suspend", "restartedAt"),
)


@dataclass(frozen=True, kw_only=True)
class BenchSpec:
    """What is measured: sizes from `min` to `max` bytes, each `factor` times the one before."""

    collective: str
    min: int
    max: int
    factor: int
    rounds: int
    warmup: int
    seconds: float
    slow: float

    def arguments(self) -> list[str]:
        names = ("min", "max", "factor", "rounds", "warmup", "seconds", "slow")
        return [
            self.collective,
            *(word for name in names for word in (f"--{name}", str(getattr(self, name)))),
        ]


def read_size(text: str) -> int:
    """Parse `1024`, `1K`, `1KiB` or `64M` to bytes. As in nccl-tests, K is 1024 with or without
    more letters. Raises `ValueError`.
    """
    match = re.fullmatch(r"(\d{1,15})\s*([kmg]?)i?b?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"`{text}` is not a size; write 1024, 1KiB or 64MiB")
    return int(match[1]) * _UNITS[match[2]]


def make_job(
    bench: BenchSpec, base: TrainingJob | None = None, *, overrides: list[str] | None = None
) -> TrainingJob:
    """The bench as a job on the machines of the job `base`, by default one node of two ranks;
    `overrides` change the result, as `--set` does. Raises `InvalidJobError`, and `UsageError` if
    the smallest size is larger than the largest.
    """
    if bench.min > bench.max:
        raise UsageError(
            f"the smallest size (-b, {size(bench.min)}) is larger than the largest (-e, "
            f"{size(bench.max)})"
        )
    name = f"bench-{bench.collective.replace('_', '-')}"
    metadata: dict[str, Any] = {"name": name}
    spec: dict[str, Any] = {"nodes": 1, "procsPerNode": 2}
    if base is not None:
        given = base.model_dump(mode="json", by_alias=True, exclude_unset=True)
        metadata = {
            **given["metadata"],
            "name": f"{base.metadata.name[: _LONGEST_NAME - len(name) - 1]}-{name}",
        }
        spec = {field: value for field, value in given["spec"].items() if field not in _IGNORED}
    spec["script"] = {"module": "kdist_trainer.bench", "args": bench.arguments(), "preload": "none"}
    spec["maxRestarts"] = 0  # a restart would distort the measurement
    document = {**job_document(name, **spec), "metadata": metadata}
    return load_text(encode_json(document), source="kdist bench", overrides=overrides or [])
