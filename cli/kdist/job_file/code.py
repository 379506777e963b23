"""Checks the user's code that a job names: the code folder, the script, the module and the class of
its workload. Python files are only parsed, never imported; what cannot be decided so is accepted.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, NamedTuple

from kdist.errors import KdistError, Problem
from kdist.job_file import resolve_path
from kdist.job_file.folder import HINT, list_folder
from kdist.job_file.problems import locate
from kdist.job_file.yaml_parser import YamlNode, split_lines
from kdist.spec import TrainingJob
from kdist.spec.reference import show

# here: `kdist run`; cluster: only what is sent to it; either: what is in reach of the job file
Use = Literal["here", "cluster", "either"]

REQUIRED: Final = ("model", "dataset", "loss")  # of a `kdist_trainer.workload.Workload`
_MAX_BYTES: Final = 4 * 1024 * 1024
_DYNAMIC: Final = {"globals", "exec", "eval", "setattr", "vars"}  # may define names that we miss


class _Field(NamedTuple):
    """A field of the job file that names code."""

    tree: YamlNode
    path: tuple[str | int, ...]

    def problem(self, message: str, *, near: str = "", hint: str = "") -> Problem:
        mark = locate(self.tree, self.path).value
        return mark.problem(message, path=show(self.path), suggestion=near, hint=hint)

    def reference(self) -> str:
        """The field and its place, for problems of the file that it names. `kdist run SCRIPT` has
        no job file.
        """
        place = locate(self.tree, self.path)
        mark = place.value
        if place.node is not None and place.node.text == mark.source:
            return "correct it; nothing has been started"
        shown = f"{mark.source}:{mark.line}:{mark.column}" if mark.line else mark.source
        return f"{show(self.path)} ({shown}) names this file"

    @property
    def module(self) -> str:
        """The module as the field writes it; empty if the field cannot be read."""
        node = locate(self.tree, self.path).node
        return node.text.partition(":")[0] if node is not None else ""


def check_code(tree: YamlNode, job: TrainingJob, *, base: Path, use: Use) -> list[Problem]:
    """Every problem of the code and data that a job names, by paths that start from `base`; `use`
    is what the job is read for.
    """
    problems: list[Problem] = []
    for field, found in _checks(tree, job, base, use):
        try:
            problems += found
        except OSError as error:
            problems.append(field.problem(f"cannot read {error.filename}: {error.strerror}"))
        except KdistError as error:
            message = error.message.removeprefix("spec.code: ")
            problems.append(field.problem(message, hint=error.hint))
    return problems


def _checks(
    tree: YamlNode, job: TrainingJob, base: Path, use: Use
) -> Iterator[tuple[_Field, Iterator[Problem]]]:
    """The fields that name code or data, each with its check. What is in the folder of `spec.code`
    is checked only if there is one.
    """
    spec = job.spec
    if use == "here":
        for index, data in enumerate(spec.data):
            if data.path is not None:
                field = _Field(tree, ("spec", "data", index, "path"))
                yield field, _check_data(field, data.path, base)
    folder = None
    if spec.code is not None and (spec.code.config_map or spec.code.claim):
        if use == "here":
            field = _Field(tree, ("spec", "code"))
            what = (
                f"ConfigMap {spec.code.config_map}"
                if spec.code.config_map
                else f"claim {spec.code.claim}"
            )
            problem = field.problem(
                f"is the {what} of a cluster, which `kdist run` does not read",
                hint="--set spec.code=FOLDER names the same code on this machine",
            )
            yield field, iter([problem])
        return
    if spec.code is not None and spec.code.url is not None:
        return  # what is there is known when it is fetched
    if spec.code is not None and spec.code.path is not None:
        folder = resolve_path(base, spec.code.path)
        field = _Field(tree, ("spec", "code"))
        yield field, _check_folder(field, spec.code.path, folder)
        if not _is_folder(folder):
            return
        if use != "here":
            yield field, _check_links(field, spec.code.path, folder)
    if folder is None and use == "cluster":
        return  # the code is in the image
    if spec.script is not None and spec.script.path is not None:
        field = _Field(tree, ("spec", "script", "path"))
        in_image = folder is None
        yield field, _check_script(field, spec.script.path, folder or base, in_image, use)
        if folder is not None and use == "cluster":
            yield field, _check_sent(field, resolve_path(folder, spec.script.path), folder)
    modules = []
    if spec.script is not None and spec.script.module is not None:
        modules.append((("spec", "script", "module"), spec.script.module))
    if spec.train is not None and ":" in spec.train.workload:
        modules.append((("spec", "train", "workload"), spec.train.workload))
    for path, text in modules:
        name, _, class_name = text.partition(":")
        field = _Field(tree, path)
        yield field, _check_module(field, name, class_name, folder, base, use)
        if folder is not None and use == "cluster":
            yield field, _check_sent(field, _module_file(folder, name), folder)


def _check_folder(field: _Field, name: str, folder: Path) -> Iterator[Problem]:
    if not folder.is_dir():
        reason = f"{folder} is not a folder" if folder.exists() else f"there is no {folder}"
        near = _near_path(folder, folders=True)
        yield field.problem(reason, near=near, hint=_relative(name))


def _check_links(field: _Field, name: str, folder: Path) -> Iterator[Problem]:
    for each, reason in list_folder(folder, shown=name).refused:
        yield field.problem(f"{name}/{each} {reason}", hint=HINT)


def _check_sent(field: _Field, path: Path | None, folder: Path) -> Iterator[Problem]:
    """Check that a file of the code folder is among those that are sent."""
    if path is None or not path.is_file() or not path.is_relative_to(folder):
        return
    sent = {each.path for each in list_folder(folder, shown="").files}
    if path.resolve() not in sent:
        yield field.problem(
            f"{_display_path(path)} is left out of what is sent to the cluster",
            hint="`kdist validate -v` says why; `!NAME` in .kdistignore sends what git ignores",
        )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _relative(path: str) -> str:
    return "" if Path(path).is_absolute() else "the path is relative to the job file"


def _near_path(path: Path, *, folders: bool) -> str:
    """Name of a neighbor with a similar name; empty if there is none."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.is_dir() == folders]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1, cutoff=0.5)
    return near[0] if near else ""


