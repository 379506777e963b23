"""What commands print with `-o json`: the JSON Schema of each kind of document, and their table.

A shape is a type (`str`, `float | None`, a dataclass), the texts or numbers of `OneOf`, a list with
the shape of its items, a tuple of shapes of which one holds, a dict of fields, of which those that
end in `?` may be missing, or the name of a definition.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import EnumType
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from kdist.diagnose import Diagnosis
from kdist.errors import Code
from kdist.status import JobStatus
from kdist.units import camel_case
from kdist_trainer.formats import CLI_API_VERSION


class OneOf(NamedTuple):
    """Values of which one holds."""

    values: tuple[Any, ...]


_STEPS: Final[dict[str, Any]] = dict.fromkeys(("reached", "lost", "samples"), int | None) | {
    "committed": int
}
_PROBLEM: Final[dict[str, Any]] = {
    **dict.fromkeys(("file", "path", "message", "suggestion", "hint"), str),
    **dict.fromkeys(("line", "column"), int),
}
_ERROR: Final[dict[str, Any]] = {
    "exitCode": OneOf(tuple(int(code) for code in Code)),
    "reason": OneOf(tuple(code.name for code in Code)),
    **dict.fromkeys(("message", "hint", "change", "nextCommand"), str),
    "problems": ["Problem"],
}
_LEDGER: Final[dict[str, Any]] = {
    "steps": _STEPS,
    "notSaved": int,
    "ledgerGaps": [[int]],
    "restarts": {"total": int, "joins": int, "generations": int, "byCause": dict[str, int]},
    "recoverySeconds": [float],
    "productiveSeconds": float | None,
    "elapsedSeconds": float,
    "goodput": float | None,
    "checkpoints": dict[str, float | None],
    "devices": str | None,
    "environments": [dict],
    "tracker": str | None,
    "trackerBehind": bool,
    "separateRanks": int | None,
    "machineFaults": [dict],
    "loss": float | None,
    "metrics": dict,
    "nonFiniteLoss": ({"steps": int, "last": str | None}, None),
}
_LINE: Final[dict[str, Any]] = {
    **dict.fromkeys(("source", "text"), str),
    "rank": int | None,
    "time": str | None,
    "event": (dict, None),
}
_PLACE: Final = {**dict.fromkeys(("path", "message"), str), "line": int, "column": int}
_DRY_RUN: Final = OneOf(("none", "client", "server"))
_SHARED: Final = {"Problem": _PROBLEM, "Failure": _ERROR, "Line": _LINE}


class DocumentKind(NamedTuple):
    """A kind of document: which commands print it, what it is, and its fields."""

    commands: str
    text: str
    shape: Any


KINDS: Final[dict[str, DocumentKind]] = {
    "Error": DocumentKind("all", "why the command failed, and how to go on", _ERROR),
    "List": DocumentKind(
        "render, apply, events",
        "objects of Kubernetes, or events, as `kubectl` reads and writes them",
        {"items": [dict]},
    ),
    "Files": DocumentKind(
        "init, and all with --out", "the files that were written", {"files": [str]}
    ),
    "JobFile": DocumentKind("init -", "a job file to start from", {"text": str}),
    "Conversion": DocumentKind(
        "convert",
        "the job files, what became of each value, and what means something else",
        {
            "jobs": [
                {
                    **dict.fromkeys(("from", "text"), str),
                    "complete": bool,
                    "values": [{**_PLACE, "outcome": str}],
                    "changes": [_PLACE],
                }
            ],
            "others": [str],
        },
    ),
    "Validation": DocumentKind(
        "validate",
        "every problem of each file",
        {
            "files": [
                {
                    "file": str,
                    "valid": bool,
                    "problems": ["Problem"],
                    "warnings": [str],
                    "nextCommand": str,
                }
            ]
        },
    ),
    "Field": DocumentKind(
        "explain",
        "a field of the job file",
        {
            "path": str,
            "type": str,
            "required": bool,
            "default": Any,
            "choices": Any,
            "description": str,
            "fields?": [dict],
        },
    ),
    "RunReport": DocumentKind(
        "run",
        "how a run on this machine has ended; `error` says what to do",
        {
            "job": str,
            "runId": str | None,
            "outcome": str,
            "trainerExitCode": int,
            "failure": (dict, None),
            "invocation": int,
            "warnings": [str],
            "wallSeconds": float,
            **_LEDGER,
            "folder": str,
            "checkpointFolder": str,
            "error": ("Failure", None),
        },
    ),
    "DetachedRun": DocumentKind(
        "run -d",
        "a run in the background; `pid` and `log` are null if the job is done already",
        {"job": str, "pid": int | None, "log": str | None},
    ),
    "CollectiveBench": DocumentKind(
        "bench",
        "times and bandwidths of each size",
        {
            **dict.fromkeys(("collective", "device", "backend"), str),
            "ranks": int,
            "nodes": [str],
            "rows": [
                {
                    "sizeBytes": int,
                    "rounds": int,
                    "seconds": dict[str, float | None],
                    "algbwBytesPerSecond": float | None,
                    "busbwBytesPerSecond": float | None,
                    "wrong": int,
                }
            ],
            "pairs": (dict, None),
            "slow": (dict, None),
            "wrong": int,
        },
    ),
    "Diff": DocumentKind(
        "diff", "a unified diff of each object", {"changes": [{"object": str, "diff": [str]}]}
    ),
    "JobList": DocumentKind("get", "the jobs, if not one was named", {"items": ["JobStatus"]}),
    "JobStatus": DocumentKind("get NAME, status, wait, logs -f", "a job at one moment", JobStatus),
    "Logs": DocumentKind("logs", "the lines of the ranks", {"job": str, "lines": ["Line"]}),
    "LogLine": DocumentKind(
        "logs -f",
        "a line: an event with its sentence, or printed text",
        _LINE,
    ),
    "Event": DocumentKind(
        "events -w",
        "an event as Kubernetes has it; one of a run on this machine is whole in `event`",
        {"message?": str, "event?": dict},
    ),
    "Diagnosis": DocumentKind(
        "why",
        "the cause of a job's trouble, with a fix and commands",
        {"job": str, "phase": str, **get_type_hints(Diagnosis)},
    ),
    "Top": DocumentKind(
        "top",
        "how each rank spends its steps",
        {
            "job": str,
            **dict.fromkeys(("step", "targetSteps", "worldSize", "generation"), int | None),
            "lastCheckpointStep": int | None,
            "loss": float | None,
            "samplesPerSecond": float | None,
            "ranks": [
                {
                    "rank": int,
                    "pod": str,
                    "state": str,
                    "step": int | None,
                    "phases": dict[str, float],
                    "collectiveSeconds": dict[str, float],
                    "slow": bool,
                    **{
                        f"{name}Seconds": float | None
                        for name in ("step", "busy", "allReduce", "checkpoint", "heartbeatAge")
                    },
                }
            ],
        },
    ),
    "Profile": DocumentKind(
        "profile",
        "the traces' folder, and what each rank has recorded",
        {
            "job": str,
            "folder": str,
            "ranks": [
                {
                    **dict.fromkeys(("rank", "first", "last"), int),
                    "seconds": float,
                    "communicationSeconds": float,
                    "operations": [dict],
                }
            ],
        },
    ),
    "GoodputReport": DocumentKind(
        "report",
        "where the time of a run went",
        {
            "job": str,
            "from": str,
            **_LEDGER,
            "secondsByCategory": dict[str, float],
            "attempts": [dict],
            "lossCurve": [list],
            "appliedCommit?": str,
            "images?": [str],
        },
    ),
    "CheckpointList": DocumentKind(
        "checkpoints",
        "the checkpoints of a run; `errors` says which cannot be used",
        {
            "folder": str,
            "exists": bool,
            "runId": str | None,
            "latest": str | None,
            "resumesFrom": str | None,
            "done": (dict, None),
            "time": float,
            "checkpoints": [dict],
            "errors": ["Failure"],
        },
    ),
    "Export": DocumentKind(
        "checkpoints export",
        "weights that were written to a file",
        {
            **dict.fromkeys(("file", "checkpoint", "sha256"), str),
            **dict.fromkeys(("step", "tensors", "averaged", "bytes"), int),
        },
    ),
    "Execution": DocumentKind(
        "exec",
        "what a command in a pod has written",
        {
            "job": str,
            "command": [str],
            "exitCode": int,
            **dict.fromkeys(("stdout", "stderr"), str),
            "omittedBytes": dict[str, int],
        },
    ),
    "Forward": DocumentKind(
        "port-forward",
        "a port that leads to a pod",
        {"pod": str, "localPort": int, "port": int},
    ),
    "TensorBoard": DocumentKind(
        "port-forward tensorboard",
        "the address of a TensorBoard",
        {"job": str, "pod": str, "url": str},
    ),
    "Change": DocumentKind(
        "suspend, resume, scale, restart",
        "what was done to a job",
        {
            **dict.fromkeys(("job", "namespace", "message", "nextCommand"), str),
            "savedStep": int | None,
            "verb": OneOf(("suspend", "resume", "scale", "restart")),
            "dryRun": _DRY_RUN,
        },
    ),
    "Deletion": DocumentKind(
        "delete, wait --for=deleted",
        "what was deleted, what stays, and what became of each job",
        {
            "jobs": [str],
            "deleted": [str],
            "kept": [str],
            "outcomes?": [
                {
                    "job": str,
                    "outcome": OneOf(("deleted", "not-found", "failed", "not-tried")),
                }
            ],
            "error?": ("Failure", None),
            "dryRun": _DRY_RUN,
        },
    ),
    "Recovery": DocumentKind(
        "recover",
        "what was decided about each pod on a node that does not answer",
        {
            "job": str,
            "pods": [
                {
                    **dict.fromkeys(("pod", "node", "reason", "message"), str),
                    **dict.fromkeys(("recover", "marked", "deleted"), bool),
                    "retrySeconds": float | None,
                    "evidence": [str],
                }
            ],
        },
    ),
    "Avoidance": DocumentKind(
        "recover --avoid, --allow",
        "a node that a job's pods stay away from",
        {"job": str, "node": str, "avoided": bool, "pods": [str]},
    ),
    "DrillPreview": DocumentKind(
        "drill",
        "which faults a job would survive",
        {
            "job": str,
            "faults": [
                {
                    **dict.fromkeys(("fault", "does", "obstacle", "costs"), str),
                    "survives": bool,
                }
            ],
        },
    ),
    "DrillPlan": DocumentKind(
        "drill --dry-run=client",
        "what a fault would do",
        {"job": str, "fault": str, "does": str},
    ),
    "DrillReport": DocumentKind(
        "drill --fault",
        "how a job has recovered",
        {
            **dict.fromkeys(("job", "fault", "struck"), str),
            **dict.fromkeys(("time", "lastedSeconds", "stallSeconds"), float | None),
            **dict.fromkeys(("stepReached", "stepResumed", "stepsLost"), int | None),
            "generation": dict,
            "worldSize": dict,
            "restarts": int,
            "restartsLeft": int | None,
            "promises": [{"promise": str, "measured": str, "kept": bool | None}],
            "kept": bool,
        },
    ),
    "Checks": DocumentKind(
        "doctor",
        "what was checked, with fixes",
        {
            "healthy": bool,
            "checks": [
                {
                    **dict.fromkeys(("name", "detail", "fix"), str),
                    "mark": OneOf(("ok", "note", "missing", "unknown")),
                }
            ],
        },
    ),
    "Dashboard": DocumentKind(
        "dashboards export", "a dashboard of Grafana", {"name": str, "dashboard": dict}
    ),
    "CompletionScript": DocumentKind(
        "completion", "the completion script of a shell", {"shell": str, "script": str}
    ),
    "Version": DocumentKind(
        "version",
        "versions",
        dict.fromkeys(("kdist", "python", "kdist-trainer", "torch"), str),
    ),
}

_NUMBER: Final = {
    "description": "A number; JSON has none for these three.",
    "anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}],
}
_NAMES: Final[dict[Any, str]] = {
    str: "string",
    int: "integer",
    bool: "boolean",
    dict: "object",
    list: "array",
    None: "null",
    NoneType: "null",
}


def render() -> str:
    """The schema of all documents, one definition for each kind."""
    definitions: dict[str, Any] = {"Number": _NUMBER}
    definitions |= {name: _schema(shape, definitions) for name, shape in _SHARED.items()}
    for name, kind in KINDS.items():
        fields_of_kind = _fields_of(kind.shape) if is_dataclass(kind.shape) else kind.shape
        version = {"List": ("v1",), "Event": ("v1", CLI_API_VERSION)}.get(name, (CLI_API_VERSION,))
        shape = {"apiVersion": OneOf(version), "kind": OneOf((name,)), **fields_of_kind}
        if "warnings" not in shape:
            shape["warnings?"] = [str]
        text = f"{kind.text[0].upper()}{kind.text[1:]}: `kdist {kind.commands}`."
        definitions[name] = {"description": text, **_schema(shape, definitions)}
        definitions[name]["additionalProperties"] = name == "Event"
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What kdist prints with -o json",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in KINDS],
    }
    listed = ",\n".join(f'"{name}": {json.dumps(each)}' for name, each in definitions.items())
    return f'{json.dumps(head)[:-1]}, "$defs": {{\n{listed}\n}}}}\n'


def table() -> str:
    """The kinds as a table in Markdown."""
    rows = [f"| `{name}` | {kind.commands} | {kind.text} |" for name, kind in KINDS.items()]
    return "\n".join(["| kind | printed by | what it is |", "|---|---|---|", *rows])


def _fields_of(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    found = {camel_case(each.name): hints[each.name] for each in fields(kind)}
    return {**found, "terminal": bool} if kind is JobStatus else found


def _schema(shape: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, inner = get_origin(shape), get_args(shape)
    if isinstance(shape, dict):
        names = {name.removesuffix("?"): each for name, each in shape.items()}
        return {
            "type": "object",
            "properties": {name: _schema(each, definitions) for name, each in names.items()},
            "required": [name for name in shape if not name.endswith("?")],
            "additionalProperties": False,
        }
    if isinstance(shape, OneOf):
        return {"enum": list(shape.values)}
    if origin is Literal:
        return {"enum": list(inner)}
    if isinstance(shape, EnumType):
        return {"enum": [str(each.value) for each in list[Any](shape)]}
    if isinstance(shape, tuple) or origin in (Union, UnionType):
        parts = shape if isinstance(shape, tuple) else inner
        return {"anyOf": [_schema(each, definitions) for each in parts]}
    if isinstance(shape, list) or origin is tuple:
        item = shape[0] if isinstance(shape, list) else inner[0]
        return {"type": "array", "items": _schema(item, definitions)}
    if origin is dict:
        values = _schema(inner[1], definitions)
        return {"type": "object", "additionalProperties": values}
    if isinstance(shape, str) or shape is float:
        return {"$ref": f"#/$defs/{shape if isinstance(shape, str) else 'Number'}"}
    if is_dataclass(shape) and isinstance(shape, type):
        name = "Cause" if shape is Diagnosis else str(shape.__name__)
        if name not in definitions:
            definitions[name] = {}  # it may contain itself
            definitions[name] = _schema(_fields_of(shape), definitions)
        return {"$ref": f"#/$defs/{name}"}
    return {} if shape is Any else {"type": _NAMES[shape]}
