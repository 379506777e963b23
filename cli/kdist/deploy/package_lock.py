"""Locks the packages that a job's pods install: uv resolves them on this machine, for every
platform and Python that the trainer takes, and the job gets the version and the digests of each.

torch is left out, since the image has it. What was locked when the job was last applied stays, as
long as the job names the same packages: a second apply changes nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from kdist import render
from kdist.errors import KdistError
from kdist.spec import Install, TrainingJob
from kdist_trainer.formats.requirements import OLDEST_PYTHON

_SECONDS: Final = 120.0
_NEVER: Final = "sys_platform == 'never'"
_NAME: Final = re.compile("[A-Za-z0-9][-A-Za-z0-9._]*")


def lock_packages(
    job: TrainingJob, before: Mapping[str, Any] | None
) -> tuple[TrainingJob, list[str]]:
    """The job with a lock of its packages, if it installs any and has none, and a warning where
    that cannot be made. `before` is `spec.install` as it was last applied, or None. Raises
    `KdistError` if the packages exclude each other, or the index does not have one.
    """
    install = job.spec.install
    if install is None or install.lock:
        return job, []
    lock, problem = _known(job, install, before), ""
    wheels = install.wheels
    if not lock and wheels is not None and (install.index is None or wheels.url is not None):
        problem = "they are in a folder of wheels"
    elif not lock:
        lock, problem = _resolve(render.list_packages(job), install)
    if problem:
        return job, [
            f"the packages of spec.install are not locked ({problem}): pods that start later may "
            "get other versions"
        ]
    install = install.model_copy(update={"lock": lock})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"install": install})}), []


def _known(job: TrainingJob, install: Install, before: Mapping[str, Any] | None) -> list[str]:
    """The lock of the job as it was last applied, if it is one of what the job asks for now."""
    if not before or not isinstance(before.get("lock"), list):
        return []
    try:
        same = Install.model_validate({**before, "lock": []}, by_alias=True, by_name=False)
    except ValueError:
        return []  # written by another version
    if same != install:
        return []
    names = {_name(str(each)) for each in before["lock"]}
    wanted = {_name(each) for each in render.list_packages(job)}
    return [str(each) for each in before["lock"]] if wanted <= names else []


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    return re.sub("[-_.]+", "-", found[0].lower()) if found else ""


def _resolve(packages: list[str], install: Install) -> tuple[list[str], str]:
    """The packages with all that they need, each with version and digests; or why there is no
    such list.
    """
    uv = [found] if (found := shutil.which("uv")) else [sys.executable, "-m", "uv"]
    if not found and find_spec("uv") is None:
        return [], "uv is not installed on this machine"
    with tempfile.TemporaryDirectory() as folder:
        overrides = Path(folder, "overrides.txt")
        overrides.write_text(f"torch ; {_NEVER}\n")
        argv = [*uv, *("pip", "compile", "--universal", "--generate-hashes", "--no-header")]
        argv += ["--no-annotate", "--python-version", "{}.{}".format(*OLDEST_PYTHON)]
        argv += ["--overrides", str(overrides)]
        argv += ["--default-index", install.index] if install.index is not None else []
        try:
            done = subprocess.run(
                [*argv, "-"],
                input="\n".join(packages),
                capture_output=True,
                text=True,
                check=False,
                timeout=_SECONDS,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            return [], f"uv has not answered within {_SECONDS:.0f} s"
    if done.returncode:
        text = " ".join(done.stderr.replace("\N{MULTIPLICATION SIGN}", " ").split())[-600:]
        if "No solution found" in done.stderr and install.wheels is None:
            raise KdistError(
                f"spec.install.packages cannot be installed together: {text}",
                next_command="kdist explain spec.install",
            )
        return [], f"uv: {text}"
    joined = done.stdout.replace("\\\n", " ").splitlines()
    lines = [" ".join(line.split()) for line in joined if line and not line.startswith("#")]
    return [line for line in lines if _NEVER not in line], ""
