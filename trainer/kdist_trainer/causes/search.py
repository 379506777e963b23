"""Looks an error up in the table: where it was raised decides first, then what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kdist_trainer.causes import TABLE
from kdist_trainer.causes.origin import MACHINE_TYPES, Origin, Where
from kdist_trainer.causes.row import Row
from kdist_trainer.causes.system import HUB_HOSTS
from kdist_trainer.config.exit_codes import FAULTS, Cause, Exit, Fault, Rerun

_MACHINES_BASES = {"RuntimeError", "OSError"}
_USERS_BASES = frozenset(
    {
        "ArithmeticError",
        "AssertionError",
        "AttributeError",
        "ImportError",
        "LookupError",
        "NameError",
        "NotImplementedError",
        "RecursionError",
        "SyntaxError",
        "TypeError",
        "ValueError",
    }
)
"""Types that Python raises for what a program does wrong."""
_FIX = "fix {place}"
_AGAIN = (
    "this error is in no table of causes and may pass; if it comes back alike, see its traceback: "
    "the last line of your own code was {place}"
)
_LOAD = (
    "the checkpoint could not be given to the training: take an earlier one, or a new folder "
    "(spec.checkpoint); if it is of this very job, report it with the traceback"
)


@dataclass(frozen=True)
class Classification:
    """What an error is: see `Row` for the fields."""

    cause: Cause
    code: Exit
    primary: bool = True
    signature: str = ""
    fault: Fault = Fault.UNKNOWN
    advice: str = ""
    rerun: Rerun = Rerun.AGAIN
    method: str = ""
    step: int | None = None


def look_up(origin: Origin) -> Classification | None:
    """What the table says about an error; None if no row recognizes it."""
    for row in TABLE:
        if _recognizes(row, origin):
            if row.users and origin.is_users and origin.where is not Where.NOWHERE:
                # of a row about lost peers the advice is about the peer, and this rank is at fault
                return users(signature=row.name, advice=row.advice if row.primary else _FIX)
            return Classification(
                row.cause,
                row.code,
                row.primary,
                row.name,
                row.fault,
                row.advice,
                row.rerun,
                row.method,
            )
    return None


def _recognizes(row: Row, origin: Origin) -> bool:
    if origin.device_code is not None and row.device_codes:
        return origin.device_code in row.device_codes
    if row.types:
        if not set(row.types) & set(origin.names):
            return False
    elif not (origin.is_of_machines_type and _MACHINES_BASES & set(origin.names)):
        return False
    if row.errnos and origin.number not in row.errnos:
        return False
    if row.only_users and not origin.is_users:
        return False
    if row.through and not (
        re.search(HUB_HOSTS, origin.text)
        or any(part in one.file for part in row.through for one in origin.below)
    ):
        return False
    return bool(row.pattern.search(origin.text))


def users(*, signature: str = "", advice: str = _FIX, again: bool = False) -> Classification:
    """An error of the user's code.

    Args:
        signature: The row that recognizes it.
        advice: What to do next.
        again: Whether it is tried again, once, since its type says little.
    """
    code = Exit.UNKNOWN if again else Exit.USER
    return Classification(
        Cause.USER_CODE,
        code,
        signature=signature,
        fault=Fault.USER,
        advice=advice,
        rerun=Rerun.FIXED,
    )


def judge(origin: Origin) -> Classification:
    """What an error is that no row recognizes: where it was raised decides alone."""
    names = set(origin.names)
    is_programs = bool(_USERS_BASES & names)
    if origin.where is Where.COLLECTIVE:
        return users() if is_programs and origin.own is not None else _unknown(Fault.UNKNOWN)
    if origin.where is Where.KDIST:
        return _judge_own(origin, is_programs=is_programs)
    if is_programs or "ConnectionError" in names:
        return users()
    if MACHINE_TYPES & names:
        return _unknown(Fault.UNKNOWN)
    if origin.where is Where.USER and origin.is_raised:
        # the user's own `raise`; of a type that machines' errors have too, it may pass
        may_pass = bool(names & {"RuntimeError", "OSError", "SystemError"})
        return users(again=origin.is_of_machines_type and may_pass)
    return users() if origin.is_of_users_type else _unknown(Fault.UNKNOWN)


def _judge_own(origin: Origin, *, is_programs: bool) -> Classification:
    """What an error is that was raised in kdist's frames, or below them and not in the user's."""
    if is_programs and origin.is_refused:
        return users()
    if origin.load is not None and "OSError" not in origin.names:
        return Classification(
            Cause.MISMATCH,
            Exit.MISMATCH,
            fault=FAULTS[Cause.MISMATCH],
            advice=_LOAD,
            rerun=Rerun.FIXED,
            signature="checkpoint-load",
            step=next((one.step for one in reversed(origin.below) if one.step is not None), None),
        )
    return _unknown(Fault.KDIST)


def _unknown(fault: Fault) -> Classification:
    return Classification(Cause.UNKNOWN, Exit.UNKNOWN, fault=fault, advice=_AGAIN)
