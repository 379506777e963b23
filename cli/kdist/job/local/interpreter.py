"""Which Python runs the agents and ranks of `kdist run`: one that `--python` names, that of the
active virtual environment (`VIRTUAL_ENV`), or the one that runs kdist.

Another environment than kdist's needs what the trainer needs, but not the trainer: it is found by a
link in the run folder, so that it is always of kdist's own version.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kdist.errors import KdistError, UsageError
from kdist.job.local.launch import FOR_TRAINING, check_torch
from kdist_trainer.formats.requirements import OF_IMAGE, REQUIREMENTS, find_lacks

VARIABLE: Final = "VIRTUAL_ENV"
NEEDED: Final = {**REQUIREMENTS, **OF_IMAGE}


@dataclass(frozen=True)
class Interpreter:
    """A Python; `origin` says what names it, and is empty for kdist's own."""

    path: str = sys.executable
    origin: str = ""

    def variables(self, root: Path, environment: Mapping[str, str]) -> dict[str, str]:
        """What its processes need in their environment to find the trainer, to which the run folder
        `root` gets a link.
        """
        trainer = find_spec("kdist_trainer")
        if not self.origin or trainer is None or not trainer.submodule_search_locations:
            return {}
        link = root / "python" / "kdist_trainer"
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(trainer.submodule_search_locations[0])
        own = environment.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([str(link.parent), *([own] if own else [])])}


OWN: Final = Interpreter()


def choose_interpreter(
    named: str | None, environment: Mapping[str, str]
) -> tuple[Interpreter, str]:
    """The Python for a run, and a sentence that says which it is and why; empty if it is kdist's
    own and nothing names another one.

    Args:
        named: what `--python` names, a Python or the folder of an environment.
        environment: the caller's environment.

    Raises:
        UsageError: there is no such Python.
        KdistError: it lacks what a training needs.
    """
    if named is not None:
        path = _find(Path(named).expanduser())
        if lacks := find_lacks(str(path), NEEDED):
            raise KdistError(f"--python: {path} {lacks}", next_command=_install(path))
        return Interpreter(str(path), "--python"), f"the ranks run in {path} (--python)"
    folder = environment.get(VARIABLE, "")
    path = Path(folder, "bin", "python").absolute()
    if not folder or Path(folder).resolve() == Path(sys.prefix).resolve() or not path.is_file():
        check_torch()
        return OWN, ""
    lacks = find_lacks(str(path), NEEDED)
    if not lacks:
        return Interpreter(str(path), VARIABLE), f"the ranks run in {path} ({VARIABLE})"
    if find_spec("torch") is None:
        raise KdistError(
            f"kdist run needs torch: {path} ({VARIABLE}) {lacks}", next_command=_install(path)
        )
    return OWN, (
        f"the ranks run in kdist's own environment, {sys.prefix}: {path} ({VARIABLE}) {lacks}"
    )


def _find(named: Path) -> Path:
    path = (named / "bin" / "python" if named.is_dir() else named).absolute()
    if not os.access(path, os.X_OK) or path.is_dir():
        raise UsageError(
            f"--python: {path} is no Python that can be run",
            hint="name one, or the folder of an environment: --python .venv",
        )
    return path


def _install(path: Path) -> str:
    packages = dict.fromkeys([*NEEDED.values(), *FOR_TRAINING])
    return shlex.join(["uv", "pip", "install", "--python", str(path), *packages])
