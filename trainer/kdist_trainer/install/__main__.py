"""`python -m kdist_trainer.install`: installs the trainer and packages into a folder.

Exit codes are those of `kdist_trainer.config.Exit`, which cannot be imported yet: 0 done, 64 the
image lacks something or a folder cannot be read or written, 65 pip cannot install a package, 203
the index cannot be reached or storage fails.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import platform
import re
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from kdist_trainer import log
from kdist_trainer.formats import stamp
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.requirements import OF_IMAGE, find_lacks

CONFIG, DATA, STORAGE = 64, 65, 203
_CAUSES: Final = {CONFIG: "config", DATA: "data", STORAGE: "storage"}
_MAY_PASS: Final = re.compile(
    r"No space left|quota exceeded|Retrying \(|ConnectionError|Max retries|timed out|"
    r"Connection (refused|reset|broken)|Name or service not known|name resolution|"
    r"5\d\d (Server|Service|Bad Gateway|Gateway)"
)
_MOST_BYTES: Final = 3000  # of a message: Kubernetes reads 4096 of the whole record
_UNFINISHED: Final = ".unfinished-"
_NOTE: Final = "files.sha256"
"""Of a tree that is whole: the digest of the names and sizes of its files."""
_NO_ACCESS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ABANDONED_SECONDS: Final = 86_400.0
_LONGEST_WAIT: Final = 900.0


class InstallError(Exception):
    """The installation failed; `code` is the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Installation:
    """What is to be installed, and the folder, `tree`, that gets it."""

    def __init__(self, given: argparse.Namespace, options: Sequence[str]) -> None:
        self._given, self._options = given, options
        self._root: Path = given.cache or given.folder
        self.tree = self._root / self._digest()

    def _digest(self) -> str:
        """Of what is asked for, and of the image: its Python, and what need not be installed."""
        # by names, since the metadata of a package may be damaged
        libraries = sorted(info.name for each in sys.path for info in Path(each).glob("*-info"))
        system = (sys.version, sys.prefix, sysconfig.get_platform(), *platform.libc_ver())
        asked = [*self._options, *self._given.wheels, *system, *libraries]
        files = self._given.archive.read_bytes() + self._given.requirements.read_bytes()
        return sha256(os.fsencode("\0".join(asked)) + files).hexdigest()[:32]

    def run(self) -> bool:
        """Install, unless a whole tree is there; whether one was. Raises `InstallError` or
        `OSError`.
        """
        if _is_whole(self.tree):
            return True
        self._root.mkdir(parents=True, exist_ok=True)
        with self._one_at_a_time() as is_locked:
            if _is_whole(self.tree):
                return True
            # the host is named too, since a lock may hold on one node alone
            own = f"{self.tree.name}-{platform.node()}@" if is_locked else ""
            for each in self._root.glob(f"{_UNFINISHED}*"):  # of installations that were killed
                with suppress(OSError):
                    is_own = is_locked and each.name.startswith(_UNFINISHED + own)
                    if is_own or time.time() - each.stat().st_mtime >= _ABANDONED_SECONDS:
                        shutil.rmtree(each)
            with tempfile.TemporaryDirectory(
                prefix=_UNFINISHED + own, dir=self._root, ignore_cleanup_errors=True
            ) as place:
                built, damaged = Path(place, "built"), Path(place, "damaged")
                self._build(built, Path(place, "environment"))
                if not _is_whole(self.tree):  # none, or another pod's that was first
                    with suppress(FileNotFoundError):
                        self.tree.rename(damaged)
                    with suppress(OSError):
                        built.rename(self.tree)
            if not _is_whole(self.tree):
                raise OSError(f"{self.tree} has changed while it was installed")
            return False

    @contextmanager
    def _one_at_a_time(self) -> Iterator[bool]:
        """Wait for a pod that installs the same; whether the lock is held. Where the file system
        has no locks, or one takes too long, each installs for itself, and all take the first tree
        that is whole.
        """
        is_locked = False
        with self.tree.with_suffix(".lock").open("wb") as file:
            last = time.monotonic() + _LONGEST_WAIT
            # all that wait go on at once when the tree is there
            while time.monotonic() < last and not _is_whole(self.tree):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_locked = True
                    break
                except BlockingIOError:
                    time.sleep(1.0)
                except OSError:
                    break
            yield is_locked

    def _build(self, built: Path, environment: Path) -> None:
        packages = built / "site"
        packages.mkdir(parents=True)
        variables = {**os.environ, "PYTHONPATH": str(packages)}
        python = make_environment(environment, packages)
        with zipfile.ZipFile(self._given.archive) as opened:
            opened.extractall(packages)
        # at the same time as pip, which waits for the network
        with subprocess.Popen(
            [sys.executable, "-m", "compileall", "-q", "-j2", str(packages / "kdist_trainer")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ):
            options = self._options
            with tempfile.TemporaryDirectory() as wheels:
                if self._given.wheels:  # by a client that is among what the trainer needs
                    _run_pip(python, [*options, *self._given.needed])
                    fetch = [*(sys.executable, "-m", "kdist_trainer.fetch"), *self._given.wheels]
                    if told := self._given.termination_message:
                        fetch += [f"--termination-message={told}"]
                    if code := subprocess.run(
                        [*fetch, f"--folder={wheels}"], env=variables, check=False
                    ).returncode:
                        sys.exit(code)  # it has written the record itself
                    options = [*options, f"--find-links={wheels}/files"]
                _run_pip(python, [*options, f"--requirement={self._given.requirements}"])
        if lacks := find_lacks(sys.executable, OF_IMAGE, variables):
            raise InstallError(CONFIG, f"the image {lacks}: name another image")
        (built / _NOTE).write_text(_list_files(packages))


def _is_whole(tree: Path) -> bool:
    # any other error says nothing of a tree, which others may use
    with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return (tree / _NOTE).read_bytes() == _list_files(tree / "site").encode()
    return False


def _list_files(packages: Path) -> str:
    whole = sha256()
    for folder, folders, names in os.walk(packages, onerror=_fail):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)  # noqa: PTH118 - there are ten thousands
            entry = f"{path[len(str(packages)) :]}\0{os.lstat(path).st_size}\0"
            whole.update(os.fsencode(entry))
    return whole.hexdigest()


