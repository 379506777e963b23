"""The pages of what scripts and programs import, read from the sources without importing them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from kdist import _MODULES
from kdist_trainer.config.training import DEFAULT_KEEP

_TRAINER = Path(__file__).parents[2] / "trainer" / "kdist_trainer"
_API = Path(__file__).parents[2] / "cli" / "kdist" / "api"
_CLASSES = {
    "Reporter": _TRAINER / "metrics" / "transport.py",
    "Checkpointer": _TRAINER / "script" / "api.py",
    "ShardedLoader": _TRAINER / "script" / "sharded_loader.py",
    "stop_requested": _TRAINER / "script" / "stop.py",
    "StopRequest": _TRAINER / "script" / "stop.py",
}
_PROGRAM_NAMES = {
    "load": _API / "definition.py",
    "JobDefinition": _API / "definition.py",
    "train": _API / "code.py",
    "from_code": _API / "code.py",
    "get": _API / "handle.py",
    "list_jobs": _API / "handle.py",
    "JobHandle": _API / "handle.py",
    "Checkpoint": _API / "handle.py",
}
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes):$", re.MULTILINE)
_TITLES = {"Args": "Arguments"}
_INTRODUCTION = """# Reporter and Checkpointer

What a script for torchrun imports to report metrics and to save checkpoints: \
`from kdist_trainer import Checkpointer, Reporter`. Outside kdist both do nothing, so that the \
script still runs everywhere. [Scripts](../how-to/scripts.md) shows both in use.
"""


*_SECTIONS, _LAST_SECTION = (f"`{name}`" for name in _MODULES["spec"].split())
_PROGRAMS = f"""# import kdist

What programs and notebooks import: `import kdist`. [Jobs from Python](../how-to/python.md) shows \
it in use. `kdist.KdistError` is the base of all errors, such as \
`InvalidJobError`, `NotFoundError` and `UsageError`, and \
`kdist.KdistWarning` the category of all warnings. `JobStatus`, `Phase`, `Diagnosis` and `Code` \
are what methods and errors return and have. The sections of a job are classes with \
the fields of [job.yaml](job-yaml.md) in snake_case: {", ".join(_SECTIONS)} and {_LAST_SECTION}.
"""


def render() -> str:
    """Text of the page for scripts."""
    return _render(_INTRODUCTION, _CLASSES)


def render_program_api() -> str:
    """Text of the page for programs."""
    return _render(_PROGRAMS, _PROGRAM_NAMES)


def _render(introduction: str, names: Mapping[str, Path]) -> str:
    parts = [introduction]
    for name, file in names.items():
        body = ast.parse(file.read_text(encoding="utf-8")).body
        kinds = (ast.ClassDef, ast.FunctionDef)
        (found,) = (each for each in body if isinstance(each, kinds) and each.name == name)
        parts.append(f"## {name}\n")
        if isinstance(found, ast.FunctionDef) and names is _PROGRAM_NAMES:
            parts.append(f"```text\n{name}({_arguments(found)}){_returned(found)}\n```\n")
        parts.append(_text(found))
        parts += _methods(found) if isinstance(found, ast.ClassDef) else ()
    return "\n".join(parts)


def _methods(owner: ast.ClassDef) -> Iterator[str]:
    for each in owner.body:
        if not isinstance(each, ast.FunctionDef):
            continue
        marks = [mark.id for mark in each.decorator_list if isinstance(mark, ast.Name)]
        if "overload" in marks:
            continue
        if each.name == "__init__":
            signature, title = owner.name, f"{owner.name}()"
        elif each.name.startswith("_"):
            continue
        else:
            signature, title = each.name, f"{owner.name}.{each.name}"
        yield f"### {title}\n"
        if not marks:
            yield f"```text\n{signature}({_arguments(each)}){_returned(each)}\n```\n"
        yield _text(each)


def _arguments(function: ast.FunctionDef) -> str:
    found = ast.unparse(function.args).removeprefix("self").removeprefix(", ")
    return found.replace("DEFAULT_KEEP", str(DEFAULT_KEEP))


def _returned(function: ast.FunctionDef) -> str:
    if function.returns is None or function.name == "__init__":
        return ""
    text = ast.unparse(function.returns)
    return "" if text == "None" else f" -> {text}"


def _text(node: ast.ClassDef | ast.FunctionDef) -> str:
    """A docstring in Google's style as Markdown."""
    first, *rest = _SECTION.split(inspect.cleandoc(ast.get_docstring(node) or ""))
    parts = [_prose(first)]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        items = re.sub(r"\n {8,}", " ", body).strip("\n").splitlines()
        listed = "\n".join(
            re.sub(r"^(\**\w+): ", r"- `\1`: ", item.strip())
            if title != "Returns"
            else item.strip()
            for item in items
        )
        parts.append(f"**{_TITLES.get(title, title)}**\n\n{listed}\n")
    return "\n".join(parts)


def _prose(text: str) -> str:
    """Paragraphs, with the indented ones as code."""
    return (
        "".join(
            f"```python\n{textwrap.dedent(part)}\n```\n\n"
            if part.startswith("    ")
            else f"{part}\n\n"
            for part in text.strip("\n").split("\n\n")
        ).rstrip("\n")
        + "\n"
    )
