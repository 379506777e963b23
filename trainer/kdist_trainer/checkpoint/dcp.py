"""How torch's DCP writes a state to kdist's storage: every file durable when it is closed, with a
digest of what was written.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.serialization import get_crc32_options, set_crc32_options

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.staging import Paths
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.digest import Digest

# Where one rank writes everything, DCP saves without a process group on purpose.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


class _DurableFileSystem(FileSystem):
    """DCP's access to the disk: every stream is on the disk when it is closed, and has a digest.

    It replaces DCP's `sync_files`, which syncs `.metadata` before Python's buffer is flushed.
    """

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            raise ValueError(f"checkpoints are written once, not opened as {mode!r}")
        file = storage.create(Path(path))
        with file:
            yield file
        self.digests[Path(path).name] = file.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        storage.rename(Path(path), Path(new_path))
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        storage.make_folder(Path(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        storage.remove(Path(path))


class _ObjectFileSystem(_DurableFileSystem):
    """DCP's access to an object store: every stream is a whole object when it is closed. Its index
    gets its own name at once, since nothing can be renamed.
    """

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix.removesuffix(".tmp")

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            raise ValueError(f"checkpoints are written once, not opened as {mode!r}")
        file = storage.create(path)
        with file:
            yield file
        self.digests[path.name] = file.digest

    def exists(self, path: Any) -> bool:  # noqa: ARG002 - DCP's signature
        return False  # a folder is written to once

    def mkdir(self, path: Any) -> None:
        """Do nothing: there are no folders."""

    def rename(self, path: Any, new_path: Any) -> None:
        """Do nothing: it has that name already."""


class DcpWriter(FileSystemWriter):
    """DCP's writer over that file system, with the checkpoint's name as its id instead of a random
    number.
    """

    def __init__(self, path: StoragePath, name: str) -> None:
        super().__init__(
            path if isinstance(path, Path) else Path(),
            single_file_per_rank=True,
            sync_files=False,
            thread_count=1,
            per_thread_copy_ahead=0,
        )
        self.fs: _DurableFileSystem = _DurableFileSystem()
        if not isinstance(path, Path):
            self.fs, self.path = _ObjectFileSystem(), cast(Any, path)
        self.save_id = name

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.save_id, save_id=self.save_id)


class DcpPlanner(DefaultSavePlanner):
    """Plans a flat share of a state, under the paths that the nested state had."""

    def __init__(self, paths: Paths) -> None:
        super().__init__()
        self._paths = paths

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # flat already; DCP would take dicts apart whose keys are no texts, and make texts of them
        self.flatten_state_dict = False
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.flatten_state_dict = True  # so that the plan has the paths
        self.mappings = dict(self._paths)


@contextmanager
def without_crc32() -> Generator[None, None, None]:
    """Have `torch.save` compute no checksum of each tensor, which nothing would ever compare: the
    digest of the file covers them all.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
