"""The exit record that an agent leaves in its container's termination message, as far as it can be
read.

Kubernetes cuts the message at 4096 bytes, and a container that died without a word has the end of
its log there, or nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from kdist.status import documents

DONE, STOPPED, PEERS_LOST = 0, 200, 201
_KEYS = (
    "code",
    "cause",
    "outcome",
    "message",
    "rank",
    "node",
    "step",
    "generation",
    "time",
    "traceback",
    "collective",
    "collectives",
)
_LONGEST = 1 << 16


@dataclass(frozen=True)
class ExitRecord:
    """How an agent's work ended. `code` is one of the trainer's exit codes, `time` unix seconds.

    `whole` is false where the record was cut or put together from a log.
    """

    code: int
    cause: str = ""
    outcome: str = ""
    message: str = ""
    rank: int | None = None
    node: str = ""
    step: int | None = None
    generation: int | None = None
    time: float | None = None
    traceback: tuple[str, ...] = ()
    collective: str = ""
    collectives: tuple[str, ...] = ()
    whole: bool = True

    @property
    def permanent(self) -> bool:
        """Whether another try cannot help."""
        return 0 < self.code < 128

    def to_document(self) -> dict[str, Any]:
        """The record as plain values."""
        return {
            **asdict(self),
            "traceback": list(self.traceback),
            "collectives": list(self.collectives),
        }

    def to_text(self) -> str:
        """The record as JSON, for an annotation."""
        return json.dumps(self.to_document(), ensure_ascii=False)

    @classmethod
    def parse(cls, text: object) -> ExitRecord | None:
        """Read a termination message, an annotation, or the end of a log; None if it holds no
        record.
        """
        if not isinstance(text, str):
            return None
        text = text[:_LONGEST]
        return cls.read(_loads(text)) or _from_log(text) or _from_pieces(text)

    @classmethod
    def read(cls, document: object, *, whole: bool = True) -> ExitRecord | None:
        """The record that a JSON object holds; None if it lacks a code."""
        code = documents.integer(document, "code")
        if (
            code is None
            or not 0 <= code <= 255
            or not (documents.at(document, "cause") or documents.at(document, "outcome"))
        ):
            return None
        return cls(
            code=code,
            cause=documents.text(document, "cause"),
            outcome=documents.text(document, "outcome")
            or ("done" if code == DONE else "stopped" if code == STOPPED else "failed"),
            message=documents.text(document, "message"),
            rank=documents.integer(document, "rank"),
            node=documents.text(document, "node"),
            step=documents.integer(document, "step"),
            generation=documents.integer(document, "generation"),
            time=documents.number(document, "time"),
            traceback=_lines(document, "traceback"),
            collective=documents.text(document, "collective"),
            collectives=_lines(document, "collectives"),
            whole=whole and documents.at(document, "whole") is not False,
        )


def _lines(document: object, name: str) -> tuple[str, ...]:
    found = documents.at(document, name)
    return tuple(line for line in found if isinstance(line, str)) if isinstance(found, list) else ()


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _from_log(text: str) -> ExitRecord | None:
    """The agent's last `failed` event, where the message is the end of the container's log."""
    for line in reversed(text.splitlines()):
        start = line.find('{"time"')
        event = _loads(line[start:]) if start >= 0 else None
        if documents.text(event, "event") == "failed":
            return ExitRecord.read(
                {
                    **documents.mapping(event),
                    "time": documents.moment(event, "time"),
                    "outcome": "failed",
                },
                whole=False,
            )
    return None


def _from_pieces(text: str) -> ExitRecord | None:
    """What is left of a record that was cut: its first fields, each of which is whole."""
    if not text.lstrip().startswith("{"):
        return None
    decoder, found = json.JSONDecoder(), {}
    for key in _KEYS:
        place = re.search(rf'[{{,]\s*"{key}"\s*:\s*', text)
        if place is None:
            continue
        try:
            found[key], _ = decoder.raw_decode(text, place.end())
        except (ValueError, RecursionError):
            # this one was cut: its beginning still says something
            if text[place.end() : place.end() + 1] == '"':
                found[key] = text[place.end() + 1 :].replace("\\n", "\n").rstrip("\\")
    return ExitRecord.read(found, whole=False)
