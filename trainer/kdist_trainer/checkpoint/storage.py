"""Every operation of checkpoints on a disk or in an object store, and how a run's folder or URL
is opened. Free of torch.

What decides what survives a crash goes through here: create, write, fsync, rename, remove, also
for DCP's writer. Operations on a disk are reported to observers just before they are done, so that
a test can record a save, stop it at each operation and drop what was not yet synced. Those in an
object store are requests, which a server can see.

Folders are made 0700 and files 0600. A file whose fsync failed is never synced again: the kernel
may already have dropped its pages and would report success. Another attempt writes a new file. In
an object store there are no folders, nothing is renamed, and what is written is durable at once.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kdist_trainer.config import CHECKPOINTS_ENDPOINT, CHECKPOINTS_REGION
from kdist_trainer.formats.digest import Digest, new_hasher
from kdist_trainer.object_store.files import ObjectWriter
from kdist_trainer.object_store.store import ObjectLocation, ObjectPath, open_store

StoragePath = Path | ObjectPath
"""A file or folder on a file system, or a name in an object store."""

FOLDER_MODE = 0o700
FILE_MODE = 0o600
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Operation:
    """An operation on the disk; `target` is the new name of a rename, `data` what is written."""

    # create, write, fsync, make_folder, rename, replace, fsync_folder, remove, remove_tree
    name: str
    path: Path
    target: Path | None = None
    data: bytes = b""


_observers: list[Callable[[Operation], None]] = []


@contextmanager
def observed(observer: Callable[[Operation], None]) -> Iterator[None]:
    """Within the `with` block, call `observer` before every operation."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _report(
    name: str, path: Path, target: Path | None = None, data: bytes | bytearray | memoryview = b""
) -> None:
    for observer in tuple(_observers):
        observer(Operation(name, path, target, bytes(data)))


class DurableFile:
    """A new file that is written once, from start to end, and is on the disk when `close` returns.

    It has the methods that DCP's writer and `pickle` call on a stream. The digest is of the bytes
    that are passed in, so it also covers their way through the page cache.
    """

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        flags = (
            os.O_WRONLY
            | os.O_CREAT
            | os.O_CLOEXEC
            | os.O_NOFOLLOW
            | (os.O_EXCL if exclusive else os.O_TRUNC)
        )
        _report("create", path)
        self.path = path
        self._file = os.fdopen(os.open(path, flags, FILE_MODE), "wb", buffering=BUFFER_BYTES)
        self._hash = new_hasher()
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes. Returns how many. Raises `OSError`."""
        view = memoryview(data).cast("B")
        _report("write", self.path, data=view)
        self._file.write(view)
        self._hash.update(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Hand the buffer to the kernel."""
        self._file.flush()

    def fileno(self) -> int:
        """The open file's descriptor."""
        return self._file.fileno()

    def close(self) -> Digest:
        """Flush, fsync and close; may be called again. Returns the digest of all that was written.

        Raises `OSError`; the file is closed either way.
        """
        if self._file.closed:
            return self.digest
        try:
            self._file.flush()
            _report("fsync", self.path)
            os.fsync(self._file.fileno())
        except OSError:
            self.abandon()
            raise
        self._file.close()
        return self.digest

    def abandon(self) -> None:
        """Close without syncing; buffered bytes may be lost."""
        with suppress(OSError):
            self._file.close()

    @property
    def digest(self) -> Digest:
        """Digest of the bytes written so far."""
        return Digest(self._size, self._hash.hexdigest())

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def create(path: StoragePath) -> DurableFile | ObjectWriter:
    """Open a new file for writing, which is durable once it is closed. Raises `OSError`."""
    if isinstance(path, ObjectPath):
        return path.store.create(path.key)
    return DurableFile(path)


def write_new(path: StoragePath, data: bytes, *, exclusive: bool = False) -> Digest:
    """Write a new file and fsync it.

    Raises:
        FileExistsError: the file exists and `exclusive` is set.
        OSError: the disk failed.
    """
    if isinstance(path, ObjectPath):
        put = path.store.put_new if exclusive else path.store.put
        put(path.key, data)
        return Digest.of(data)
    file = DurableFile(path, exclusive=exclusive)
    with file:
        file.write(data)
    return file.digest