def _fail(error: OSError) -> None:
    raise error


def make_environment(root: Path, packages: Path) -> Path:
    """An environment whose packages are in `packages`, and which sees those of this Python; its
    Python. The module venv does the same, but Debian's images have it only in part.
    """
    library = root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for each in (root / "bin", library):
        each.mkdir(parents=True)
    base = Path(getattr(sys, "_base_executable", "") or sys.executable)
    (root / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = true\n"
        f"version = {'.'.join(map(str, sys.version_info[:3]))}\n"
    )
    python = root / "bin" / "python"
    python.symlink_to(base)
    (library / "site-packages").symlink_to(packages)
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
        code = STORAGE if _MAY_PASS.search(done.stderr) else DATA
        raise InstallError(code, f"pip: {text}"[:_MOST_BYTES])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one installation; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.install")
    parser.add_argument("--folder", type=Path, required=True, help="gets the packages, in site/")
    parser.add_argument("--archive", type=Path, required=True, help="the trainer, as a zip file")
    parser.add_argument("--requirements", type=Path, required=True, help="what pip installs")
    parser.add_argument("--cache", type=Path, help="folder that pods share, for what is installed")
    parser.add_argument("--wheels", action="append", default=[], help="argument of their fetch")
    parser.add_argument("--needed", action="append", default=[], help="what that fetch needs")
    parser.add_argument("--termination-message", type=Path, help="file for the exit record")
    given, options = parser.parse_known_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    begun = time.monotonic()
    try:
        installation = Installation(given, options)
        was_there = installation.run()
        given.folder.mkdir(exist_ok=True)
        link = given.folder / f"{_UNFINISHED}link"
        link.unlink(missing_ok=True)
        link.symlink_to(installation.tree / "site")
        link.replace(given.folder / "site")
    except (InstallError, OSError, zipfile.BadZipFile) as error:
        code = error.code if isinstance(error, InstallError) else STORAGE
        message = f"spec.install: {error}"
        if isinstance(error, OSError) and error.errno in _NO_ACCESS:
            message += f": user {os.getuid()} must be able to read and write there"
            code = CONFIG
        log.error("packages-failed", message=message, code=code)
        record = {"code": code, "cause": _CAUSES[code], "outcome": "failed", "message": message}
        if given.termination_message is not None:
            text = encode_json(stamp("exit.json", {**record, "time": round(time.time(), 3)}))
            given.termination_message.write_text(text)
        return code
    count = sum(1 for _ in (given.folder / "site").glob("*.dist-info"))
    took = time.monotonic() - begun
    message = f"the trainer and {count} packages in {took:.1f} s"
    message += ": they were there" if was_there else ""
    log.event("packages-installed", message=message)
    return 0


if __name__ == "__main__":
    sys.exit(main())
