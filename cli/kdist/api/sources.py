"""The source of a function or class, and what of it no longer holds.

Source is found by Python's cache of lines, where notebooks keep their cells.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
from abc import ABCMeta
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from kdist.api.values import attribute, is_constant
from kdist.errors import UsageError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Source(NamedTuple):
    """The statement that has defined a function or class, its lines, and the names in a class that
    are no longer what the statement made them.
    """

    node: Definition
    lines: Sequence[str]
    changes: Sequence[str]

    def text(self) -> str:
        """The statement as it is written, or as its tree says where that is not the same."""
        text = "".join(self.lines)
        with suppress(SyntaxError):  # a text of several lines that begins left of its block
            text = textwrap.dedent(text) if text[:1].isspace() else text
            if ast.dump(ast.parse(text).body[0]) == ast.dump(self.node):
                return text.strip("\n")
        return ast.unparse(self.node)


def find_functions(value: object) -> Iterator[FunctionType]:
    """The function, or a class's methods, without their decorators."""
    for each in [*vars(value).values()] if isinstance(value, type) else [value]:
        inner = unwrap(attribute(each, "fget") or attribute(each, "__func__", each))
        if isinstance(inner, FunctionType):
            yield inner


def unwrap(value: Any) -> Any:
    """What decorators have wrapped, as far as the value lets that be found."""
    with suppress(Exception):  # of its own `__getattr__`
        return inspect.unwrap(value)
    return value


def find_source(value: Any) -> Source:
    """The source of a function or class. Raises `UsageError`."""
    is_class = isinstance(value, type)
    codes = [each.__code__ for each in find_functions(value)]
    name = value.__name__ if is_class else codes[0].co_name
    found = []
    for file, lines, line in _find_lines(value, codes):
        nodes: list[ast.AST] = []
        with suppress(SyntaxError):
            nodes += ast.walk(ast.parse("".join(lines)))
        for node in nodes:
            if not isinstance(node, Definition) or node.name != name:
                continue
            first = _first_line(node)
            last = node.end_lineno or first
            if isinstance(node, ast.ClassDef):
                if is_class and (not line or first <= line <= last):
                    changes = [*_find_class_changes(node, value, file)]
                    found.append(Source(node, lines[first - 1 : last], changes))
            elif not is_class and line == first:
                found.append(Source(node, lines[first - 1 : last], []))
    if found:  # of several classes of this name, the one that is as its source says
        return min(found, key=lambda each: bool(each.changes))
    raise UsageError(
        f"the source of `{name}` is not known to this process",
        hint="write it as a `def` or `class` statement in a file, or in a cell of a notebook",
    )


def _find_lines(value: Any, codes: list[CodeType]) -> Iterator[tuple[str, list[str], int]]:
    """Files, their lines, and the line in them that belongs to it; 0 if that is not known."""
    for each in codes:
        if lines := linecache.getlines(each.co_filename):
            yield each.co_filename, lines, each.co_firstlineno
        for cell in () if lines else _find_magic_cells():
            if each in find_codes(cell, each.co_flags & annotations.compiler_flag):
                yield each.co_filename, cell.splitlines(keepends=True), each.co_firstlineno
    if isinstance(value, type):  # that has no method of its own: the latest of its name
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        for name in [file] if file else reversed([*linecache.cache]):
            yield name, linecache.getlines(name), 0
        yield from (("", cell.splitlines(keepends=True), 0) for cell in _find_magic_cells())


def _first_line(node: Definition) -> int:
    return min(each.lineno for each in [node, *node.decorator_list])


def _find_magic_cells() -> Iterator[str]:
    """What cells run below a line such as `%%time`, which gives it a file name without lines."""
    for file in reversed([*linecache.cache]):
        text = "".join(linecache.getlines(file))
        if text.startswith("get_ipython().run_cell_magic("):
            with suppress(SyntaxError):
                match ast.parse(text).body:
                    case [ast.Expr(ast.Call(args=[_, _, ast.Constant(str(cell))]))]:
                        yield cell


def find_codes(text: str, flags: int = 0) -> set[CodeType]:
    """The code of all functions of a source, which is compiled with these features."""
    found = []
    with suppress(SyntaxError):
        found.append(compile(text, "", "exec", flags, dont_inherit=True))
    for code in found:
        found += [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*found}


def _find_class_changes(node: ast.ClassDef, value: type, file: str) -> Iterator[str]:
    bases = [each for each in value.__mro__[:-1] if each.__module__ != "typing"]
    plain = (  # no decorator, metaclass or base makes other things of what the statement says
        type(value) in {type, ABCMeta}
        and not (node.decorator_list or node.keywords or tuple in bases)
        and all("__init_subclass__" not in vars(each) for each in bases)
    )
    lines = range(node.lineno, (node.end_lineno or 0) + 1)
    codes = {each.__code__ for each in find_functions(value)}
    own = {each for each in codes if each.co_filename == file and each.co_firstlineno in lines}
    return find_changes(node.body, vars(value), own if plain else None, plain=plain)


