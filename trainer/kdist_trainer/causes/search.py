"""Classifies an error: by the first row of the table that matches it, else by where it was raised.

`Origin` says where: in a collective, in kdist, in a library, or in the user's own code. An error of
another process, such as a data loader's or one of torch's `spawn`, arrives as text: its type,
message and frames are parsed from that.
"""

from __future__ import annotations

import builtins
import dis
import importlib.util
import os
import re
import sysconfig
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType

from kdist_trainer.causes import TABLE
from kdist_trainer.causes.host import HUB_HOSTS
from kdist_trainer.causes.row import Row
from kdist_trainer.config.exit_codes import FAULTS, Cause, Exit, Fault, Rerun

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARY_PREFIXES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parents[1],
    )
)
_COLLECTIVE = re.compile(
    r"torch/distributed/(distributed_c10d|c10d_logger|rendezvous|device_mesh|nn/functional"
    r"|_functional_collectives)\.py$"
)
_LOADING = re.compile(
    r"load(_state_dict|_tensors|_values|_full_tensors|_metadata|_unsaved)?|_load_\w+|restore|resume"
    r"|restore_generators|receive_\w+|take_over|read_(state|values|all_values)"
)
_LOADERS = re.compile(r"kdist_trainer/(checkpoint|training|parallel)/(?!pretrained)")
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_END = 4_000
"""How many characters are searched at a text's beginning, and at its end."""
_RAISES = {"RAISE_VARARGS", "RERAISE"}
MACHINE_TYPES = frozenset(
    {
        "DistError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "DistQueueEmptyError",
        "OutOfMemoryError",
        "AcceleratorError",
    }
)
"""torch's own types, which are RuntimeErrors."""


class Where(Enum):
    """Where an error was raised, seen from the innermost line of the user's code."""

    USER = "user"
    LIBRARY = "library"
    COLLECTIVE = "collective"
    KDIST = "kdist"
    NOWHERE = "nowhere"


@dataclass(frozen=True)
class Frame:
    """One frame of a traceback."""

    file: str
    line: int
    name: str
    raises: bool = False
    """Whether it is at a `raise` statement."""
    step: int | None = None
    """The value of `step` in a frame of kdist's; None if it has none."""

    @property
    def place(self) -> str:
        """The frame as a traceback writes it."""
        return f'File "{self.file}", line {self.line}, in {self.name}'


def is_user_code(filename: str) -> bool:
    """Whether a file belongs to the user, and not to Python, a library or kdist."""
    return not (filename.startswith(("<", *_LIBRARY_PREFIXES)) or "site-packages" in filename)


def frames_of(trace: TracebackType | None) -> list[Frame]:
    """The frames of a traceback, the outermost first."""
    frames = []
    while trace is not None:
        code, at = trace.tb_frame.f_code, trace.tb_lasti
        file = code.co_filename
        # In Python 3.11 reading f_locals leaves a copy of the variables, this error among them, in
        # the frame until it ends; that of `ManagedRank.run` would keep a whole training alive.
        has_step = file.startswith(_PACKAGE) and "step" in code.co_varnames
        step = trace.tb_frame.f_locals.get("step") if has_step else None
        frames.append(
            Frame(
                file,
                trace.tb_lineno,
                code.co_name,
                raises=at >= 0 and dis.opname[code.co_code[at]] in _RAISES,
                step=step if isinstance(step, int) else None,
            )
        )
        trace = trace.tb_next
    return frames


