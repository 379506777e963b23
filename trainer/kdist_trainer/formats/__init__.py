"""What processes of different versions agree on: the formats of documents that one writes and
another one may read, on a disk, in a ConfigMap or on a connection; and the names, limits and ways
to write and to estimate that command line, controller and trainer share.

A document says its number in `format`; without one it is of format 1, that of version 0.1.0. A
newer number than the reader knows is refused by `NewerFormatError` and the document is left as it
is, because what it means cannot be guessed. Free of torch: the command line reads with it too.

What only processes of one image read has no number: the exchange, the values of the rendezvous,
whose keys name the version of the job's pods, and notes in an agent's own folder. The counters in
`ledger/sums` and `fetch.json` are made again unless they are of the reader's own layout.

Next to it are what several packages need: `json_text` writes JSON and `untrusted_text` reads it,
`step_lines` reads the ledger's lines of steps, `allow_list` pickles, `digest` detects damage,
`machine_faults` counts those of a ledger, `requirements` has the packages that a training needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from kdist_trainer.formats.untrusted_text import finite_number

LEDGER: Final = "ledger"
"""Folder of a run's history, next to its checkpoints."""
STEPS_FILE: Final = "steps.jsonl"
EVENTS_FILE: Final = "events.jsonl"
"""What is in it: a line for each step, and one for each event of the run."""
CHECKPOINT: Final = "step-"
"""What the name of every checkpoint begins with."""
FORMAT: Final = "format"
FIRST: Final = 1
FORMATS: Final[Mapping[str, int]] = {
    "train.json": 1,
    "nodes.json": 1,
    "code.json": 1,
    "run.json": 1,
    "DONE": 1,
    "state.json": 2,
    "manifest.json": 2,
    "lock": 1,
    EVENTS_FILE: 1,
    "exit.json": 1,
    "/status": 1,
}
"""The number of what this version writes. steps.jsonl is of the same format as events.jsonl."""
STRICT: Final = frozenset({"train.json", "nodes.json", "lock"})
"""What version 0.1.0 refuses to read with a field that it does not know: format 1 stays without a
number there, so that a running job outlives an upgrade, and a rollback.
"""
JOB_API_VERSION: Final = "kdist.dev/v1alpha1"
"""The `apiVersion` of job.json, of a job.yaml and of a TrainingJob in a cluster."""
CLI_API_VERSION: Final = "cli.kdist.dev/v1"
"""The `apiVersion` of report.json, and of what `-o json` prints."""

MAX_NODES: Final = 4096
"""Nodes of a job."""
MOST_SECONDS_LEFT: Final = 2**31 - 1
"""What a field of 32 bits can say, as that of a TrainJob."""
RETRYABLE_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
"""Of an API server that is busy, or whose storage or webhook is away: a retry may help."""
OBJECT_STORES: Final = ("s3", "gs", "az")
"""Schemes of URLs of buckets."""
METRICS_PORT: Final = 9401
"""Port on which an agent serves its metrics and its status, unless it is started with another."""
RUN: Final = "kdist.dev/run"
"""Annotation of a job that names its run where `kdist render` makes the objects: another value
begins another run.
"""
REQUESTED_AT: Final = "kdist.dev/requested-at"
"""Annotation of the rendezvous' ConfigMap: when a user last started the job."""
LOG_FILE: Final = "KDIST_LOG_FILE"
"""Variable of an agent: the file that receives its output and that of its ranks."""
LIVE_VIEW: Final = "KDIST_LIVE_VIEW"
"""Variable of an agent whose log a live view reads: states of the ranks' progress bars are then
relayed more often, and marked.
"""
SPAWNER: Final = "KDIST_SPAWNER"
"""Variable of the spawner and of each agent's shim: the descriptor of the requests for agents."""
COMMIT: Final = "KDIST_COMMIT"
"""Variable of an agent: the git commit of the job, which `kdist run` or the image sets."""
SCRATCH: Final = "KDIST_SCRATCH"
"""Variable of an agent and all its descendants: the agent's private folder."""
SAME_REQUEST_SECONDS: Final = 5.0
"""A signal so soon after the first one is the same request. A machine that shuts down, or a
scheduler, signals every process of a run, and `kdist run` and the agents pass on what they get.
"""


FIRST_RETRYABLE_CODE: Final = 128
"""By the ExitCode policy of Kubeflow's training operator, exit codes below it are permanent
failures and those from it on are retryable.
"""


def is_permanent_code(code: int) -> bool:
    """Whether an exit code says that a restart cannot help."""
    return 0 < code < FIRST_RETRYABLE_CODE


def checkpoint_name(step: int, epoch: object) -> str:
    """Name of a committed checkpoint's folder."""
    return f"{CHECKPOINT}{step:08d}-e{epoch}"


def prefix_rank(rank: int) -> str:
    """What a line of a rank's output begins with in the log of its node."""
    return f"[rank{rank}]: "


def older_log(path: Path) -> Path:
    """Where an agent moves the log of a machine when it begins a new file."""
    return path.with_name(f"{path.name}.1")


def seconds_left(step: int | None, target: int | None, paces: Iterable[object]) -> float | None:
    """Estimate the seconds until step `target` from how long a step takes, the slowest of `paces`;
    None if one of the three is unknown, or it is more than `MOST_SECONDS_LEFT`.
    """
    known = [found for pace in paces if (found := finite_number(pace) or 0.0) > 0]
    left = max(0, target - step) * max(known) if target and step is not None and known else None
    return None if left is None or left > MOST_SECONDS_LEFT else left


class NewerFormatError(ValueError):
    """A newer version of kdist wrote a document; the message says which and what to do."""


def stamp(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its number."""
    number = FORMATS[name]
    return dict(document) if name in STRICT and number == FIRST else {FORMAT: number, **document}


def take_format(name: str, document: Any) -> Any:
    """The document without its number, or what is no mapping as it is. Raises `NewerFormatError` if
    this version does not know its format.
    """
    if not isinstance(document, dict) or FORMAT not in document:
        return document
    check_format(name, document)
    return {key: value for key, value in document.items() if key != FORMAT}


def check_format(name: str, document: Any) -> None:
    """Raise `NewerFormatError` if this version does not know the document's format."""
    found = document.get(FORMAT, FIRST) if isinstance(document, dict) else FIRST
    known = FORMATS[name]
    if isinstance(found, bool) or not isinstance(found, int) or not FIRST <= found <= known:
        raise NewerFormatError(
            f"{name} is of format {str(found)[:40]}, and this version of kdist knows formats up to "
            f"{known}: use the version that wrote it, or a newer one; nothing was changed"
        )


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges: 0, 1, 2, 5 as `0-2,5`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in found)
