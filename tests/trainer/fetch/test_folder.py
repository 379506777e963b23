"""The folder of a fetch: names become files below it, or are refused."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist_trainer.errors import DataError
from kdist_trainer.fetch import FetchRequest, RemoteFile
from kdist_trainer.fetch.fetcher import LOCK, FetchFolder

NAMES = st.text(alphabet="./ab\\\0\n é\ud800", max_size=9)


def open_folder(path: Path) -> FetchFolder:
    return FetchFolder(FetchRequest(url="s3://bucket/a", folder=path, field="spec.data[0]"))


@given(st.lists(NAMES, min_size=1, max_size=4, unique=True))
def test_names_become_files_below_the_folder_or_are_refused(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "deep/folder"
        root.mkdir(parents=True)
        folder = open_folder(root)
        files = [RemoteFile(name, 1, etag="first") for name in names]
        try:
            folder.adopt(files)
        except DataError:
            return
        for file in files:
            folder.partial(file.name).write_bytes(b"x")
            folder.finish(file, "")
        found = {
            os.path.relpath(Path(parent) / name, root / "files")
            for parent, _, every in os.walk(temporary)
            for name in every
            if name != "fetch.json"
        }
        assert found == {os.path.normpath(name) for name in names} == set(names)


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be the name of a file"):
        open_folder(tmp_path).adopt([RemoteFile("é" * 128, 1)])


def test_the_lock_is_no_link_to_another_file(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("kept")
    folder = tmp_path / "folder"
    folder.mkdir()
    for target in (other, tmp_path / "absent"):
        (folder / LOCK).unlink(missing_ok=True)
        (folder / LOCK).symlink_to(target)
        with pytest.raises(OSError, match="symbolic links"), open_folder(folder).locked(print):
            pass
    assert other.read_text() == "kept"
    assert not (tmp_path / "absent").exists()
