"""Failures: the record of what went wrong in one rank, in a form that outlives the rank.

A rank writes its failure next to its heartbeat before it exits. Its agent reads the record, agents
exchange the records, and the first *primary* failure over all agents is the root cause. A peer that
died shows on the survivors as `Connection closed by peer` inside `backward()`: such a failure is
secondary and decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback as tracebacks
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kdist_trainer.causes import BY_NAME
from kdist_trainer.causes.advice import HEALTH_CHECK, fill_advice
from kdist_trainer.causes.search import Origin
from kdist_trainer.config import Cause, Exit
from kdist_trainer.config.exit_codes import FAULTS, Fault, Rerun
from kdist_trainer.errors import find, find_place
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.formats.userinfo import hide_userinfo
from kdist_trainer.processes import preallocated
from kdist_trainer.processes.liveness import RankSnapshot, own_place

MACHINE = "KDIST_MACHINE"
"""The variable that names the machine: in a pod the Kubernetes node."""
TRACEBACK_LINES = 40
_MACHINES = {Fault.DEVICE, Fault.NODE, Fault.NETWORK, Fault.STORAGE, Fault.UNKNOWN}
"""Faults that may be gone when a run is started again, also if they have ended it."""
_LINE_LENGTH = 500
_MOST_TYPES = 16
_MESSAGE_LENGTH = 2000


@dataclass(frozen=True)
class Failure:
    """The failure of one rank, or of an agent.

    Attributes:
        cause: The kind of failure.
        code: The exit code of the agent if this is the root cause.
        primary: Whether it happened by itself; a secondary failure follows from another one.
        message: One sentence for people.
        rank: The global rank; None for an agent.
        node: The node's name.
        machine: The machine that the rank or the agent ran on; "" if that is not known.
        generation: The generation that failed.
        step: The last step that the rank had reported.
        time: Unix time in seconds.
        traceback: The last lines of the traceback.
        collective: The collective that the rank was in.
        collectives: What each rank of the group was in, as text; of the root cause only.
        place: The innermost line of the user's own code, in a traceback's form.
        signature: The name of the row of the table of causes that recognizes it; "" if none does.
        fault: Whose fault it is.
        advice: What to do next, one sentence; "" if no row says it.
        rerun: How the run may be started again.
        types: The type of the error and its bases, with their modules, in a rank's own record.
        action: What the job's rule for such failures says; "" if it has none.
    """

    cause: Cause
    code: Exit
    primary: bool
    message: str
    rank: int | None = None
    node: str = ""
    generation: int = 0
    step: int | None = None
    time: float = 0.0
    traceback: tuple[str, ...] = ()
    collective: str | None = None
    collectives: tuple[str, ...] = ()
    place: str | None = None
    signature: str = ""
    fault: Fault = Fault.UNKNOWN
    advice: str = ""
    rerun: Rerun = Rerun.AGAIN
    machine: str = ""
    types: tuple[str, ...] = ()
    action: str = ""

    def __post_init__(self) -> None:
        if self.fault is Fault.UNKNOWN:
            object.__setattr__(self, "fault", FAULTS.get(self.cause, Fault.UNKNOWN))
        is_machines = self.fault in _MACHINES and self.cause is not Cause.PREFLIGHT
        if self.permanent and self.rerun is Rerun.AGAIN and not is_machines:
            object.__setattr__(self, "rerun", Rerun.FIXED)

    @property
    def is_of_machine(self) -> bool:
        """Whether the machine is broken, and not perhaps the job or its image at fault."""
        row = BY_NAME.get(self.signature)
        return self.signature == HEALTH_CHECK or (row is not None and row.of_machine)

    @property
    def permanent(self) -> bool:
        """Whether a restart cannot help, so that the failure ends the job."""
        return self.primary and not self.code.retryable

    @classmethod
    def of_rank(
        cls,
        cause: Cause,
        code: Exit,
        message: str,
        *,
        rank: int,
        node: str,
        generation: int,
        snapshot: RankSnapshot,
        primary: bool = True,
        traceback: Sequence[str] = (),
        place: str | None = None,
    ) -> Failure:
        """A failure, as of now, that the agent found in one of its ranks, whose latest heartbeat
        holds its step and its collective. Of the traceback the first lines are kept.
        """
        return cls(
            cause=cause,
            code=code,
            primary=primary,
            message=message,
            rank=rank,
            node=node,
            generation=generation,
            step=snapshot.step if snapshot.step >= 0 else None,
            time=time.time(),
            traceback=tuple(traceback[:TRACEBACK_LINES]),
            collective=snapshot.collective,
            place=place,
            machine=os.environ.get(MACHINE, ""),
        )

    @classmethod
    def of_node(
        cls,
        cause: Cause,
        code: Exit,
        message: str,
        *,
        node: str = "",
        rank: int | None = None,
        generation: int = 0,
    ) -> Failure:
        """A primary failure, as of now, that no rank has recorded; with a node it is this one."""
        return cls(
            cause=cause,
            code=code,
            primary=True,
            message=message,
            rank=rank,
            node=node,
            generation=generation,
            time=time.time(),
            machine=os.environ.get(MACHINE, "") if node else "",
        )

    def to_document(self) -> dict[str, Any]:
        """The failure as plain values, as `from_json` reads them."""
        plain = {
            "cause": self.cause.value,
            "code": int(self.code),
            "fault": self.fault.value,
            "rerun": self.rerun.value,
        }
        names = ("traceback", "collectives", "types")
        lists = {name: list(getattr(self, name)) for name in names}
        return {**asdict(self), **plain, **lists}

    def to_json(self) -> str:
        """The failure as JSON, for `from_json`."""
        return encode_json(self.to_document(), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """Read what `to_json` wrote. Raises `ValueError` if the text is no failure."""
        try:
            fields: dict[str, Any] = parse_json(text)
            fields["cause"], fields["code"] = Cause(fields["cause"]), Exit(fields["code"])
            fields["fault"] = Fault(fields.get("fault", Fault.UNKNOWN))
            fields["rerun"] = Rerun(fields.get("rerun", Rerun.AGAIN))
            for name in ("traceback", "collectives", "types"):
                fields[name] = tuple(fields.get(name, ()))
            return cls(**fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a failure: {error}") from error


def describe(
    error: BaseException, *, methods: Callable[[str], str | None] | None = None, **known: Any
) -> Failure:
    """A `Failure` for `error`, as of now, without the users and passwords of URLs, with further
    known fields. `methods` finds the place of a method of the user's workload, by its name.
    """
    found = find(error)
    place = find_place(error)
    if place is None and found.method and methods is not None:
        place = methods(found.method)
    if found.step is not None:
        known["step"] = found.step
    errors = (error, *error.exceptions) if isinstance(error, BaseExceptionGroup) else (error,)
    bases = dict.fromkeys(base for each in errors for base in type(each).__mro__)
    name, told = type(error).__name__, Origin.of(error).text
    lines = hide_userinfo("".join(tracebacks.format_exception(error))).splitlines()
    return replace(
        Failure(
            cause=found.cause,
            code=found.code,
            primary=found.primary,
            message=hide_userinfo(told if told.startswith(f"{name}: ") else f"{name}: {told}")[
                :_MESSAGE_LENGTH
            ],
            time=time.time(),
            traceback=tuple(line[:_LINE_LENGTH] for line in lines[-TRACEBACK_LINES:]),
            place=place,
            signature=found.signature,
            fault=found.fault,
            advice=hide_userinfo(fill_advice(found.advice, error, place))[:_MESSAGE_LENGTH],
            rerun=found.rerun,
            machine=os.environ.get(MACHINE, ""),
            types=tuple(
                f"{each.__module__}.{each.__qualname__}" for each in [*bases][:_MOST_TYPES]
            ),
        ),
        **known,
    )


def path_of(scratch: Path, local_rank: int) -> Path:
    """The file for a rank's failure."""
    return scratch / f"rank-{local_rank}.failure.json"


