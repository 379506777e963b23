"""The program in the pod writes exactly the files that a digest stands for, below its folder, or
nothing.
"""

from __future__ import annotations

import io
import os
import tarfile
import time
from hashlib import sha256
from pathlib import Path

import pytest

from kdist.deploy.receive_code import describe, is_whole, receive

FILES = {"a.py": b"1", "data/b.bin": bytes(5000), "odd\nname\\": b""}


def pack(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w|") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def sums(files: dict[str, bytes]) -> str:
    return "".join(describe(name, sha256(each).hexdigest()) for name, each in files.items())


DIGEST = sha256(sums(FILES).encode()).hexdigest()


def send(folder: Path, data: bytes) -> None:
    """Send an archive as that of these files."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|", encoding="utf-8") as archive:
        receive(archive, folder, "x", DIGEST)


def test_files_are_there_with_their_sums_and_a_second_time_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "_code"
    send(folder, pack(FILES))
    for name, content in FILES.items():
        assert (folder / "x" / name).read_bytes() == content
    assert (folder / "x" / "SHA256SUMS").read_text() == sums(FILES)
    before = (folder / "x").stat().st_ino
    send(folder, pack(FILES))
    assert (folder / "x").stat().st_ino == before
    assert [each.name for each in folder.iterdir()] == ["x"]


@pytest.mark.parametrize("found", [None, "", "other", sums(FILES)])
def test_an_empty_or_a_damaged_folder_in_its_place_is_replaced(
    tmp_path: Path, found: str | None
) -> None:
    (tmp_path / "x").mkdir()  # as a kubelet makes it for a pod that mounts what is not there
    if found is not None:
        (tmp_path / "x" / "a.py").write_text("damaged")
    if found:
        (tmp_path / "x" / "SHA256SUMS").write_text(found)
    os.utime(tmp_path / "x", (0, 0))
    assert not is_whole(tmp_path / "x", DIGEST)
    send(tmp_path, pack(FILES))
    assert (tmp_path / "x" / "a.py").read_bytes() == b"1"
    assert (tmp_path / "x" / "SHA256SUMS").read_text() == sums(FILES)
    assert is_whole(tmp_path / "x", DIGEST)
    send(tmp_path, pack(FILES))
    aside = [each for each in tmp_path.iterdir() if each.name != "x"]
    assert [(each / "a.py").read_text() for each in aside] == (["damaged"] * (found is not None))
    assert all(each.name.startswith(".unfinished-") for each in aside)


@pytest.mark.parametrize("gone", [*FILES, "SHA256SUMS"])
def test_a_folder_is_whole_with_each_of_the_files_and_whatever_else(
    tmp_path: Path, gone: str
) -> None:
    send(tmp_path, pack(FILES))
    (tmp_path / "x" / "more").write_bytes(b"")
    assert is_whole(tmp_path / "x", DIGEST)
    (tmp_path / "x" / gone).unlink()
    assert not is_whole(tmp_path / "x", DIGEST)


def test_a_file_in_its_place_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(NotADirectoryError):
        send(tmp_path, pack(FILES))
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("/etc/passwd", tarfile.REGTYPE),
        ("../up", tarfile.REGTYPE),
        ("a/../../up", tarfile.REGTYPE),
        ("link", tarfile.SYMTYPE),
        ("hard", tarfile.LNKTYPE),
        ("pipe", tarfile.FIFOTYPE),
        ("device", tarfile.CHRTYPE),
        ("folder", tarfile.DIRTYPE),
    ],
)
def test_nothing_but_files_below_the_folder_is_written(
    tmp_path: Path, name: str, kind: bytes
) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "../up"
    data = info.tobuf() + bytes(2 * tarfile.RECORDSIZE)
    folder = tmp_path / "_code"
    with pytest.raises(ValueError, match="is not a file of a code folder"):
        send(folder, data)
    assert list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == [folder]


def test_other_files_than_the_digest_stands_for_are_refused(tmp_path: Path) -> None:
    for other in ({**FILES, "a.py": b"2"}, {"a.py": b"1"}, {**FILES, "more": b""}):
        with pytest.raises(ValueError, match="have changed while they were sent"):
            send(tmp_path, pack(other))
    with pytest.raises((tarfile.TarError, OSError, ValueError)):
        send(tmp_path, pack(FILES)[:1500])
    assert list(tmp_path.iterdir()) == []


def test_what_killed_uploads_have_left_is_removed_after_a_day(tmp_path: Path) -> None:
    for name, age in ((".unfinished-old", 90_000), (".unfinished-new", 10), ("kept", 90_000)):
        (tmp_path / name).mkdir()
        at = time.time() - age
        os.utime(tmp_path / name, (at, at))
    send(tmp_path, pack(FILES))
    assert sorted(each.name for each in tmp_path.iterdir()) == [".unfinished-new", "kept", "x"]


def test_an_upload_that_ends_at_the_same_time_is_no_error(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-gone").symlink_to("nowhere")  # listed, and without a status
    send(tmp_path, pack(FILES))
    assert (tmp_path / "x" / "SHA256SUMS").read_text() == sums(FILES)
