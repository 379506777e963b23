"""Reads a job.yaml into a `TrainingJob`, or reports all its problems at once with line and column.

The accepted YAML is a subset of YAML 1.2's core schema: a job per document, no tags, no merge keys
`<<`, no duplicate keys; anchors and aliases within limits. `no`, `on`, `1:30`, `1_000` and dates
are text, and `012` is twelve.

Start with `load_text` here, then read `yaml_parser` (text to a tree of nodes with positions),
`overrides` (`--set`), `problems` (validation errors to messages), `code` (the user's code that a
job names), `folder` (which files of it are sent, and which should not be) and `literals` (texts
that other programs would read otherwise).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kdist.errors import InvalidJobError, Problem, UsageError
from kdist.job_file.yaml_parser import MAX_BYTES, YamlNode, decode, read, read_value, split_lines
from kdist.spec import TrainingJob
from kdist.spec.training_job import WRITTEN

if TYPE_CHECKING:
    from kdist.job_file.code import Use


def load_text(
    text: str | bytes,
    *,
    source: str,
    overrides: Sequence[str] = (),
    base: Path | None = None,
    use: Use | None = None,
    warnings: list[Problem] | None = None,
    generated: bool = False,
) -> TrainingJob:
    """Read the job of a text.

    Args:
        text: the YAML.
        source: name of the text in problems.
        overrides: `path=value` settings, as given to `--set`.
        base: folder that the job's relative paths start from; None for the working directory.
        use: what the job is read for, which decides what of its code and data is checked; None
            checks nothing but the text.
        warnings: receives what `load_files` warns of.
        generated: the user has not written this text, so problems have no line of it.

    Raises:
        InvalidJobError: with every problem, sorted by position.
        UsageError: there is more than one job.
    """
    jobs = _load_documents(text, source, overrides, base, use, warnings, generated=generated)
    return _only(jobs, source)


def _only(jobs: Sequence[TrainingJob], source: str) -> TrainingJob:
    if len(jobs) > 1:
        names = " and ".join(each.metadata.name for each in jobs)
        raise UsageError(
            f"`{source}` has {len(jobs)} jobs, {names}, and this command takes one",
            hint="move each to its own file; `kdist apply` takes files with several",
        )
    return jobs[0]


def _load_documents(
    text: str | bytes,
    source: str,
    overrides: Sequence[str],
    base: Path | None,
    use: Use | None,
    warnings: list[Problem] | None,
    *,
    generated: bool = False,
    check_pod: Callable[[TrainingJob], Sequence[Any]] | None = None,
) -> list[TrainingJob]:
    """Read the jobs of a text, one for each of its YAML documents; there is at least one."""
    decoded, problems = decode(text, source=source)
    jobs = []
    if not problems:
        if generated:
            tree, problems = read_value(decoded, source=source)
            trees = [] if tree is None else [tree]
        else:
            trees, problems = read(decoded, source=source)
        reported = {(each.line, each.column) for each in problems if each.line}
        for each_tree in trees:
            job, tree, found = _validate(each_tree, overrides, is_written=not generated)
            if job is not None:
                jobs.append(job)
            if job is not None and use is not None:
                spec = job.spec
                named = spec.code is not None or spec.script is not None or bool(spec.data)
                # code or data that may be on this machine
                if named or (spec.train is not None and ":" in spec.train.workload):
                    from kdist.job_file.code import check_code

                    found += check_code(tree, job, base=base or Path.cwd(), use=use)
            if job is not None and check_pod is not None and job.spec.pod_template:
                from kdist.job_file.problems import at_path

                found += [at_path(tree, *each) for each in check_pod(job)]
            if job is not None and warnings is not None:
                from kdist.job_file.literals import find_literals

                warnings += find_literals(tree)
                if use != "here":  # where it is sent nowhere
                    from kdist.job_file.folder import find_warnings

                    warnings += find_warnings(tree, job, base=base or Path.cwd())
            problems += [each for each in found if (each.line, each.column) not in reported]
    if problems or not jobs:
        lines = split_lines(decoded)
        ordered = sorted(
            dict.fromkeys(problems),
            key=lambda each: (each.line == 0, each.line, each.column, each.path),
        )
        raise InvalidJobError(
            source,
            [
                # its line, unless it is in another file than the job's
                each if each.excerpt or each.source != source else each.with_excerpt(lines)
                for each in ordered
            ],
            next_command=_explain(ordered),
        )
    return jobs


def _explain(problems: Sequence[Problem]) -> str:
    """The `kdist explain` command for the first problem whose field the model knows; empty if there
    is none.
    """
    from kdist.spec import reference
    from kdist.spec.reference import parse

    for problem in problems:
        path = parse(problem.path) or ()
        while path:
            field = reference.find(path)
            if field is not None and field.path and "*" not in field.path:
                return f"kdist explain {field.path.replace('[]', '')}"
            path = path[:-1]
    return ""


def _validate(
    tree: YamlNode, overrides: Sequence[str], *, is_written: bool
) -> tuple[TrainingJob | None, YamlNode, list[Problem]]:
    """The job, or every problem of tree and overrides, with the tree that has the overrides.
    `problems` is imported only for invalid files.
    """
    unusable: list[Problem] = []
    if overrides:
        from kdist.job_file.overrides import override

        tree, unusable = override(tree, overrides)
    try:
        job = TrainingJob.model_validate(
            tree.value(), by_alias=True, by_name=False, context=WRITTEN if is_written else None
        )
    except ValidationError as error:
        from kdist.job_file.problems import explain

        return None, tree, [*unusable, *explain(tree, error)]
    return job, tree, unusable


def load_file(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    use: Use | None = None,
    warnings: list[Problem] | None = None,
) -> TrainingJob:
    """Read the job of a file; `-` is stdin. Raises `UsageError` if it cannot be read, and what
    `load_text` raises, which describes `use`.
    """
    return _only(load_files(path, overrides=overrides, use=use, warnings=warnings), str(path))


def load_files(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    use: Use | None = None,
    warnings: list[Problem] | None = None,
    check_pod: Callable[[TrainingJob], Sequence[Any]] | None = None,
) -> list[TrainingJob]:
    """Read all jobs of a file, as `load_file` reads the only one. Added to `warnings` is what is
    passed in another way than it may seem, and, unless it is for `here`, what looks like a
    credential and would be sent as it is. What `check_pod` finds wrong with
    podTemplate, each a place, a message and a hint, is among the problems.
    """
    data, source, base = read_file(path)
    return _load_documents(data, source, overrides, base, use, warnings, check_pod=check_pod)


def read_file(path: str | Path) -> tuple[bytes, str, Path]:
    """The bytes of a file, its name in problems, and the folder that its paths start from."""
    if str(path) == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1), "stdin", Path.cwd()
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise missing(path) from None
    except IsADirectoryError:
        raise UsageError(
            f"`{path}` is a folder, not a file",
            hint=f"name the file in it: {Path(path) / 'job.yaml'}",
        ) from None
    except OSError as error:
        raise unreadable(f"cannot read `{path}`", error) from None
    return data, str(path), Path(path).absolute().parent


def resolve_path(base: Path, path: str) -> Path:
    """An absolute path for a path of the job file: relative to `base`; `~` is the caller's home."""
    expanded = Path(path)
    with suppress(RuntimeError):  # `~name` of nobody
        expanded = expanded.expanduser()
    return (base / expanded).absolute()


def unreadable(what: str, error: OSError) -> UsageError:
    """The error for a file or folder that exists and cannot be read."""
    return UsageError(f"{what}: {error.strerror}", hint="`ls -l` shows who may read it")


def missing(path: str | Path) -> UsageError:
    """The error for a file that does not exist; its hint is a file with a similar name, or what
    writes one.
    """
    from difflib import get_close_matches

    path = Path(path)
    is_job = path.suffix != ".py"
    suffixes = (".yaml", ".yml") if is_job else (".py",)
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in suffixes]
    except OSError:
        names = []
    near = get_close_matches(path.name, names, n=1, cutoff=0.5)
    otherwise = "`kdist init` writes one" if is_job else f"it is relative to {Path.cwd()}"
    hint = f"did you mean `{path.with_name(near[0])}`?" if near else otherwise
    return UsageError(f"there is no file `{path}`", hint=hint)