def sync_file(path: Path) -> Digest:
    """Fsync a file that another library has written. Returns the digest of its content.

    Raises `OSError`, also if it is no regular file.
    """
    hasher, size = new_hasher(), 0
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb", buffering=0) as file:
        _report("fsync", path)
        os.fsync(file.fileno())
        while chunk := file.read(BUFFER_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return Digest(size, hasher.hexdigest())


def replace(path: StoragePath, data: bytes) -> None:
    """Replace a file's content atomically: readers, also after a crash, find the old or the new.
    Raises `OSError`.
    """
    if isinstance(path, ObjectPath):
        path.store.put(path.key, data)
        return
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[DurableFile]:
    """Within the `with` block, a file's new content is written; afterwards it has replaced the old
    one, as `replace` does. Raises `OSError`.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    try:
        with DurableFile(temporary) as file:
            yield file
        _report("replace", temporary, path)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(path: StoragePath, *, durable: bool = False) -> None:
    """Make a folder, mode 0700, if it does not exist. `durable`: also its parents, and sync its
    name. Raises `OSError`.
    """
    if isinstance(path, ObjectPath):
        return
    if path.is_dir() and not path.is_symlink():
        return
    if durable and not path.parent.is_dir():
        make_folder(path.parent, durable=True)
    _report("make_folder", path)
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    if durable:
        sync_folder(path.parent)


def rename(path: Path, target: Path) -> None:
    """Rename a file or folder. The new name is durable once the parent is synced. Raises
    `OSError`.
    """
    _report("rename", path, target)
    path.rename(target)


def move_tree(path: StoragePath, target: StoragePath) -> None:
    """Rename a folder that nobody writes to. In an object store each object is copied by the store
    and then removed, so a failure may leave some of them in each place. Raises `OSError`.
    """
    if isinstance(path, ObjectPath) and isinstance(target, ObjectPath):
        for name in path.files():
            path.store.rename((path / name).key, (target / name).key)
    elif isinstance(path, Path) and isinstance(target, Path):
        path.rename(target)


def sync_folder(path: StoragePath) -> None:
    """Make the names in a folder durable. Raises `OSError`."""
    if isinstance(path, ObjectPath):
        return
    _report("fsync_folder", path)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        # some file systems cannot sync folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def remove(path: StoragePath) -> None:
    """Remove a file. Raises `OSError`."""
    if isinstance(path, ObjectPath):
        path.store.delete(path.key)
        return
    _report("remove", path)
    path.unlink()


def remove_tree(path: StoragePath) -> None:
    """Remove a folder as far as possible, without raising; a later call retries the rest."""
    if isinstance(path, ObjectPath):
        with suppress(OSError):
            path.store.delete_prefix(path.key)
        return
    _report("remove_tree", path)
    shutil.rmtree(path, ignore_errors=True)


def list_folders(path: StoragePath) -> list[StoragePath]:
    """The folders in a folder, in any order; none if there is no such folder. Raises `OSError`."""
    if isinstance(path, ObjectPath):
        return list(path.folders())
    try:
        entries = list(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]


def list_files(path: StoragePath) -> dict[str, int]:
    """The files in a folder by name, with their sizes in bytes; none if there is no such folder.
    Raises `OSError`.
    """
    if isinstance(path, ObjectPath):
        return {name: size for name, size in path.files().items() if "/" not in name}
    sizes = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in path.iterdir():
            with suppress(FileNotFoundError):
                sizes[entry.name] = entry.stat().st_size
    return sizes


def read_pieces(path: StoragePath) -> Iterator[memoryview | bytes]:
    """A file's content in pieces, each of which is valid until the next is asked for. Raises
    `FileNotFoundError` or `OSError`.
    """
    if isinstance(path, ObjectPath):
        yield from path.store.stream(path.key)
        return
    piece = memoryview(bytearray(BUFFER_BYTES))
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            yield piece[:count]


def modified_at(path: StoragePath) -> float | None:
    """When a file was last changed, in Unix seconds; None if it is not there."""
    try:
        if isinstance(path, ObjectPath):
            return path.modified_at()
        return path.stat().st_mtime
    except OSError:
        return None


def open_location(text: str) -> StoragePath:
    """The folder, or the name in an object store, that `text` names. kdist's environment variables
    have the store's endpoint and region, the store's own ones its credentials.

    Raises:
        ValueError: it is a URL that names no object store.
        OSError: the store cannot be opened.
    """
    if "://" not in text:
        return Path(text)
    endpoint, region = (
        os.environ.get(name, "") for name in (CHECKPOINTS_ENDPOINT, CHECKPOINTS_REGION)
    )
    location = ObjectLocation(text, endpoint, region)
    bucket = dataclasses.replace(location, url=f"{location.scheme}://{location.bucket}")
    return ObjectPath(open_store(bucket), location.prefix)
