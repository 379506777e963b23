"""The git commit that a job was started or applied from: that of the folder of its file.

Only git's own settings and the user's are used. Those of the repository, which may have come from
anywhere, can make git run programs: the comparison runs in an empty folder with a repository of its
own, which borrows the objects and the index.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

_SECONDS: Final = 5.0
_FIND: Final = ("rev-parse", "HEAD", "--show-toplevel", "--git-path", "objects", "--git-path")


def find_commit(folder: Path) -> str:
    """The commit, with `-dirty` if a tracked file differs from it; empty if that is not known: git
    is missing or takes long, or the folder is in no repository of this user.
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        found = _run([*_FIND, "index"], folder, plain)
        commit, top, objects, index = (
            found.stdout.splitlines() if not found.returncode else [""] * 4
        )
        if not commit:
            return ""
        with TemporaryDirectory(prefix="kdist-") as own:
            (Path(own) / "refs").mkdir()
            (Path(own) / "HEAD").write_text(f"{commit}\n")
            borrowed = {
                "GIT_DIR": own,
                "GIT_OBJECT_DIRECTORY": str(folder / objects),
                "GIT_INDEX_FILE": str(folder / index),
                "GIT_WORK_TREE": top,
                "GIT_OPTIONAL_LOCKS": "0",
            }
            compare = ["diff", "--quiet", "--no-ext-diff", "--no-textconv"]
            compare += ["--ignore-submodules=all", "HEAD"]
            code = _run(compare, Path(top), {**plain, **borrowed}).returncode
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return {0: commit, 1: f"{commit}-dirty"}.get(code, "")


def _run(
    arguments: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