def record(
    error: BaseException,
    *,
    step: int | None = None,
    collective: str | None = None,
    methods: Callable[[str], str | None] | None = None,
    remark: str = "",
) -> Failure:
    """Write `error` for the agent, also on a full disk; returns it as a `Failure`.

    Only the first failure of a rank is kept: recording again writes nothing. An `OSError` is
    ignored, since the rank exits in any case. `methods` is as in `describe`, and `remark` a further
    sentence for people.
    """
    environ = os.environ
    rank = environ.get("RANK", "")
    failure = describe(
        error,
        methods=methods,
        rank=int(rank) if rank.isdigit() else None,
        node=environ.get("KDIST_NODE", ""),
        generation=int(environ.get("KDIST_GENERATION", "0")),
        step=step,
        collective=collective,
    )
    if remark:
        failure = replace(failure, message=f"{failure.message}; {remark}"[:_MESSAGE_LENGTH])
    if (place := own_place()) is not None:
        kept = failure.traceback
        # as much of the traceback's end as fits into the reserved file
        while len(text := replace(failure, traceback=kept).to_json().encode()) > preallocated.SIZE:
            if not kept:
                break
            kept = kept[1 + len(kept) // 4 :]
        with contextlib.suppress(OSError):
            preallocated.write(path_of(*place), text)
    return failure


def read(scratch: Path, local_rank: int) -> Failure | None:
    """The failure that a rank has recorded; None if there is none."""
    try:
        return Failure.from_json(preallocated.read(path_of(scratch, local_rank)))
    except (OSError, ValueError):
        return None
