"""Turns a function, or the class of a workload, into the files that its ranks import: its source,
and what that uses of the notebook or script that defines it.

Source is found by Python's cache of lines, where notebooks keep their cells. A name means what it
means to the function: another function or class comes along, an installed module is imported, a
module next to the notebook is copied, a constant is written down. Anything else exists only in the
memory of this process, and is refused by name.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import linecache
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

from kdist.api.definition import JobDefinition, load
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
    {name}(**{args!r})
"""
_KEEP_ALL = {".kdistignore": "!*\n"}  # the run folders may be in a .gitignore


def train(target: Callable[..., object] | type, *, fresh: bool = True, **options: Any) -> JobHandle:
    """Start a function, or the class of a workload, on all ranks on this machine, and return once
    the agents have started. `from_code(…).apply()` does the same in a cluster.

    Args:
        target: as for `from_code`.
        fresh: archive the run of this name, and start from scratch.
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
        args: what the function is called with, by name: constants only.
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
            hint="write it as `def NAME(…):` in a cell or a file",
        )
    called = target.__name__
    plain = re.sub(r"[^a-z0-9]+", "-", called.lower()).strip("-")
    module = f"run_{plain.replace('-', '_')}"
    document = {camel_case(field): value for field, value in spec.items()}
    document |= {"nodes": nodes, "procsPerNode": procs_per_node}
    source, start = _Source(), ""
    if isinstance(target, type):
        document["train"] = {**(spec.get("train") or {}), "workload": f"{module}:{called}"}
    else:
        document["script"] = {"path": f"{module}.py"}
        given = _check_args(target, args or {})
        start = _START.format(name=called, args=given, here=str(Path.cwd()))
    source.add(called, target, user="the job")
    files = {**source.files, f"{module}.py": source.text(called) + start, **_KEEP_ALL}
    # a folder for each content: a run that is active restarts with what it has begun with
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    folder = run_dir.generated() / f"{plain}-{digest[:12]}"
    for each, text in files.items():
        run_dir.write_generated(f"{folder.name}/{each}", text)
    return load(job_document(name or plain, **document, code=str(folder)))


def _check_args(function: FunctionType, args: Mapping[str, Any]) -> dict[str, Any]:
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise UsageError(
            f"{function.__name__}() cannot be called with these args: {error}"
        ) from None
    for name, value in args.items():
        if not _is_constant(value):
            raise _refuse(name, value, "args")
    return dict(args)


def _is_constant(value: object) -> bool:
    """Whether its text says all of it."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _refuse(name: str, value: object, user: str) -> UsageError:
    return UsageError(
        f"`{name}`, which {user} uses, is in the memory of this process, which the ranks do not "
        f"have ({type(value).__module__}.{type(value).__qualname__})",
        hint="make it inside the function, or pass a number or a text in args",
    )


