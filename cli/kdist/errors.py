"""The errors of the command line: a message, how to fix it, and the exit code.

`app.py` turns them into text and an exit status. This module imports only the standard library, so
every package may raise them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple


class Code(IntEnum):
    """Exit codes of `kdist` (those of a training's agent are `kdist_trainer.config.Exit`)."""

    OK = 0
    ERROR = 1
    USAGE = 2
    UNCHANGED = 3
    NOT_FOUND = 4
    UNREACHABLE = 5
    TIMEOUT = 6
    FORBIDDEN = 7
    JOB_FAILED = 10
    JOB_CANCELLED = 11
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


class KdistError(Exception):
    """An error that the user can act on.

    Attributes:
        message: what failed and why, in one sentence.
        hint: how to fix it.
        next_command: command to run next.
        change: what to do before, without which that command fails again.
        code: exit code of `kdist`.
    """

    code: Code = Code.ERROR

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # a hint may come later
        """What Python and notebooks show below the traceback of an error that nobody handles."""
        notes = (f"Hint: {self.hint}", f"Next: {self.next_command}")
        return [each for each in notes if not each.endswith(": ")]

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        next_command: str = "",
        change: str = "",
        code: Code | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.next_command = next_command
        self.change = change
        if code is not None:
            self.code = code

    def to_document(self) -> dict[str, Any]:
        """The error for programs."""
        return {
            "exitCode": int(self.code),
            "reason": self.code.name,
            "message": self.message,
            "hint": self.hint,
            "change": self.change,
            "nextCommand": self.next_command,
            "problems": [],
        }


class KdistWarning(UserWarning):
    """What programs that import kdist are warned of, in the words of the commands."""


class UsageError(KdistError):
    """The command line, or a file that it names, is invalid."""

    code = Code.USAGE


class NotFoundError(KdistError):
    """The requested object does not exist."""

    code = Code.NOT_FOUND


class JobNotFoundError(NotFoundError):
    """There is no job of this name in the cluster; `jobs` has (name, namespace) of each."""

    def __init__(self, *jobs: tuple[str, str]) -> None:
        missing = [f"{name} in namespace {namespace}" for name, namespace in jobs]
        namespaces = {namespace for _, namespace in jobs}
        where = f"-n {namespaces.pop()}" if len(namespaces) == 1 else "-A"
        super().__init__(
            f"there is no job {', nor '.join(missing)}", next_command=f"kdist get {where}"
        )


class Problem(NamedTuple):
    """A problem in a job file. Lines and columns count from 1; line 0 means a `--set` option."""

    source: str
    line: int
    column: int
    path: str
    message: str
    suggestion: str = ""
    hint: str = ""
    excerpt: str = ""
    width: int = 1

    @property
    def where(self) -> str:
        """Location such as `job.yaml:14:5`, or only the source if there is no line."""
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    @property
    def sentence(self) -> str:
        """Path, reason and suggestion without the location."""
        reason = f"{self.path}: {self.message}" if self.path else self.message
        return f"{reason}; did you mean `{self.suggestion}`?" if self.suggestion else reason

    @property
    def advice(self) -> str:
        """Location, sentence and hint in one line, for what is no error."""
        return f"{self}; {self.hint}" if self.hint else str(self)

    def to_document(self) -> dict[str, Any]:
        """The problem for programs."""
        keys = ("line", "column", "path", "message", "suggestion", "hint")
        return {"file": self.source, **{key: getattr(self, key) for key in keys}}

    def with_excerpt(self, lines: Sequence[str]) -> Problem:
        """The same problem with its line of the file, if that can be printed."""
        line = lines[self.line - 1] if 0 < self.line <= len(lines) else ""
        if not line.strip() or len(line) > 160 or not line.replace("\t", " ").isprintable():
            return self
        return self._replace(
            excerpt=line.replace("\t", " "),
            width=max(1, min(self.width, len(line) + 1 - self.column)),
        )

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


class InvalidJobError(KdistError):
    """A job file with problems: all of them, in the order of their locations."""

    code = Code.USAGE

    def __init__(self, source: str, problems: Sequence[Problem], *, next_command: str = "") -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"`{source}` has {count}", next_command=next_command)
        self.source = source
        self.problems = tuple(problems)

    def to_document(self) -> dict[str, Any]:
        """The error for programs, with every problem."""
        problems = [each.to_document() for each in self.problems]
        return {**super().to_document(), "problems": problems}

    def __str__(self) -> str:
        return "\n".join([*(str(problem) for problem in self.problems), self.message])