@dataclass(frozen=True)
class Origin:
    """An error: its type and message, and where it was raised.

    Attributes:
        names: The names of its type and of the type's bases.
        module: The module of its type.
        message: Its message.
        frames: The frames of its traceback, the outermost first.
        number: The system's error number.
        device_code: The error number of the device's driver.
    """

    names: tuple[str, ...]
    module: str
    message: str
    frames: tuple[Frame, ...] = ()
    number: int | None = None
    device_code: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Origin:
        """The origin of an error; if it wraps another one, for example of another process, the
        origin of that.
        """
        names = tuple(base.__name__ for base in type(error).__mro__)
        message = str(error)
        if names[0] == "ProcessRaisedException" or message.startswith("Caught "):
            reported = cls._of_report(message)
            if reported is not None:
                return reported
        inner = getattr(error, "inner_exception", None)  # what torch.compile's backend has raised
        if isinstance(inner, Exception) and "TorchDynamoException" in names:
            return cls.of(inner)
        number = error.errno if isinstance(error, OSError) else None
        device_code = getattr(error, "error_code", None) if "AcceleratorError" in names else None
        return cls(
            names,
            type(error).__module__,
            message,
            tuple(frames_of(error.__traceback__)),
            number if isinstance(number, int) else None,
            device_code if isinstance(device_code, int) else None,
        )

    @classmethod
    def _of_report(cls, report: str) -> Origin | None:
        """The origin of the error in another process's traceback; None if there is none."""
        last = report.rpartition(_TRACEBACK)[2]
        lines = last.splitlines()
        start = next(
            (number for number, line in enumerate(lines) if line and not line[0].isspace()), None
        )
        if start is None or _TRACEBACK not in report:
            return None
        qualified, _, message = "\n".join(lines[start:]).strip().partition(": ")
        module, _, name = qualified.rpartition(".")
        kind = getattr(builtins, name, None)
        names: tuple[str, ...] = (name, "RuntimeError") if name in MACHINE_TYPES else (name,)
        if isinstance(kind, type) and issubclass(kind, BaseException) and not module:
            names, module = tuple(base.__name__ for base in kind.__mro__), "builtins"
        number = re.match(r"\[Errno (\d+)\]", message)
        return cls(
            names,
            module or "__main__",
            message,
            tuple(Frame(f["file"], int(f["line"]), f["name"]) for f in _FRAME.finditer(last)),
            int(number[1]) if number else None,
        )

    @property
    def text(self) -> str:
        """`TYPE: MESSAGE`, which the patterns search. A long one is cut to both of its ends, since
        some patterns take time that grows with the square of its length.
        """
        text = f"{self.names[0]}: {self.message}"
        if len(text) <= 2 * _END:
            return text
        return f"{text[:_END]}\n...\n{text[-_END:]}"

    @property
    def own(self) -> int | None:
        """The index of the innermost frame of the user's code; None if there is none."""
        found = [number for number, one in enumerate(self.frames) if is_user_code(one.file)]
        return found[-1] if found else None

    @property
    def below(self) -> tuple[Frame, ...]:
        """The frames below the user's code; all frames if none is the user's."""
        return self.frames if self.own is None else self.frames[self.own + 1 :]

    @property
    def where(self) -> Where:
        if not self.frames:
            return Where.NOWHERE
        if any(_COLLECTIVE.search(one.file) for one in self.below):
            return Where.COLLECTIVE
        if any(one.file.startswith(_PACKAGE) for one in self.below) or self.own is None:
            return Where.KDIST
        return Where.LIBRARY if self.below else Where.USER

    @property
    def is_users(self) -> bool:
        """Whether a call of the user's own raised it."""
        return self.where in (Where.USER, Where.LIBRARY, Where.NOWHERE)

    @property
    def is_refused(self) -> bool:
        """Whether kdist raised it on purpose, to refuse what the user's code passed."""
        return self.own is not None and self.is_raised and self.frames[-1].file.startswith(_PACKAGE)

    @property
    def is_raised(self) -> bool:
        """Whether the innermost frame raised it by a `raise` statement."""
        return bool(self.frames) and self.frames[-1].raises

    @property
    def load(self) -> Frame | None:
        """The innermost frame of kdist that loaded or received the state; None without one."""
        for one in reversed(self.below):
            if _LOADERS.search(one.file) and _LOADING.fullmatch(one.name):
                return one
        return None

    @property
    def is_of_machines_type(self) -> bool:
        """Whether its type is one that torch or the system raises."""
        return self.module in ("builtins", "socket", "") or bool(
            self.module.startswith("torch") or MACHINE_TYPES & set(self.names)
        )

    @property
    def is_of_users_type(self) -> bool:
        """Whether the user's code defines its type."""
        if self.module == "__main__":
            return True
        try:
            spec = importlib.util.find_spec(self.module.partition(".")[0])
        except (ImportError, ValueError):
            return False
        # not found here: another process may have had other import paths
        return spec is None or (
            spec.origin not in (None, "built-in", "frozen") and is_user_code(str(spec.origin))
        )


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
"""Types that Python raises for mistakes in a program."""
_FIX = "fix {place}"
_AGAIN = (
    "this error is in no table of causes and may pass; if it comes back alike, see its traceback, "
    "and {place}"
)
_LOAD = (
    "the checkpoint could not be given to the training: take an earlier one, or a new folder "
    "(spec.checkpoints); if it is of this very job, report it with the traceback"
)


@dataclass(frozen=True)
class Classification:
    """How an error is classified; see `Row` for the fields."""

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
    """Classify an error by the table; None if no row matches it."""
    for row in TABLE:
        if _recognizes(row, origin):
            if row.users and origin.is_users and origin.where is not Where.NOWHERE:
                # a row about lost peers has advice for the peer, but this rank is at fault
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
        signature: The name of the row that matches it.
        advice: What to do next.
        again: Whether to restart once, since the type says little about the cause.
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
    """Classify an error that no row matches, by its type and where it was raised."""
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
    """Classify an error that was raised in kdist's frames, or below them and not in the user's."""
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
