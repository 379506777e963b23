"""`python -m kdist_trainer.install`: installs the trainer and packages into a folder.

Exit codes are those of `kdist_trainer.config.Exit`, which cannot be imported yet: 0 done, 64 the
image lacks something, 65 pip cannot install a package, 203 the index cannot be reached.
"""

from __future__ import annotations

import argparse
import os
import re
import site
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kdist_trainer import log
from kdist_trainer.formats import stamp
from kdist_trainer.formats.json_text import encode_json

CONFIG, DATA, STORAGE = 64, 65, 203
OLDEST: Final = (3, 11)
_CAUSES: Final = {CONFIG: "config", DATA: "data", STORAGE: "storage"}
_BY_NETWORK: Final = re.compile(
    r"Retrying \(|ConnectionError|Max retries|Connection (refused|reset|broken)|timed out|"
    r"Name or service not known|name resolution|5\d\d (Server|Service|Bad Gateway|Gateway)"
)
_MOST_BYTES: Final = 3000  # of a message: Kubernetes reads 4096 of the whole record


class InstallError(Exception):
    """The installation failed; `code` is the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def install(folder: Path, archive: Path, requirements: Path, options: Sequence[str]) -> None:
    """Install the trainer from its archive, and what `requirements` lists. Raises `InstallError`
    or `OSError`.
    """
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:2]))
        raise InstallError(CONFIG, f"Python {found} of the image is too old: 3.11 is needed")
    packages = folder / "site"
    packages.mkdir(parents=True, exist_ok=True)
    python = make_environment(folder, packages)
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(packages)
    # at the same time as pip, which waits for the network
    with subprocess.Popen(
        [*(sys.executable, "-m", "compileall", "-q", "-j", "2"), str(packages / "kdist_trainer")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ):
        _run_pip(python, [*options, "--requirement", str(requirements)])
    _check_imports(packages)


def make_environment(folder: Path, packages: Path) -> Path:
    """An environment whose packages are in `packages`, and which sees those of this Python; its
    Python. The module venv does the same, but Debian's images have it only in part.
    """
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    root = folder / "environment"
    for each in (root / "bin", root / "lib" / version):
        each.mkdir(parents=True, exist_ok=True)
    base = Path(getattr(sys, "_base_executable", "") or sys.executable)
    (root / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = true\n"
        f"version = {'.'.join(map(str, sys.version_info[:3]))}\n"
    )
    python, own = root / "bin" / "python", root / "lib" / version / "site-packages"
    if not python.is_symlink():
        python.symlink_to(base)
        own.symlink_to(packages)
        (root / "lib64").symlink_to("lib")
    if sys.prefix != sys.base_prefix:  # the image's Python is one of an environment itself
        (packages / "image.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def _run_pip(python: Path, arguments: Sequence[str]) -> None:
    pip = [str(python), "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
        raise InstallError(CONFIG, "the image has no pip: name an image that has")
    quiet = ("--no-input", "--disable-pip-version-check", "--no-cache-dir", "--progress-bar=off")
    # of the image: this program's archive, and what NVIDIA's images pin
    dropped = (
        {"PYTHONPATH", "PIP_CONSTRAINT"} if "--require-hashes" in arguments else {"PYTHONPATH"}
    )
    environment = {name: each for name, each in os.environ.items() if name not in dropped}
    done = subprocess.run(
        [*pip, "install", *quiet, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("ERROR:", "    "))]
        text = " ".join(" ".join(lines or done.stderr.splitlines()[-3:]).split())
        unreachable = _BY_NETWORK.search(done.stderr)
        raise InstallError(STORAGE if unreachable else DATA, f"pip: {text}"[:_MOST_BYTES])


def _check_imports(packages: Path) -> None:
    """Check that the image has what no job is given."""
    program = "import importlib.util as u; print(*(n for n in names if not u.find_spec(n)))"
    found = subprocess.run(
        [sys.executable, "-c", f"names = 'torch', 'numpy'; {program}"],
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if found:
        raise InstallError(CONFIG, f"the image lacks {found}: name an image that has both")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one installation; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.install")
    parser.add_argument("--folder", type=Path, required=True, help="gets the packages, in site/")
    parser.add_argument("--archive", type=Path, required=True, help="the trainer, as a zip file")
    parser.add_argument("--requirements", type=Path, required=True, help="what pip installs")
    parser.add_argument("--termination-message", type=Path, help="file for the exit record")
    given, options = parser.parse_known_args(arguments)
    begun = time.monotonic()
    try:
        install(given.folder, given.archive, given.requirements, options)
    except (InstallError, OSError, zipfile.BadZipFile) as error:
        code = error.code if isinstance(error, InstallError) else STORAGE
        message = f"spec.install: {error}"
        log.error("packages-failed", message=message, code=code)
        record = {"code": code, "cause": _CAUSES[code], "outcome": "failed", "message": message}
        if given.termination_message is not None:
            text = encode_json(stamp("exit.json", {**record, "time": round(time.time(), 3)}))
            given.termination_message.write_text(text)
        return code
    count = sum(1 for _ in (given.folder / "site").glob("*.dist-info"))
    took = time.monotonic() - begun
    message = f"the trainer and {count} packages in {took:.1f} s"
    log.event("packages-installed", message=message)
    return 0


if __name__ == "__main__":
    sys.exit(main())
