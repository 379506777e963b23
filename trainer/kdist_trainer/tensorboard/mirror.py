"""Copies event files from an object store to a folder, where TensorBoard follows them."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from kdist_trainer.checkpoint import storage
from kdist_trainer.object_store.store import ObjectPath
from kdist_trainer.tensorboard.writer import PREFIX
from kdist_trainer.threads import OnError, start_thread

_PAUSE_SECONDS = 5.0


def mirror(source: ObjectPath, folder: Path) -> None:
    """Copy the event files now, and keep the copies up to date until the process ends.

    Raises:
        FileNotFoundError: there are none.
        OSError: the store failed.
    """
    if not copy_new(source, folder):
        raise FileNotFoundError(source)

    def follow() -> None:
        while True:
            time.sleep(_PAUSE_SECONDS)
            with suppress(OSError):  # the next round tries it again
                copy_new(source, folder)

    start_thread(follow, name="kdist-mirror", on_error=OnError.RESTART)


def copy_new(source: ObjectPath, folder: Path) -> int:
    """Append to the files in a folder what has been added to their objects, which only grow.
    Returns the number of objects. Raises `OSError`.
    """
    found = {
        name: size for name, size in storage.list_files(source).items() if name.startswith(PREFIX)
    }
    for name, size in sorted(found.items()):
        with (folder / name).open("ab") as copy:
            if copy.tell() < size:
                with (source / name).open(size) as stream:
                    stream.seek(copy.tell())
                    copy.write(stream.read())
    return len(found)
