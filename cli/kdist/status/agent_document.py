"""What is read of an agent's `/status`: the fields that are known, each of the type that it has and
no larger than an honest agent sends it. It comes from a pod, so all that is not known is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kdist.status import documents

RANKS: Final = 256
"""Ranks of one agent, which are those of one node."""
PEERS: Final = 4096
_WORD: Final = 64
_LINE: Final = 256
_LINES: Final = 64
_NUMBER: Final = 1 << 63
_CATEGORIES: Final = 32

_FIELDS: Final = (
    "job",
    "run_id",
    "node",
    "pid",
    "state",
    "phase",
    "generation",
    "world_size",
    "step",
    "target_steps",
    "loss",
    "learning_rate",
    "samples_per_second",
    "restarts",
    "restarts_remaining",
    "lost_steps",
    "last_checkpoint_step",
    "last_checkpoint_time",
    "at_risk_seconds",
    "checkpoint_interval",
    "checkpoint_bytes",
    "connections_refused",
    "rendezvous_refused",
    "rendezvous_refusal",
    "exchange_key",
    "waiting_for",
    "slow_start",
    "devices",
    "failed_saves",
    "checkpoint_room",
)
_RANK_FIELDS: Final = (
    "rank",
    "local_rank",
    "step",
    "step_seconds",
    "busy_seconds",
    "all_reduce_seconds",
    "phase",
    "heartbeat_age",
    "collective",
    "ended",
    "group",
    "quiet_seconds",
    "collective_seconds",
    "line",
    "line_seconds",
)
_FAILURE_FIELDS: Final = ("cause", "rank", "node", "step", "time", "primary", "is_full")
_EXIT_FIELDS: Final = (
    "code",
    "cause",
    "outcome",
    "node",
    "rank",
    "step",
    "generation",
    "time",
    "collective",
    "whole",
)


def read_agent_document(document: object) -> dict[str, Any]:
    """The document without what is not known, of another type, or too large. What is null stays."""
    found = _scalars(document, _FIELDS)
    _add(found, document, "nodes", lambda each: _scalars(each, ("min", "max")))
    _add(found, document, "wall_seconds", _read_seconds)
    _add(found, document, "exit", _trim_exit)
    _add(found, document, "peers", _trim_peers)
    _add(found, document, "last_failure", _trim_failure)
    if isinstance(documents.at(document, "ranks"), list):
        ranks = documents.items(document, "ranks")[:RANKS]
        found["ranks"] = [_scalars(each, _RANK_FIELDS) for each in ranks]
    return found


def _add(
    found: dict[str, Any], document: object, name: str, read: Callable[[Any], dict[str, Any]]
) -> None:
    value = documents.at(document, name)
    if isinstance(value, Mapping):
        found[name] = read(value)
    elif value is None and isinstance(document, Mapping) and name in document:
        found[name] = None


def _scalars(document: object, names: Iterable[str]) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        return {}
    return {name: document[name] for name in names if name in document and _fits(document[name])}


def _fits(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _LINE and value.isascii()
    if isinstance(value, int):
        return -_NUMBER < value < _NUMBER
    return value is None or isinstance(value, float)


def _read_seconds(document: Mapping[Any, Any]) -> dict[str, Any]:
    kept = [
        (name, value)
        for name, value in document.items()
        if len(name) <= _WORD and isinstance(value, int | float) and _fits(value)
    ]
    return dict(kept[:_CATEGORIES])


def _trim_exit(document: Mapping[Any, Any]) -> dict[str, Any]:
    lines = {
        name: [each[:_LINE] for each in documents.texts(document, name)[-_LINES:]]
        for name in ("traceback", "collectives")
    }
    told = {
        name: documents.text(document, name)[: _LINES * _WORD]
        for name in ("message", "advice", "signature")
    }
    return {**_scalars(document, _EXIT_FIELDS), **told, **lines}


def _trim_failure(document: Mapping[Any, Any]) -> dict[str, Any]:
    texts = {name: documents.text(document, name)[: _LINES * _WORD] for name in ("message", "full")}
    return {**_scalars(document, _FAILURE_FIELDS), **texts}


def _trim_peers(document: Mapping[Any, Any]) -> dict[str, Any]:
    names = {
        name: [each for each in documents.texts(document, name) if len(each) <= _WORD][:PEERS]
        for name in ("heard", "silent")
    }
    return {**_scalars(document, ("age_seconds",)), **names}
