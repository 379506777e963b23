"""Keeps what torch.compile and Triton compile for the next start: in a folder of this machine and,
in a cluster, in an archive next to the checkpoints, with which the pod that takes this one's place
begins. Ranks use the folder alone, so that no step waits for the place of the checkpoints.

What is in a cache is run. So no other user can write the folder, and the archive is signed with the
key of the job's exchange, which those who can write the checkpoints do not have.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import os
import platform
import re
import shutil
import stat
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

from kdist_trainer import log
from kdist_trainer.agent.logs import place_of
from kdist_trainer.agent.settings import Settings, digest_packages
from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.manifest import COMPILED
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import TrainConfig
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.processes.threads import OnError, start_thread

INDUCTOR: Final = "TORCHINDUCTOR_CACHE_DIR"
_PREFIX: Final = "kdist-compile-"
_QUIET_SECONDS: Final = 10.0
"""For how long nothing new has been compiled when the archive is written."""
_RETRY_SECONDS: Final = 300.0
_RESTORE_SECONDS: Final = 5.0
"""How long ranks wait for the archive; a late one is still of use to what they compile later."""
_EMPTY: Final = {".lock", ".load_ok"}
"""Suffixes of files that are always empty."""
_COMPILE_ERRORS: Final = ("BackendCompilerFailed: ", "InductorError: ")
_UNUSED_SECONDS: Final = 30 * 86_400.0
_ENOUGH_BYTES: Final = 1 << 26
"""No file is added to an archive that has more."""
_MOST_BYTES: Final = 2 * _ENOUGH_BYTES
_SIGNATURE_BYTES: Final = 32
_COPY = re.compile(r"(?<=\w{40})/[^/]+$")  # of what a key is for; each machine names its own
_MACHINE = re.compile(r"(model name|flags|Features|CPU part|Model)\s*:")


def skip_headers(config: TrainConfig) -> bool:
    """Have torch precompile no headers if kdist keeps compiled code; returns whether it does. The
    headers are not in torch's cache, and torch compiles them before it looks there. Call it before
    torch is imported.
    """
    if config.compile_cache == "off" or INDUCTOR in os.environ:
        return False
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    return True


def set_variables(settings: Settings) -> None:
    """Have ranks keep compiled code in the folder, unless the job or the user says otherwise."""
    if not skip_headers(settings.config):
        return
    where = settings.config.compile_cache
    root = tempfile.gettempdir() if where == "auto" else where
    base = Path(root, f"{_PREFIX}{os.geteuid()}")
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        found = base.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{base} is not a folder that only this user can write")
    except OSError as error:
        base, failed = settings.scratch / "compiled", error
        log.warn("compile-cache-failed", message=f"{failed}; compiled code is kept in {base}")
    folder = base / _identify(base)
    os.environ[INDUCTOR] = str(folder)
    if where == "auto":
        with suppress(OSError):
            _remove_unused(folder)
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(os.environ[INDUCTOR], "triton")))


def remove_damaged(settings: Settings, failures: Iterable[Failure]) -> None:
    """Remove the folder's code if ranks failed to compile and some of it is empty, as a crash or a
    full disk leaves it: torch uses such files at every start.
    """
    folder = Path(os.environ.get(INDUCTOR, ""))
    is_own = folder.parent.name.startswith(_PREFIX)
    if not is_own or not any(each.message.startswith(_COMPILE_ERRORS) for each in failures):
        return
    # os.walk goes on where an agent of the same machine removes the folder at the same time
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    if not any(path.suffix not in _EMPTY and _is_empty(path) for path in files):
        return
    message = f"ranks failed to compile: the code cached in {folder} is damaged"
    if settings.config.compile_cache == "auto":
        removed = folder.with_name(f"{folder.name}.{time.time_ns()}")
        with suppress(OSError):
            folder.rename(removed)  # at once: other ranks may look into it
            shutil.rmtree(removed, ignore_errors=True)
            log.warn("compile-cache-failed", message=f"{message}, and is compiled again")
    else:  # other nodes and jobs may use it
        log.warn("compile-cache-failed", message=f"{message}: remove it")


def _is_empty(path: Path) -> bool:
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and not status.st_size
    return False


def _remove_unused(folder: Path) -> None:
    """Remove what was compiled for packages or an image that have not been used for a month."""
    folder.mkdir(mode=0o700, exist_ok=True)
    os.utime(folder)
    for other in folder.parent.iterdir():
        with suppress(FileNotFoundError):  # another agent has removed it
            if other.lstat().st_mtime < time.time() - _UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


def _identify(base: Path) -> str:
    """The digest of what compiled code depends on besides its source, by which torch finds it: the
    machine, whose CPU it is made for, the packages, and its own path, which some files contain.
    """
    parts = [str(base), platform.machine(), *platform.libc_ver(), sys.version]
    for path in (Path("/proc/cpuinfo"), *Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            parts += filter(_MACHINE.match, path.read_text().splitlines())
    parts.append(digest_packages())
    return hashlib.sha256("\n".join(dict.fromkeys(parts)).encode()).hexdigest()[:16]


def open_archive(settings: Settings, read_key: Callable[[], str | None]) -> None:
    """Open the archive of this node, unless the cache is kept where the user wants it."""
    folder = Path(os.environ.get(INDUCTOR, ""))
    is_own = settings.config.compile_cache == "auto" and folder.parent.name.startswith(_PREFIX)
    if is_own and settings.checkpoints is not None:
        place = place_of(settings.node)
        CacheArchive(folder, settings.checkpoints / COMPILED, place, read_key).open()


class CacheArchive:
    """The archive of this node's `folder`. `archives` has one for each place in the job, and
    `read_key` returns what is derived from the job's key, None while there is none.
    """

    def __init__(
        self, folder: Path, archives: StoragePath, place: str, read_key: Callable[[], str | None]
    ) -> None:
        self._folder, self._archives, self._read_key = folder, archives, read_key
        self._name, first = f"{place}.tar.gz", re.sub(r"\d+$", "0", place)
        self._first = f"{first}.tar.gz"
        self._restored = threading.Event()
        self._known: set[str] = set()
        self._adds = place == first  # the others add what the archive of the first one lacks

    def open(self) -> None:
        """Fill the folder from the archive, unless that takes too long, and keep what is added."""
        start_thread(self._run, name="compile-cache", on_error=OnError.RESTART)
        self._restored.wait(_RESTORE_SECONDS)

    def _run(self) -> None:
        try:
            self.restore()
        except OSError as error:
            self._fail(error)
        finally:
            self._restored.set()
        before: dict[str, int] = {}
        while True:
            time.sleep(_QUIET_SECONDS)
            is_quiet, before = (files := self._list()) == before, files
            keys = {_COPY.sub("", name) for name in files}
            self._known &= keys  # what was removed is written again
            if is_quiet and not keys <= self._known and self._read_key() is not None:
                try:
                    if not self._adds:
                        time.sleep(_QUIET_SECONDS)  # the first node may be about to replace its own
                        self.restore()
                    if not self._adds:  # the first node has none yet
                        time.sleep(_RETRY_SECONDS)
                    elif not keys <= self._known:
                        self.write()
                        self._known |= keys
                except OSError as error:
                    self._fail(error)
                    time.sleep(_RETRY_SECONDS)

    def restore(self) -> None:
        """Unpack this node's archive; if there is none, that of the first node, whose ranks compile
        the same unless each has a part of the model. Raises `OSError`.
        """
        if self._read_key() is None:
            return
        sizes = storage.list_files(self._archives)
        for name in dict.fromkeys((self._name, self._first)):
            if sizes.get(name, _MOST_BYTES) < _MOST_BYTES:
                pieces = storage.read_pieces(self._archives / name)
                data = memoryview(b"".join(bytes(piece) for piece in pieces))
                signature = self._sign(name, data[_SIGNATURE_BYTES:])
                if signature and hmac.compare_digest(signature, data[:_SIGNATURE_BYTES]):
                    self._unpack(data[_SIGNATURE_BYTES:])
                    self._tell("taken from", name)
                    return
                self._fail(f"{name} is ignored: it is of another key, machine or image")
                self._adds |= self._restored.is_set()

    def _unpack(self, content: memoryview) -> None:
        """Add the files of an archive, each at once, since ranks may look for them already."""
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive:
                target, file = self._folder / member.name, archive.extractfile(member)
                if file is not None and not target.exists():
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    fresh = target.with_name(f".{token_hex(4)}.{target.name}")
                    fresh.write_bytes(file.read())
                    os.utime(fresh, (member.mtime, member.mtime))
                    fresh.replace(target)
            self._known, self._adds = {_COPY.sub("", name) for name in archive.getnames()}, True

    def _list(self) -> dict[str, int]:
        """The files that change no more once they are there, with their sizes, newest first."""
        found = []
        for place, folders, names in os.walk(self._folder):
            folders[:] = [each for each in folders if not each.startswith("tmp.")]
            for path in (Path(place, name) for name in names):
                if path.suffix != ".lock" and not path.name.startswith((".", "tmp.")):
                    with suppress(OSError):
                        status, name = path.lstat(), str(path.relative_to(self._folder))
                        is_whole = status.st_size or path.suffix in _EMPTY
                        if stat.S_ISREG(status.st_mode) and is_whole:
                            found.append((status.st_mtime, name, status.st_size))
        return {name: size for _, name, size in sorted(found, reverse=True)}

    def write(self) -> None:
        """Write what the folder has, as far as there is room. Raises `OSError`."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
            for name in self._list():
                with suppress(FileNotFoundError):
                    archive.add(self._folder / name, name, recursive=False)
                if buffer.tell() > _ENOUGH_BYTES:
                    break
        content = buffer.getvalue()
        storage.make_folder(self._archives, durable=True)
        signature = self._sign(self._name, memoryview(content)) or b""
        storage.replace(self._archives / self._name, signature + content)
        self._tell("kept in", self._name)

    def _sign(self, name: str, content: memoryview) -> bytes | None:
        """The signature of an archive of this name for this machine; None without a key."""
        key, head = self._read_key(), f"{self._folder.name} {name}\0".encode()
        signed = head + hashlib.sha256(content).digest()
        return None if key is None else hmac.digest(key.encode(), signed, "sha256")

    def _tell(self, what: str, name: str) -> None:
        log.event("compile-cache", message=f"compiled code is {what} {self._archives / name}")

    def _fail(self, why: object) -> None:
        message = f"the cache of compiled code in {self._archives}: {why}"
        log.warn("compile-cache-failed", message=message)
