"""One row of the table of causes: how a failure is recognized, what it is, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from kdist_trainer.config.exit_codes import CODES, FAULTS, Cause, Exit, Fault, Rerun

ANYWHERE = "^"
"""The pattern of a row that its error numbers or its types alone recognize."""


@dataclass(frozen=True)
class Row:
    """A signature and the failure that it stands for.

    Attributes:
        name: Its name in records and on pages.
        text: A pattern of `TYPE: MESSAGE`.
        cause: The kind of failure.
        advice: What to do next, one sentence. `{place}`, `{path}`, `{free}`, `{peak}`, `{package}`,
            `{python}`, `{environment}` and `{install}` are filled in.
        source: The line that the text is from: `FILE[:LINE] WORDS`, where FILE holds WORDS.
        example: A message that it recognizes, as the source writes it.
        types: Names of the types that it needs, of which one is among the error's bases; by default
            those of torch's and the system's errors.
        device_codes: Values of `torch.AcceleratorError.error_code`, which decide where there is
            one.
        errnos: Values of `OSError.errno`, which it needs if there are any.
        through: Files of which one is among the frames, unless the text names one of their hosts.
        users: Whether it is the user's error if the user's own call raised it.
        only_users: Whether it needs a call of the user's own.
        final: Whether a restart cannot help.
        primary: Whether it happened by itself.
        alike: How many equal failures without progress end the run; 0 if they never do.
        fault: Whose fault it is; by default that of its cause.
        rerun: How a run may be started again.
        method: The method of a workload that is at fault.
    """

    name: str
    text: str
    cause: Cause
    advice: str
    source: str
    example: str = ""
    types: tuple[str, ...] = ()
    device_codes: frozenset[int] = frozenset()
    errnos: frozenset[int] = frozenset()
    through: tuple[str, ...] = ()
    users: bool = False
    only_users: bool = False
    final: bool = False
    primary: bool = True
    alike: int = 3
    fault: Fault = Fault.UNKNOWN
    rerun: Rerun = Rerun.AGAIN
    method: str = ""
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", re.compile(self.text))
        if self.fault is Fault.UNKNOWN:
            object.__setattr__(self, "fault", FAULTS.get(self.cause, Fault.UNKNOWN))

    @property
    def code(self) -> Exit:
        """The exit code of an agent whose root cause it is."""
        code = CODES.get(self.cause, Exit.PEERS_LOST)
        return Exit.USER if self.final and code.retryable else code


def user(name: str, text: str, advice: str, source: str, **more: object) -> Row:
    """A row of an error in the user's code, which a restart repeats."""
    fields: dict[str, object] = {"cause": Cause.USER_CODE, "final": True, "rerun": Rerun.FIXED}
    return Row(name=name, text=text, advice=advice, source=source, **{**fields, **more})  # type: ignore[arg-type]  # the fields of a row


def device_codes(*numbers: int) -> frozenset[int]:
    """Error numbers of a device's driver."""
    return frozenset(numbers)


def names_of(error: type[BaseException]) -> Iterable[str]:
    """The names of a type and its bases."""
    return [base.__name__ for base in error.__mro__]