class _Source:
    """A module that is being put together; `files` are the modules that were copied, by their path
    in the folder of the code.
    """

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self._meanings: dict[str, object] = {}
        self._imports: set[str] = set()
        self._parts: list[str] = []

    def text(self, called: str) -> str:
        first = f'"""`{called}` and what it uses, written by kdist."""'
        imports = sorted(self._imports, key=lambda line: ("__future__" not in line, line))
        return "\n\n".join([first, "\n".join(imports), *self._parts]) + "\n"

    def add(self, name: str, value: object, *, user: str) -> None:
        """Have a name mean here what it means to the function `user`."""
        if self._meanings.setdefault(name, value) is not value:
            problem = f"`{name}` means two things in what {user} uses"
            raise UsageError(problem, hint="give one of them another name")
        if isinstance(value, ModuleType):
            self._import(value.__name__, f"import {value.__name__} as {name}")
        elif _is_constant(value):
            self._parts.append(f"{name} = {value!r}")
        elif origin := _find_origin(name, value):
            self._import(origin[0], f"from {origin[0]} import {origin[1]} as {name}")
        elif isinstance(value, type | FunctionType) and value.__name__ != "<lambda>":
            self._add_source(value)
            self._parts += [f"{name} = {value.__name__}"] if name != value.__name__ else []
        else:
            raise _refuse(name, value, user)

    def _add_source(self, value: type | FunctionType) -> None:
        text = _find_source(value)
        space = dict(vars(sys.modules.get(value.__module__, builtins)))
        for each in _functions(value):
            space |= {**each.__globals__, **inspect.getclosurevars(each).nonlocals}
            if each.__code__.co_flags & annotations.compiler_flag:
                self._imports.add("from __future__ import annotations")
        for name in sorted({*_names(symtable.symtable(text, value.__name__, "exec"))} & {*space}):
            is_new = name not in self._meanings or self._meanings[name] is not space[name]
            if is_new and not name.startswith("__") and space[name] is not vars(builtins).get(name):
                self.add(name, space[name], user=f"`{value.__name__}`")
        for first, rest in re.findall(r"\b([A-Za-z_]\w*)((?:\.\w+)+)", text):
            path = getattr(space.get(first), "__name__", "") + rest  # `import a.b`, then `a.b.c`
            while isinstance(space.get(first), ModuleType) and "." in path:
                self._imports |= {f"import {path}"} if path in sys.modules else set()
                path = path.rpartition(".")[0]
        self._parts.append(text.strip("\n"))

    def _import(self, module: str, line: str) -> None:
        self._imports.add(line)
        main = sys.modules["__main__"]
        script = (
            getattr(main, "__file__", None) if getattr(main, "__spec__", None) is None else None
        )
        for here in {Path.cwd(), Path(script or "x").absolute().parent}:
            self._copy(module.partition(".")[0], here)

    def _copy(self, top: str, here: Path) -> None:
        """Copy a module of this folder, and those that it imports."""
        known = getattr(sys.modules.get(top), "__file__", None)
        for first in (here / f"{top}.py", here / top / "__init__.py"):
            if not first.is_file() or (known is not None and Path(known) != first):
                continue
            for file in [first] if first.stem == top else first.parent.rglob("*.py"):
                name = file.relative_to(here).as_posix()
                if name not in self.files:
                    self.files[name] = file.read_text(encoding="utf-8")
                    for each in _imported(self.files[name]):
                        self._copy(each, here)


def _find_origin(name: str, value: object) -> tuple[str, str] | None:
    """Module and name by which every process can import a value; None if there are none."""
    own = (str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", "")))
    others = [] if isinstance(value, type | FunctionType) else sorted(sys.modules, key=len)
    for module, original in [own, *((each, name) for each in others)]:
        found = sys.modules.get(module)
        is_file = module != "__main__" and getattr(found, "__spec__", None) is not None
        if is_file and getattr(found, "__dict__", {}).get(original) is value:
            return module, original
    return None


def _functions(value: type | FunctionType) -> Iterator[FunctionType]:
    """The function, or a class's methods, without their decorators."""
    for each in [value] if isinstance(value, FunctionType) else [*vars(value).values()]:
        plain: Any = getattr(each, "fget", None) or getattr(each, "__func__", each)
        inner = inspect.unwrap(plain)
        if isinstance(inner, FunctionType):
            yield inner


def _find_source(value: type | FunctionType) -> str:
    """The source of a function or class, with its decorators."""
    places = [
        (each.__code__.co_filename, each.__code__.co_firstlineno) for each in _functions(value)
    ]
    if isinstance(value, type):  # that has no method of its own: the latest of its name
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        places += [(each, 0) for each in ([file] if file else reversed([*linecache.cache]))]
    for file, line in places:
        lines = linecache.getlines(file)
        try:
            nodes = [*ast.walk(ast.parse("".join(lines)))]
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == value.__name__:
                first = min(each.lineno for each in [node, *node.decorator_list])
                last = node.end_lineno or first
                if not line or first <= line <= last:
                    return textwrap.dedent("".join(lines[first - 1 : last]))
    raise UsageError(
        f"the source of `{value.__name__}` is not known to this process",
        hint="define it in a file, or in a cell of a notebook",
    )


def _names(table: symtable.SymbolTable) -> Iterator[str]:
    """The names in a source that come from outside of it, and those that it defines."""
    for symbol in table.get_symbols():
        if symbol.is_global() or table.get_type() == "module":
            yield symbol.get_name()
    for child in table.get_children():
        yield from _names(child)


def _imported(text: str) -> Iterator[str]:
    """The top modules that a source imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
