"""Reads a job.yaml into a `TrainingJob`, or reports all its problems at once with line and column.

The accepted YAML is a subset of YAML 1.2's core schema: one document, no tags, no merge keys `<<`,
no duplicate keys; anchors and aliases within limits. `no`, `on`, `1:30`, `1_000` and dates are
text, and `012` is twelve.

Start with `load_text` here, then read `yaml_parser` (text to a tree of nodes with positions),
`overrides` (`--set`) and `problems` (validation errors to messages).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from kdist.errors import InvalidJobError, Problem, UsageError
from kdist.load.text import MAX_BYTES, decode, split_lines
from kdist.load.yaml_parser import YamlNode, read
from kdist.spec import TrainingJob


def load_text(text: str | bytes, *, source: str, overrides: Sequence[str] = ()) -> TrainingJob:
    """Read a job from text.

    Args:
        text: the YAML.
        source: name of the text in problems.
        overrides: `path=value` settings, as given to `--set`.

    Returns:
        The job.

    Raises:
        InvalidJobError: with every problem, sorted by position.
    """
    decoded, problems = decode(text, source=source)
    job = None
    if not problems:
        tree, problems = read(decoded, source=source)
        if tree is not None:
            job, found = _validate(tree, overrides)
            reported = {(each.line, each.column) for each in problems if each.line}
            problems += [each for each in found if (each.line, each.column) not in reported]
    if problems or job is None:
        lines = split_lines(decoded)
        ordered = sorted(
            dict.fromkeys(problems),
            key=lambda each: (each.line == 0, each.line, each.column, each.path),
        )
        raise InvalidJobError(source, [each.with_excerpt(lines) for each in ordered])
    return job


def _validate(tree: YamlNode, overrides: Sequence[str]) -> tuple[TrainingJob | None, list[Problem]]:
    """The job, or every problem of tree and overrides. `load.problems` is imported only for invalid
    files.
    """
    unusable: list[Problem] = []
    if overrides:
        from kdist.load.overrides import override

        tree, unusable = override(tree, overrides)
    try:
        return TrainingJob.model_validate(tree.value(), by_alias=True, by_name=False), unusable
    except ValidationError as error:
        from kdist.load.problems import explain

        return None, [*unusable, *explain(tree, error)]


def load_file(path: str | Path, *, overrides: Sequence[str] = ()) -> TrainingJob:
    """Read a job from a file; `-` is stdin. Raises `UsageError` if it cannot be read, and what
    `load_text` raises.
    """
    if str(path) == "-":
        return load_text(sys.stdin.buffer.read(MAX_BYTES + 1), source="stdin", overrides=overrides)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"there is no file `{path}`", hint=_near(Path(path))) from None
    except IsADirectoryError:
        raise UsageError(
            f"`{path}` is a folder, not a file",
            hint=f"name the file in it: {Path(path) / 'job.yaml'}",
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror}") from None
    return load_text(data, source=str(path), overrides=overrides)


def _near(path: Path) -> str:
    """A hint for a missing file: an existing file with a similar name, or `kdist init`."""
    from difflib import get_close_matches

    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"did you mean `{path.with_name(near[0])}`?" if near else "`kdist init` writes one"
