"""The errors of commands in the words of Python, where an option is a keyword and a command a
method.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

from kdist.errors import KdistError

_Named = TypeVar("_Named", bound=Callable[..., Any])


def _name_line(file: str, line: int) -> str:
    """What to fix in a file that kdist has made of the cells of a notebook."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    with suppress(OSError, ValueError, SyntaxError, IndexError):
        text = Path(file).read_text()
        for each in ast.parse(text).body:
            if isinstance(each, functions) and each.lineno <= line <= (each.end_lineno or 0):
                return (
                    f"fix `{text.splitlines()[line - 1].strip()}` in `{each.name}` ({file}:{line})"
                )
    return f"fix {file}:{line}"


_METHODS: Final = "suspend|resume|restart|delete|wait|why|status"
_WORDS: Final[tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]] = (
    (rf"`kdist ({_METHODS}) (\w[\w.-]*) -n ([\w-]+)`", r'kdist.get("\2", namespace="\3").\1()'),
    (rf"`kdist ({_METHODS}) (\w[\w.-]*)`", r'kdist.get("\2").\1()'),
    (r", or Ctrl-C there", ""),
    (r"`?--set spec\.image=\S+? sets it for this command", 'image="REGISTRY/NAME:TAG" sets it'),
    (r"`?--set (spec[\w.]+=[\w./:-]+)`?", r'.set("\1")'),
    (r"\bmetadata\.name\b", 'name (`name="…"`, or in a job file metadata.name)'),
    (r"`spec\.checkpoints: \{size: 10Gi\}`", 'checkpoints={"size": "10Gi"}'),
    (r"-n NAMESPACE", 'namespace="…"'),
    (r"(with|or) --kubeconfig\b", r'\1 kubeconfig="…"'),
    (r"`kdist run` needs", "run() needs"),
    (r"\bfix (/\S+/run_\w+\.py):(\d+)", lambda found: _name_line(found[1], int(found[2]))),
    (r"change the job file, and", "change the job, and"),
    (r"`kdist apply` with the job file", "apply() of the job"),
    (r"--(fresh|local|direct)\b(?=[^`]*(?:`[^`]*`[^`]*)*$)", r"\1=True"),  # not in a command
)


def _say(text: str) -> str:
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except KdistError as error:
        if error.args == (error.message,):
            error.args = (_say(error.message),)
        error.message, error.hint = _say(error.message), _say(error.hint)
        raise


def in_python(named: _Named) -> _Named:
    """A function, or all methods of a class, with errors in these words."""
    if isinstance(named, type):
        for name, each in [*vars(named).items()]:
            if inspect.isfunction(each) and not name.startswith("_"):
                setattr(named, name, in_python(each))
        return named

    @wraps(named)  # no decorator of contextlib's: warnings name the first file outside of kdist
    def call(*given: Any, **options: Any) -> Any:
        with _translating():
            return named(*given, **options)

    @wraps(named)
    def iterate(*given: Any, **options: Any) -> Iterator[Any]:
        with _translating():
            yield from named(*given, **options)

    chosen: Any = iterate if inspect.isgeneratorfunction(named) else call
    return chosen  # type: ignore[no-any-return]  # it has the same signature