def _check_data(field: _Field, name: str, base: Path) -> Iterator[Problem]:
    path = resolve_path(base, name)
    if not path.exists():
        near = _near_path(path, folders=True) or _near_path(path, folders=False)
        yield field.problem(f"there is no {path}", near=near, hint=_relative(name))


def _check_script(
    field: _Field, name: str, folder: Path, in_image: bool, use: Use
) -> Iterator[Problem]:
    path = resolve_path(folder, name)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            yield field.problem(
                f"{path} is a folder without __main__.py", hint="name the script in it"
            )
    elif path.is_file():
        yield from _parse(path, field)[1]
    elif not (in_image and use == "either"):
        hint = "the path is relative to the job file" if in_image else "it is relative to spec.code"
        near = _near_path(path, folders=False)
        yield field.problem(
            f"there is no {path}", near=str(Path(name).with_name(near)) if near else "", hint=hint
        )


def _check_module(
    field: _Field, name: str, class_name: str, folder: Path | None, base: Path, use: Use
) -> Iterator[Problem]:
    roots = [each for each in (folder, None if use == "cluster" else base) if each is not None]
    path = next((found for root in roots if (found := _module_file(root, name))), None)
    if path is not None:
        tree, problems = _parse(path, field)
        yield from problems
        if tree is not None and class_name:
            yield from _check_class(field, tree, class_name, path)
        return
    top = name.partition(".")[0]
    inside = any((root / top / "__init__.py").is_file() for root in roots)
    near = _near_module(roots, name)
    # elsewhere it may be installed in the image
    if inside or (near and not _is_installed(top)) or (use == "here" and not _is_installed(top)):
        where = " or ".join(str(root) for root in roots)
        near = f"{near}:{class_name}" if near and class_name else near
        hint = "" if near else "put it there, or name its folder in spec.code"
        yield field.problem(f"there is no module `{name}` in {where}", near=near, hint=hint)


def _module_file(root: Path, name: str) -> Path | None:
    path = root.joinpath(*name.split("."))
    for each in (path / "__init__.py", path.with_name(f"{path.name}.py")):
        if each.is_file():
            return each
    return None


