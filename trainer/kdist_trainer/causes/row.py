"""One row of the table of causes: how a failure is recognized, what it is, and what to do next."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from kdist_trainer.config.exit_codes import CODES, FAULTS, Cause, Exit, Fault, Rerun

TORCH_CPU = "torch/lib/libtorch_cpu.so"
TORCH_CUDA = "torch/lib/libtorch_cuda.so"
TORCH_PYTHON = "torch/lib/libtorch_python.so"
"""Where torch's own messages are, for `Row.source`."""
IN_USE = "errno.h EADDRINUSE Address already in use"
NO_NAME = "netdb.h EAI_AGAIN Temporary failure in name resolution"
"""Messages of the C library that several rows match, likewise."""
MAX_REPEATS: Final = 3
"""How many equal failures in a row are permanent, unless the row has another number."""
ANY_TEXT = "^"
"""The pattern of a row that matches by error numbers or types alone."""


@dataclass(frozen=True)
class Row:
    """The signature of a failure, and how the failure is classified.

    Attributes:
        name: Its name in records and in the documentation.
        text: A pattern that is searched in `TYPE: MESSAGE`.
        cause: The kind of failure.
        advice: What to do next, one sentence. `{place}`, `{path}`, `{free}`, `{peak}`, `{package}`,
            `{python}`, `{environment}` and `{install}` are filled in.
        source: Where the text comes from: `FILE[:LINE] WORDS`, where FILE contains WORDS.
        example: A message that it matches, as the source writes it.
        types: Names of types: the error's type or a base of it must have one of them. By default
            torch's and the system's errors.
        device_codes: Values of `torch.AcceleratorError.error_code`; they alone decide about an
            error that has a code.
        errnos: Values of `OSError.errno`: if there are any, the error must have one of them.
        through: Parts of paths: one must occur in the traceback, unless the text names a hub.
        users: Whether it is the user's error if the user's own call raised it.
        only_users: Whether it applies only if the user's own call raised the error.
        final: Whether a restart cannot help.
        primary: Whether it is not the consequence of another rank's failure.
        alike: How many equal failures without progress end the run; 0 if they never do.
        fault: Whose fault it is; by default that of its cause.
        rerun: How a run may be started again.
        method: The workload's method that is at fault.
        of_machine: Whether the machine itself is broken: no mistake of the job or of its image
            looks like this, so the failure is counted for the machine, not for the job.
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
    alike: int = MAX_REPEATS
    fault: Fault = Fault.UNKNOWN
    rerun: Rerun = Rerun.AGAIN
    method: str = ""
    of_machine: bool = False
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", re.compile(self.text))
        if self.fault is Fault.UNKNOWN:
            object.__setattr__(self, "fault", FAULTS.get(self.cause, Fault.UNKNOWN))

    @property
    def code(self) -> Exit:
        """The exit code of an agent with this root cause."""
        code = CODES.get(self.cause, Exit.PEERS_LOST)
        return Exit.USER if self.final and code.retryable else code


def user(name: str, text: str, advice: str, source: str, **overrides: object) -> Row:
    """A row for an error in the user's code, which would fail again after a restart."""
    fields: dict[str, object] = {"cause": Cause.USER_CODE, "final": True, "rerun": Rerun.FIXED}
    return Row(name=name, text=text, advice=advice, source=source, **{**fields, **overrides})  # type: ignore[arg-type]  # the fields of a row