def find_evaluated(node: Definition, value: Any) -> Iterator[tuple[Any, Any, str, Any]]:
    """The default values of a function or of methods, and the fields that a class computes: where
    each is in the tree, as a container and a key, its name, and the value that it has got. Raises
    `UsageError` if a function was given others.
    """
    functions = {each.__code__.co_firstlineno: each for each in find_functions(value)}
    for each in node.body if isinstance(node, ast.ClassDef) else [node]:
        match each:
            case ast.FunctionDef(name, args) | ast.AsyncFunctionDef(name, args):
                function = functions.get(_first_line(each))
                defaults = getattr(function, "__defaults__", None) or ()
                if function and len(defaults) != len(args.defaults):
                    problem = f"the default values of `{name}` were changed after it was defined"
                    raise UsageError(problem, hint=f"define `{name}` again")
                named = [*args.posonlyargs, *args.args][-len(defaults) :]
                for key, (arg, now) in enumerate(zip(named, defaults, strict=False)):
                    yield args.defaults, key, arg.arg, now
                keywords = getattr(function, "__kwdefaults__", None) or {}
                for key, arg in enumerate(args.kwonlyargs):
                    if args.kw_defaults[key] is not None and arg.arg in keywords:
                        yield args.kw_defaults, key, arg.arg, keywords[arg.arg]
            case ast.Assign([ast.Name(name)], expression) | ast.AnnAssign(
                ast.Name(name), _, ast.expr() as expression
            ):
                kinds = {type(part) for part in ast.walk(expression)}
                is_computed = ast.Name in kinds and ast.Call not in kinds  # such as `field(…)`
                if is_computed and is_constant(now := vars(value).get(name, ...)):
                    yield vars(each), "value", name, now


def still_gives(expression: ast.expr, value: Any, space: Mapping[str, Any]) -> bool:
    """Whether an expression has this value now, as far as that is known without evaluating it."""
    with suppress(ValueError):
        literal = ast.literal_eval(expression)
        return type(literal) is type(value) and is_constant(value) and bool(literal == value)
    first, *rest = ast.unparse(expression).split(".")
    now = space.get(first, space)
    for name in rest:
        now = attribute(now, name, space)
    is_same = now is value or (type(now) is type(value) and is_constant(now) and now == value)
    return is_same or not any(isinstance(each, ast.Name) for each in ast.walk(expression))


def names_at_definition(node: ast.AST, *, is_lazy: bool = False) -> Iterator[str]:
    """Names that a definition evaluates, and not what it has defined.

    Args:
        node: of the definition, or of a part of it.
        is_lazy: annotations are not evaluated.
    """
    if isinstance(node, ast.Name):
        yield node.id
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for name, part in ast.iter_fields(node):
        later = (name == "body" and is_function) or (name in {"annotation", "returns"} and is_lazy)
        for each in part if isinstance(part, list) else [part]:
            if isinstance(each, ast.AST) and not later:
                yield from names_at_definition(each, is_lazy=is_lazy)


def _walk(nodes: Iterable[ast.AST], *, is_inner: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes, and whether each is inside a function or class, which has names of its own."""
    for node in nodes:
        yield node, is_inner
        has_names = isinstance(node, Definition | ast.Lambda)
        yield from _walk(ast.iter_child_nodes(node), is_inner=is_inner or has_names)


def find_changes(
    body: Sequence[ast.stmt],
    names: Mapping[str, Any],
    codes: Container[CodeType] | None,
    *,
    plain: bool = False,
) -> Iterator[str]:
    """Names that no longer have what these statements, which ran once, gave them.

    Args:
        body: the statements.
        names: what there is now.
        codes: of the functions that the statements define; None if others may stand for them.
        plain: whether each name has exactly what the statements say, and there is no other.
    """
    bound: Counter[str] = Counter()  # what is bound twice, or by a function, may change
    for node, is_inner in _walk(body):
        match node:
            case ast.Attribute(ast.Name("self"), _, ast.Store()):
                pass  # of an instance
            case ast.Attribute(_, name, ast.Store()):
                bound[name] += 1
            case ast.Global(several):
                bound.update(several * 2)
            case ast.Name(name, ast.Store()) if not is_inner:
                bound[name] += 1
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name) if (
                not is_inner
            ):
                bound[name] += 1
            case ast.alias(name, asname) if not is_inner:
                bound[asname or name.partition(".")[0]] += 1
    once = {name: names[name] for name in bound if bound[name] == 1 and name in names}
    for node in body:
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(
                ast.Name(name), _, ast.expr() as value
            ) if name in once:
                with suppress(ValueError):
                    literal, now = ast.literal_eval(value), once[name]
                    differs = literal != now if is_constant(now) else plain
                    if differs and literal not in ([], {}):  # which is filled later
                        yield name
            case ast.FunctionDef(name, decorator_list=[]) if name in once and codes is not None:
                function = attribute(once[name], "__func__", once[name])
                if attribute(function, "__code__") not in codes:
                    yield name
            case ast.ClassDef(name, decorator_list=[]) if isinstance(once.get(name), type):
                inner = find_changes(node.body, vars(once[name]), None if plain else codes)
                yield from (f"{name}.{each}" for each in inner)
    for name, now in names.items() if plain else ():
        is_other = isinstance(now, FunctionType) and now.__code__ not in (codes or ())
        if name not in bound and (is_other or (is_constant(now) and not name.startswith("_"))):
            yield name
