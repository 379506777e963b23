"""Turns a function, or the class of a workload, into a job whose ranks import its source, and what
that uses of the notebook or script that defines it.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

from kdist.api.definition import JobDefinition, load
from kdist.api.generated import GeneratedModule
from kdist.api.handle import JobHandle
from kdist.errors import UsageError
from kdist.job.local import run_dir
from kdist.spec import job_document
from kdist.units import camel_case

_START = """

if __name__ == "__main__":
    import os as _os

    if _os.path.isdir({here!r}):  # the notebook's folder, which no pod has
        _os.chdir({here!r})
    {name}(**{args})
"""
_WORKLOAD = "kdist_trainer.workload.Workload"
_KEEP_ALL = {".kdistignore": "!*\n"}  # the run folders may be in a .gitignore


def train(target: Callable[..., object] | type, *, fresh: bool = True, **options: Any) -> JobHandle:
    """Start a function, or the class of a workload, on all ranks on this machine, and return once
    the agents have started. `from_code(…).apply()` does the same in a cluster.

    Args:
        target: as for `from_code`.
        fresh: archive the run of this name, or the checkpoints that it has left after `delete` in
            its folder, and start from scratch.
        **options: as for `from_code`: `nodes=2`, `args={"lr": 0.1}`.

    Raises:
        KdistError: the job cannot be started.
    """
    return from_code(target, **options).run(fresh=fresh)


def from_code(
    target: Callable[..., object] | type,
    *,
    name: str | None = None,
    args: Mapping[str, Any] | None = None,
    nodes: int | Mapping[str, int] = 1,
    procs_per_node: int | Literal["auto"] = "auto",
    **spec: Any,
) -> JobDefinition:
    """A job that runs a function as its script, or trains a workload. The source goes along, with
    the functions, classes, constants and modules that it uses.

    Args:
        target: the function, which every rank calls, or the class of a workload, for the managed
            training.
        name: of the job; None for the function's or the class's.
        args: what the function is called with, by name: values that can be written as an
            expression: numbers, strings, paths, dtypes, collections of them.
        nodes: number of nodes, or `{"min": 1, "max": 4}` for an elastic job.
        procs_per_node: ranks on each node; auto is one for each GPU, or 1 without GPUs.
        **spec: other fields of `spec` in snake_case, with values as in a job file: `image="…"`,
            `train={"steps": 100}`.

    Raises:
        UsageError: the source cannot be taken along; the hint says what to change.
        InvalidJobError: with every problem of the job.
    """
    if not isinstance(target, type | FunctionType) or target.__name__ == "<lambda>":
        raise UsageError(
            f"{target!r:.80} is neither a function nor the class of a workload",
            hint="write it as `def NAME(…):` in a cell or a file, or give the class itself",
        )
    called = target.__name__
    _check_kind(target, args, spec)
    plain = re.sub(r"[^a-z0-9]+", "-", called.lower()).strip("-")
    module = f"run_{plain.replace('-', '_')}"
    document = {camel_case(field): value for field, value in spec.items()}
    document |= {"nodes": nodes, "procsPerNode": procs_per_node}
    source, start = GeneratedModule(), ""
    source.add(called, target, user="the job")
    if isinstance(target, type):
        document["train"] = {**(spec.get("train") or {}), "workload": f"{module}:{called}"}
    else:
        document["script"] = {"path": f"{module}.py"}
        given = source.write_args(_check_call(target, args or {}))
        start = _START.format(name=called, args=given, here=str(Path.cwd()))
    text = source.text(called) + start
    for each in source.files:
        if each.partition("/")[0] in {module, f"{module}.py"}:
            raise UsageError(
                f"your module `{module}` has the name of the one that kdist writes for `{called}`",
                hint=f"rename `{called}` or the module",
            )
    files = {**source.files, f"{module}.py": text, **_KEEP_ALL}
    # a folder for each content: a run that is active restarts with what it has begun with
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    folder = run_dir.generated() / f"{plain}-{digest[:12]}"
    for each, text in files.items():
        run_dir.write_generated(f"{folder.name}/{each}", text)
    return load(job_document(name or plain, **document, code=str(folder)))


def _check_kind(target: FunctionType | type, args: object, spec: Mapping[str, Any]) -> None:
    called = target.__name__
    if not isinstance(args, Mapping | None):
        raise UsageError(f"args: {args!r:.80} has no names", hint='write args={"name": value}')
    if isinstance(target, FunctionType):
        if "train" in spec:
            problem = f"`{called}` is a function, and `train` is for the class of a workload"
            raise UsageError(problem, hint="leave `train` out, or give the class")
        return
    if not any(f"{each.__module__}.{each.__name__}" == _WORKLOAD for each in target.__mro__):
        problem = f"`{called}` is a class, and not that of a workload: it has not the base Workload"
        raise UsageError(problem, hint="derive it from Workload, or write a function that uses it")
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        problem = f"the workload `{called}` lacks {', '.join(missing)}"
        raise UsageError(problem, hint="define them in the class")
    if args:
        problem = f"args are for a function, and `{called}` is the class of a workload"
        raise UsageError(problem, hint='write its options as train={"options": {…}}')


def _check_call(function: FunctionType, args: Mapping[str, Any]) -> Mapping[str, Any]:
    called = function.__name__
    kinds: dict[str, tuple[Callable[[object], bool], str]] = {
        "an async": (inspect.iscoroutinefunction, f"with `asyncio.run({called}())`"),
        "a generator": (inspect.isgeneratorfunction, f"as `for each in {called}(): …`"),
        "an async generator": (inspect.isasyncgenfunction, "in a coroutine that is run"),
    }
    for kind, (is_such, how) in kinds.items():
        if is_such(function):
            raise UsageError(
                f"`{called}` is {kind} function, and calling it runs none of its code",
                hint=f"call it in a plain function, {how}",
            )
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise UsageError(f"{called}() cannot be called with these args: {error}") from None
    return args
