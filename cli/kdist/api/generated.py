"""The module that ranks import: a function or class, and what it uses of a notebook or script.

A name means what it means to the function: another function or class comes along, an installed
module is imported, a module of one's own is copied, a value that can be written as an expression is
written down. Anything else exists only in the memory of this process, and is refused by name.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import symtable
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from kdist.api.modules import copy_module, find_origin
from kdist.api.sources import (
    Definition,
    find_evaluated,
    find_functions,
    find_source,
    names_at_definition,
    still_gives,
    unwrap,
)
from kdist.api.values import (
    Refer,
    UnwritableError,
    attribute,
    is_constant,
    write,
    write_class,
)
from kdist.errors import UsageError

_BUILTIN = {"exit", "open", "quit"}  # IPython has its own, of which the ranks have Python's
_MAKE_IT = "make it inside the function, or in a function that it calls"
_TEXT = "give its text, from which the function makes it: isoformat()"
_HINTS = {
    ("builtins", "function"): "write it as `def NAME(…):`",  # a lambda: others are sent
    ("collections", "defaultdict"): "give dict(…) of it, or make it inside the function",
    **{("datetime", each): _TEXT for each in ("date", "datetime", "time")},
}


@dataclass
class _Part:
    """A statement that gives a name its value.

    Attributes:
        text: its source.
        needs: parts that must be there when it runs.
        calls: those of them that it may call then.
        uses: parts that what it has defined needs later.
        made: whether it writes down a value.
    """

    text: str = ""
    needs: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)
    made: bool = False


class GeneratedModule:
    """A module that is being put together; `files` are the modules that were copied, by their path
    in the folder of the code.
    """

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self._meanings: dict[str, tuple[Any, str]] = {}
        self._imports: set[str] = set()
        self._parts: dict[str, _Part] = {}
        self._problems: dict[str, str] = {}  # and how to solve each

    def text(self, called: str) -> str:
        """Its source. Raises `UsageError` with everything that was refused."""
        for name, part in self._parts.items():
            run = [self._parts[each] for each in self._reach(name)] if part.made else []
            if any(name in self._reach(*each.calls, uses=True) for each in run):
                self._refuse(name, *self._meanings[name])  # decorators have filled it
        if self._problems:
            hints = "; ".join(dict.fromkeys(self._problems.values()))
            raise UsageError("\n".join(self._problems), hint=hints)
        first = f'"""`{called}` and what it uses, written by kdist."""'
        imports = sorted(self._imports, key=lambda line: ("__future__" not in line, line))
        parts = [self._parts[name].text for name in self._order()]
        return "\n\n".join([first, "\n".join(imports), *parts]) + "\n"

    def add(self, name: str, value: Any, *, user: str) -> None:
        """Have a name mean here what it means to the function `user`."""
        if name in self._meanings:
            known, other = self._meanings[name]
            is_same = is_constant(known) and is_constant(value) and repr(known) == repr(value)
            if known is not value and not is_same:
                problem = f"`{name}`, which {user} uses, is not the `{name}` that {other} uses"
                self._problems[problem] = "give one of them another name"
            return
        self._meanings[name] = (value, user)
        if isinstance(value, ModuleType):
            line = f"import {value.__name__}"
            self._import(value.__name__, line if line == f"import {name}" else f"{line} as {name}")
        elif _is_of_ipython(value) and name in {"display", "get_ipython"}:
            problem = f"`{name}`, which {user} uses, is IPython's, and the ranks have no notebook"
            self._problems[problem] = "print or save instead; lines with `!` or `%` use it too"
        elif not is_constant(value) and (origin := find_origin(name, value)):
            self._import(origin[0], f"from {origin[0]} import {origin[1]} as {name}")
        else:
            part = _Part()
            try:
                self._write(name, value, part, user)
            except UnwritableError as error:
                self._refuse(name + error.path, error.value, user)
            except UsageError as error:
                self._problems[error.message] = error.hint
            self._parts[name] = part

    def write_args(self, args: Mapping[str, Any]) -> str:
        """The expression of the keyword arguments of a call."""
        items, user = [], "the call"
        for name, value in args.items():
            try:
                items.append(f"{name!r}: {write(value, partial(self._refer, _Part(), user))}")
            except UnwritableError as error:
                self._refuse(name + error.path, error.value, user)
        return "{" + ", ".join(items) + "}"

    def _refuse(self, name: str, value: object, user: str) -> None:
        kind = type(value)
        problem = (
            f"`{name}`, which {user} uses, is in the memory of this process, which the ranks do "
            f"not have ({kind.__module__}.{kind.__qualname__})"
        )
        of = (str(kind.__module__).partition(".")[0], kind.__name__)
        self._problems[problem] = _HINTS.get(
            of, "give float(…), int(…) or .tolist() of it" if of[0] == "numpy" else _MAKE_IT
        )

    def _refer(self, part: _Part, user: str, value: Any) -> str:
        """The expression of a module, class or function, which a part needs when it runs."""
        name = str(getattr(value, "__name__", ""))
        if isinstance(value, ModuleType):
            self._import(name, f"import {name}")
            name = name.partition(".")[0]
            self.add(name, sys.modules[name], user=user)
            return str(value.__name__)
        if origin := find_origin(name, value):
            return f"{self._refer(part, user, sys.modules[origin[0]])}.{origin[1]}"
        if not _has_source(value):
            raise UnwritableError(value)
        self.add(name, value, user=user)
        part.needs.add(name)
        return name

    def _write(self, name: str, value: Any, part: _Part, user: str) -> None:
        refer = partial(self._refer, part, user)
        call = write_class(value, refer) if isinstance(value, type) else None
        if call or not _has_source(value):
            part.text, part.made = f"{name} = {call or write(value, refer)}", True
            return
        source = find_source(value)
        if source.node.name != name:
            self.add(source.node.name, value, user=f"`{name}`")
            part.text, part.needs = f"{name} = {source.node.name}", {source.node.name}
            return
        for each in source.changes:
            problem = f"`{name}.{each}` was changed after the class was defined"
            self._problems[problem] = "make the change in the cell that defines the class"
        space, is_lazy = _find_space(value)
        self._imports |= {"from __future__ import annotations"} if is_lazy else set()
        _match_decorators(source.node, value, space)
        _keep_evaluated(source.node, value, space, refer)
        part.text = source.text()
        self._add_used(part, source.node, space, is_lazy=is_lazy or sys.version_info >= (3, 14))
        # import `a.b` where a source says `a.b.c`, of which a name gives only `a`
        for first, rest in re.findall(r"\b([A-Za-z_]\w*)((?:\.\w+)+)", part.text):
            module = space.get(first)
            path = module.__name__ + rest if isinstance(module, ModuleType) else ""
            while "." in path:
                self._imports |= {f"import {path}"} if path in sys.modules else set()
                path = path.rpartition(".")[0]

    def _add_used(
        self, part: _Part, node: Definition, space: Mapping[str, Any], *, is_lazy: bool
    ) -> None:
        """Add what the statement of a part uses, now or later."""
        at_once = {*names_at_definition(node, is_lazy=is_lazy)}
        part.calls = {each for one in node.decorator_list for each in names_at_definition(one)}
        for each in sorted({*_names(symtable.symtable(part.text, node.name, "exec"))} & {*space}):
            is_python = space[each] is vars(builtins).get(each)
            is_python = each in _BUILTIN if _is_of_ipython(space[each]) else is_python
            if not is_python and not each.startswith("__"):
                (part.needs if each in at_once else part.uses).add(each)
                self.add(each, space[each], user=f"`{node.name}`")

    def _import(self, module: str, line: str) -> None:
        self._imports.add(line)
        copy_module(module.partition(".")[0], self.files)

    def _order(self) -> list[str]:
        """The parts as they can run: each after what it needs and what that uses, unless the latter
        needs this one.
        """
        written: list[str] = []
        begun: list[str] = []

        def begin(name: str) -> None:
            if name in begun:
                return
            begun.append(name)
            for need in sorted(self._reach(name) - {name}):
                begin(need)
                for each in sorted(self._reach(need, uses=True)):
                    if not self._reach(each) & ({*begun} - {*written}):
                        begin(each)
            written.append(name)

        for each in self._parts:
            begin(each)
        return written

    def _reach(self, *names: str, uses: bool = False) -> set[str]:
        """Parts, and those that they need to run, or also those that they use."""
        found = [name for name in names if name in self._parts]
        for each in found:
            part = self._parts[each]
            others = part.needs | (part.uses if uses else set())
            found += sorted((others & self._parts.keys()) - {*found})
        return {*found}


def _has_source(value: Any) -> bool:
    """Whether a statement has defined it."""
    raw = unwrap(value) if callable(value) and not inspect.ismethod(value) else None
    is_function = isinstance(raw, FunctionType) and raw.__code__.co_name != "<lambda>"
    return isinstance(value, type) or is_function


def _is_of_ipython(value: object) -> bool:
    module = attribute(value, "__module__") or type(value).__module__
    if isinstance(function := attribute(value, "__func__", value), FunctionType):
        module = function.__globals__.get("__name__")  # its `open` says that it is Python's
    return str(module).partition(".")[0] in {"IPython", "ipykernel"}


def _find_space(value: Any) -> tuple[dict[str, Any], bool]:
    """The names that a function or class may use, and whether its annotations are not evaluated."""
    space = {**vars(builtins), **vars(sys.modules.get(value.__module__, builtins))}
    is_lazy = False
    for function in find_functions(value):
        space |= {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        is_lazy |= bool(function.__code__.co_flags & annotations.compiler_flag)
    return space, is_lazy


def _match_decorators(node: Definition, value: Any, space: Mapping[str, Any]) -> None:
    """Leave decorators out where the value is what they were given. Raises `UsageError` if it was
    wrapped without a decorator.
    """
    name, raw = node.name, inspect.unwrap(value)
    if raw is value and not isinstance(node, ast.ClassDef) and space.get(name) is not value:
        node.decorator_list = []
    elif raw is not value and not node.decorator_list:
        problem = f"`{name}` was wrapped by a call, which its source does not show"
        raise UsageError(problem, hint=f"write it as a decorator of `{name}`")


def _keep_evaluated(node: Definition, value: Any, space: Mapping[str, Any], refer: Refer) -> None:
    """Write default values and fields of a class as they are, where evaluating them again would
    give others. Raises `UsageError` for a name that has lost such a value.
    """
    name = node.name
    for place, key, what, now in find_evaluated(node, value):
        old = place[key]
        try:
            if not still_gives(old, now, {**space, **vars(value)}):
                place[key] = ast.parse(write(now, refer), mode="eval").body
        except UnwritableError as error:
            if isinstance(old, ast.Name | ast.Attribute):
                problem = (
                    f"`{ast.unparse(old)}` has changed since `{name}` was defined, and `{what}` of "
                    f"`{name}` still has the old value"
                )
                raise UsageError(problem, hint=f"define `{name}` again") from error


def _names(table: symtable.SymbolTable) -> Iterator[str]:
    """The names in a source that come from outside of it."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() if table.get_type() == "module" else symbol.is_global():
            yield symbol.get_name()
    for child in table.get_children():
        yield from _names(child)