def _near_module(roots: Iterable[Path], name: str) -> str:
    head, _, last = name.rpartition(".")
    for root in roots:
        folder = root.joinpath(*head.split(".")) if head else root
        try:
            names = [each.stem for each in folder.iterdir() if each.suffix == ".py"]
        except OSError:
            continue
        near = get_close_matches(last, names, n=1)
        if near:
            return f"{head}.{near[0]}" if head else near[0]
    return ""


def _is_installed(top: str) -> bool:
    try:
        return find_spec(top) is not None
    except (ImportError, ValueError):
        return True  # cannot be decided


def _parse(path: Path, field: _Field) -> tuple[ast.Module | None, list[Problem]]:
    """The syntax tree of a Python file, or the problem that Python would report."""
    try:
        if path.stat().st_size > _MAX_BYTES or path.suffix not in ("", ".py"):
            return None, []
        data = path.read_bytes()
    except OSError as error:
        return None, [field.problem(f"cannot read {path}: {error.strerror}")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(data, filename=str(path)), []
    except SyntaxError as error:
        lines = split_lines(data.decode("utf-8", "replace"))
        line = min(max(error.lineno or 1, 1), len(lines))
        column = min(max(error.offset or 1, 1), len(lines[line - 1]) + 1)
        width = 1
        if error.end_lineno == line and error.end_offset:
            width = max(1, error.end_offset - column)
        found = Problem(
            _display_path(path),
            line,
            column,
            "",
            f"not valid Python: {error.msg}",
            hint=field.reference(),
            width=width,
        )
        return None, [found.with_excerpt(lines)]
    except (ValueError, RecursionError, MemoryError):
        return None, [field.problem(f"{path} is not Python source")]


def _display_path(path: Path) -> str:
    """The path relative to the working directory if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _check_class(field: _Field, tree: ast.Module, name: str, path: Path) -> Iterator[Problem]:
    classes = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
    found = classes.get(name)
    if found is None:
        if not _may_define(tree, name):
            near = get_close_matches(name, classes, n=1)
            listed = ", ".join(classes)
            yield field.problem(
                f"{_display_path(path)} has no class `{name}`",
                near=f"{field.module}:{near[0]}" if near else "",
                hint="" if near else f"its classes: {listed}" if listed else "it has no class",
            )
        return
    defined = _defined(found, classes, tree)
    if defined is None:
        return
    missing = [each for each in REQUIRED if each not in defined]
    if missing:
        yield Problem(
            _display_path(path),
            found.lineno,
            found.col_offset + 1,
            "",
            f"class `{name}` lacks {', '.join(f'{each}()' for each in missing)}",
            hint=f"every workload needs {', '.join(REQUIRED)}; {field.reference()}",
        ).with_excerpt(split_lines(path.read_text("utf-8", "replace")))


def _may_define(tree: ast.Module, name: str) -> bool:
    """Whether a module may define a name at all, also by an import or at run time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in {*_DYNAMIC, name}:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name.split(".")[0]) in ("*", name):
            return True
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in ("__getattr__", name):
            return True
    return False


def _defined(
    found: ast.ClassDef, classes: dict[str, ast.ClassDef], tree: ast.Module, depth: int = 0
) -> set[str] | None:
    """The names that a workload's class defines, also by its bases in the same module; None if it
    cannot be known.
    """
    if found.decorator_list or found.keywords or depth > 20:
        return None
    names: set[str] = set()
    for statement in ast.walk(found):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
            names.add(statement.id)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {each.asname or each.name for each in statement.names}
    for base in found.bases:
        if isinstance(base, ast.Name) and base.id in classes and base.id != found.name:
            inherited = _defined(classes[base.id], classes, tree, depth + 1)
            if inherited is None:
                return None
            names |= inherited
        elif not _is_workload(base, tree):
            return None
    return names


def _is_workload(base: ast.expr, tree: ast.Module) -> bool:
    """Whether a base is kdist_trainer's Workload, by its import in this module."""
    return isinstance(base, ast.Name) and any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("kdist_trainer")
        and any(
            each.name == "Workload" and (each.asname or each.name) == base.id for each in node.names
        )
        for node in tree.body
    )
