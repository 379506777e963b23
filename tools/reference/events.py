"""The page of the trainer's events: each with the sentence of an example, or with its fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import kdist
import kdist_trainer
from kdist.events import SENTENCES, describe_event

_FIRST: Final = re.compile(r"(log\.)?(event|warn|error|write)|log_event|self\._warn")
_SECOND: Final = re.compile(r"log\.render|(self|session)\.(log_event|on_event)")  # after the node
_LOGS: Final = re.compile(r"\blog\.(event|warn|error|render)\b|\b(log|on)_event\(|\bdef warn\(")
_CONSTANT: Final = re.compile(r'(?m)^([A-Z_]+)(?:: Final)? = "([a-z]+(?:-[a-z]+)*)"')
_NAME: Final = re.compile("[a-z]+(-[a-z]+)*")

_EXAMPLE: dict[str, Any] = {
    "local_rank": 1,
    "busbw": 1.2e10,
    "between_losses_seconds": 1800.0,
    "cost_seconds": 1.0,
    "bytes": 4_200_000,
    "bytes_per_second": 12_000_000,
    "cached_bytes": 1_400_000,
    "cause": "user_code",
    "code": 1,
    "collective": "all_reduce",
    "demanded": 1e10,
    "done_bytes": 2_100_000,
    "device": "cpu",
    "backend": "gloo",
    "budget": 10,
    "error": "No space left on device",
    "file": "a.tar",
    "files": 3,
    "files_done": 1,
    "folder": "/fetch/files",
    "generation": 2,
    "limit": 10,
    "loss": 0.25,
    "mean": 0.002,
    "message": "ValueError: bad input",
    "node": "node-0",
    "nodes": 2,
    "p99": 0.004,
    "phase": "backward",
    "pid": 4711,
    "rank": 1,
    "ranks": 4,
    "ratio": 3.0,
    "reason": "start",
    "restarts": 1,
    "rounds": 20,
    "samples_seen": 64_000,
    "source_rank": 1,
    "samples_per_second": 5200.0,
    "seconds": 1.5,
    "size": 1_048_576,
    "step": 500,
    "target": 1000,
    "total_bytes": 4_200_000,
    "url": "s3://bucket/speech",
    "visible_seconds": 0.1,
    "waiting": 1,
    "why": "the number of ranks has changed",
    "world_size": 4,
    "wrong": 0,
}
# Fields whose type is another one in some event.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bench-slow": {"ranks": [1, 3], "nodes": ["node-0", "node-1"]},
    "agent-killed": {"reason": "it did not end in time"},
    "evaluated": {"metrics": {"accuracy": 0.973}},
    "stopping": {"reason": "SIGTERM"},
    "data-failed": {"reason": "spec.data[0]: access is denied"},
    "data-retry": {"reason": "status 503 Service Unavailable"},
    "data-waiting": {"message": "another process fetches into /fetch: waiting for it"},
    "data-stopped": {
        "message": "stopped while s3://bucket/speech was fetched: what has come is kept"
    },
    "compile-cache": {"message": "compiled code is taken from /ckpt/compiled/digits-0.tar.gz"},
    "log-rotated": {"message": "log.1 has what came before, older lines are removed"},
    "observer-failed": {
        "message": "StepTimer does not see some collectives: ValueError: a tensor has no size"
    },
    "preload-off": {
        "message": "ranks start as new interpreters, which takes seconds longer: train.py:3 sets "
        "TORCH_LOGS, which may be read when torch is imported"
    },
    "restarts-off": {"message": "if a rank or a node is lost, the script is not started again"},
    "job-edited": {"message": "train.optimizer.learningRate is 0.2, was 0.1"},
    "replicas-differ": {
        "message": "rank 1 holds other weights or optimizer states after step 7 than rank 0"
    },
    "save-waits": {
        "message": "storage: /ckpt: the finished training, step 500, waits to be saved: OSError: "
        "[Errno 28] No space left on device; free space, or repair it; next try in 20 s, or as "
        "soon as there is room"
    },
    "storage-unavailable": {
        "message": "cannot write the lock of /ckpt: the checkpoint folder /ckpt does not answer; "
        "ranks go on in place"
    },
    "past-end": {"message": "the checkpoint is past the last step: nothing is left to do"},
    "checkpoint-fallback": {"reason": "a checksum differs"},
}


def render() -> str:
    """Text of the page."""
    rows = "".join(f"| `{name}` | {_sentence(name)} |\n" for name in sorted(SENTENCES))
    others = "".join(
        f"| `{name}` | {', '.join(f'`{each}`' for each in sorted(fields))} |\n"
        for name, fields in sorted(find_events().items())
        if name not in SENTENCES
    )
    return f"""# Events

Agents and ranks write one JSON object per line to their log. Its fields `time`, `event`, `level`, \
`job`, `node`, `rank` and `generation` are the same in all of them. `kdist run` and `kdist logs` \
show an event as a line: time, node, name, and a sentence. Names are stable, sentences may change; \
the sentences below are of made-up events.

| event | example of its sentence |
|---|---|
{rows}
These have no sentence of their own: the line shows their `message`, if they have one, and then \
their other fields.

| event | fields |
|---|---|
{others}"""


@cache
def find_events() -> dict[str, set[str]]:
    """The events that kdist logs, by name, with the fields that their calls name."""
    roots = [Path(str(package.__file__)).parent for package in (kdist_trainer, kdist)]
    sources = [path.read_text() for root in roots for path in root.rglob("*.py")]
    constants = dict(each for source in sources for each in _CONSTANT.findall(source))
    found = dict[str, set[str]]()
    for tree in (ast.parse(source) for source in sources if _LOGS.search(source)):
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if not isinstance(call.func, ast.Name | ast.Attribute) or not call.args:
                continue
            logger = ast.unparse(call.func)
            place = 0 if _FIRST.fullmatch(logger) else 1 if _SECOND.fullmatch(logger) else None
            given = call.args[place:] if place is not None else []
            for name in _find_names(given[0], tree, constants) if given else ():
                fields = found.setdefault(name, set())
                fields |= {each.arg for each in call.keywords if each.arg is not None}
    return found


def _find_names(given: ast.expr, tree: ast.Module, constants: Mapping[str, str]) -> Iterator[str]:
    """The names that an argument may be: its text, or that of the variable that it is."""
    places: list[ast.AST] = [given]
    if isinstance(given, ast.Name):
        yield from filter(None, [constants.get(given.id)])
        places += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and given.id in {ast.unparse(name) for name in ast.walk(node.targets[0])}
        ]
    for each in (node for place in places for node in ast.walk(place)):
        if isinstance(each, ast.Constant) and _NAME.fullmatch(str(each.value)):
            yield str(each.value)


def _sentence(name: str) -> str:
    event = {**_EXAMPLE, **_SPECIAL.get(name, {}), "event": name}
    return describe_event(event).replace("|", "\\|").replace("_", "\\_")
