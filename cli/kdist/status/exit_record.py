"""Exit records that agents write to the termination message of their container.

Kubernetes truncates the message at 4096 bytes. If the agent died before it wrote one, the message
is the end of the container's log, or empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kdist.events import parse
from kdist.status import documents
from kdist.status.nonfinite_loss import NonfiniteLoss
from kdist_trainer.formats import NewerFormatError, check_format
from kdist_trainer.json_text import encode_json
from kdist_trainer.untrusted_text import MalformedTextError, parse_first_value, parse_json

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
    "signature",
    "advice",
    "rerun",
    "place",
    "nonfinite_loss",
    "separate_ranks",
)
_MAX_TEXT = 1 << 16
_MAX_NAME = 64


def describe_saved(steps: Iterable[int | None]) -> str:
    """What a run that was asked to stop has saved, by the steps of its agents' records: each is of
    the newest checkpoint then, or None if the agent did not know one.
    """
    known = [step for step in steps if step is not None]
    if not known:
        return "whether it has saved anything is not known"
    return f"step {max(known):,} is saved"


@dataclass(frozen=True)
class ExitRecord:
    """How an agent's work ended.

    Attributes:
        code: exit code of the trainer.
        cause: a word for the cause of a failure.
        outcome: `done`, `stopped` or `failed`.
        rank: the rank that failed first.
        step: its last step.
        time: unix seconds.
        collective: the collective that the rank was in.
        collectives: the last collective of each rank, one line each.
        signature: the name of the trainer's row for such failures; empty if it has none.
        advice: what to do next, in a sentence; empty if that row says nothing.
        rerun: how the run may be started again: `again`, `fixed` or `blocking`; empty if not told.
        place: the innermost line of the user's own code, in a traceback's form.
        nonfinite_loss: how often the loss of a script was NaN or infinite; None if it never was.
        separate_ranks: the number of a script's ranks if none has formed a process group with
            others, else 0.
        whole: false if the record was truncated, or is from a log.
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
    signature: str = ""
    advice: str = ""
    rerun: str = ""
    place: str = ""
    nonfinite_loss: NonfiniteLoss | None = None
    separate_ranks: int = 0
    whole: bool = True

    @property
    def permanent(self) -> bool:
        """Whether a restart cannot help."""
        return 0 < self.code < 128

    def to_document(self) -> dict[str, Any]:
        """Return the record as plain values."""
        fields = asdict(self)
        del fields["nonfinite_loss"]
        loss = self.nonfinite_loss
        return {
            **fields,
            **({"nonfinite_loss": loss.to_document()} if loss is not None else {}),
            "traceback": list(self.traceback),
            "collectives": list(self.collectives),
        }

    def to_text(self) -> str:
        """Return the record as JSON, for an annotation."""
        return encode_json(self.to_document(), ensure_ascii=False)

    @classmethod
    def parse(cls, text: object) -> ExitRecord | None:
        """Parse a termination message, an annotation, or the end of a log; None if it holds no
        record.
        """
        if not isinstance(text, str):
            return None
        text = text[:_MAX_TEXT]
        return cls.read(_loads(text)) or _from_log(text) or _from_truncated(text)

    @classmethod
    def read(cls, document: object, *, whole: bool = True) -> ExitRecord | None:
        """Read a record from a JSON object; None if it is not one."""
        code = documents.integer(document, "code")
        if (
            code is None
            or not 0 <= code <= 255
            or not (documents.at(document, "cause") or documents.at(document, "outcome"))
        ):
            return None
        try:
            check_format("exit.json", document)
        except NewerFormatError as error:
            ended = "done" if code == DONE else "stopped" if code == STOPPED else "failed"
            return cls(code, outcome=ended, message=str(error), whole=False)
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
            signature=documents.text(document, "signature")[:_MAX_NAME],
            advice=documents.text(document, "advice"),
            rerun=documents.text(document, "rerun")[:_MAX_NAME],
            place=documents.text(document, "place"),
            nonfinite_loss=NonfiniteLoss.read(document),
            separate_ranks=documents.integer(document, "separate_ranks") or 0,
            whole=whole and documents.at(document, "whole") is not False,
        )


def _lines(document: object, name: str) -> tuple[str, ...]:
    found = documents.at(document, name)
    return tuple(line for line in found if isinstance(line, str)) if isinstance(found, list) else ()


def _loads(text: str) -> Any:
    try:
        return parse_json(text, allow_nan=True)
    except MalformedTextError:
        return None


def _from_log(text: str) -> ExitRecord | None:
    """Read the last `failed` event of the agent from the end of its log."""
    for line in reversed(text.split("\n")):
        event = parse(line)
        if event is not None and event["event"] == "failed":
            return ExitRecord.read(
                {**event, "time": documents.moment(event, "time"), "outcome": "failed"},
                whole=False,
            )
    return None


def _from_truncated(text: str) -> ExitRecord | None:
    """Read the fields that are left of a truncated record."""
    if not text.lstrip().startswith("{"):
        return None
    found = {}
    for key in _KEYS:
        match = re.search(rf'[{{,]\s*"{key}"\s*:\s*', text)
        if match is None:
            continue
        try:
            found[key] = parse_first_value(text[match.end() :])
        except MalformedTextError:
            # Truncated: keep the beginning of a text.
            if text[match.end() : match.end() + 1] == '"':
                found[key] = text[match.end() + 1 :].replace("\\n", "\n").rstrip("\\")
    return ExitRecord.read(found, whole=False)
