"""Where the ranks find what a notebook imports: installed modules have a name, and the user's own
are copied.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import decode_source, find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

from kdist.api import DIALOG
from kdist.api.sources import find_changes, find_codes
from kdist.api.values import attribute
from kdist.errors import UsageError

_TEXTS = {".py", ".pyc", ".pyi", ".ipynb", ".md", ".rst", ".typed"}
_OURS = {"kdist", "kdist_controller", "kdist_trainer"}


def find_origin(name: str, value: object) -> tuple[str, str] | None:
    """Module and name by which every process can import a value; None if there are none."""
    own = (str(attribute(value, "__module__")), str(attribute(value, "__qualname__")))
    others = [] if isinstance(value, type | FunctionType) else sorted(sys.modules, key=len)
    for module, original in [own, *((each, name) for each in others)]:
        found = sys.modules.get(module)
        is_file = module != "__main__" and getattr(found, "__spec__", None) is not None
        if is_file and getattr(found, "__dict__", {}).get(original) is value:
            return module, original
    return None


def copy_module(top: str, files: dict[str, str]) -> None:
    """Add the texts of a module or package, and of those that it imports, to those of the files;
    unless it is installed.
    """
    known = any(each.partition("/")[0] in {top, f"{top}.py"} for each in files)
    for root, file in () if known else _find_own(top):
        name = file.relative_to(root).as_posix()
        with suppress(SyntaxError, UnicodeDecodeError):  # which no rank could import either
            try:
                files[name] = decode_source(file.read_bytes())
            except OSError as error:
                problem = f"cannot read {file}: {error.strerror}"
                raise UsageError(problem, hint="make it readable, or do not import it") from error
            tree = ast.parse(files[name])
            _warn_of_changes(name, files[name], tree)
            for each in {*_list_imports(tree)}:
                copy_module(each, files)


def _find_own(top: str) -> Iterator[tuple[Path, Path]]:
    """The files of a module that is not installed, each with the folder that it is imported from.
    A package of another folder that has data or compiled parts counts as installed, since it is
    more than its text.
    """
    spec = getattr(sys.modules.get(top), "__spec__", None)
    with suppress(ImportError, ValueError):
        spec = spec or find_spec(top)
    places = (spec.submodule_search_locations or [spec.origin]) if spec and top not in _OURS else []
    for place in (Path(each).absolute() for each in places if each):
        installed = {"site-packages", "dist-packages"} & {*place.parts}
        if installed or place.is_relative_to(sysconfig.get_path("stdlib")):
            continue
        is_here = place.resolve().is_relative_to(Path.cwd())
        inside = [*place.rglob("*.py" if is_here else "*")] if place.is_dir() else [place]
        if is_here or all(each.is_dir() or each.suffix in _TEXTS for each in inside):
            files = (each for each in inside if each.suffix == ".py" and each.is_file())
            yield from ((place.parent, each) for each in files)


def _list_imports(tree: ast.AST) -> Iterator[str]:
    """The top modules that a source imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _warn_of_changes(file: str, text: str, tree: ast.Module) -> None:
    """Warn if this process does not have what the ranks will read."""
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    names: Any = vars(sys.modules[name]) if name in sys.modules else {}
    for each in find_changes(tree.body, names, find_codes(text)):
        DIALOG.warn(
            f"`{name}.{each}` is not what {file} says, which the ranks import: change the file, or "
            "import it again"
        )
