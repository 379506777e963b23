"""What of a code folder leaves the machine: files by their path, without what is hidden, ignored or
reached by a link out of the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kdist.errors import KdistError, UsageError
from kdist.job_file import folder, load_text
from kdist.job_file.folder import CodeFolder, find_code, list_folder
from tests.cli.job_file.test_credentials import JOB


def make(root: Path, *names: str, **contents: str) -> CodeFolder:
    """The listing of the folder `src` with these files, each of which holds its own name."""
    for name in names:
        path = root / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(contents.get(name, name))
    return list_folder(root / "src", shown="./src")


def sent(found: CodeFolder) -> list[str]:
    """Names of the files that are sent."""
    return [each.name for each in found.files]


def test_files_are_named_by_their_path_and_hidden_ones_stay(tmp_path: Path) -> None:
    hidden = (".git/config", "__pycache__/train.pyc", ".env", "node_modules/a.js")
    found = make(tmp_path, "train.py", "model/net.py", *hidden)
    assert found.read(Path.read_bytes) == {"train.py": b"train.py", "model/net.py": b"model/net.py"}
    assert found.left_out == [(".env", "hidden")]


def test_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    make(tmp_path, "train.py", "model/net.py")
    (tmp_path / "src" / "in.py").symlink_to("train.py")
    (tmp_path / "src" / "other").symlink_to("model")
    (tmp_path / "src" / "absolute.py").symlink_to(tmp_path / "src" / "train.py")
    found = make(tmp_path)
    assert found.read(Path.read_bytes) == {
        "absolute.py": b"train.py",
        "in.py": b"train.py",
        "model/net.py": b"model/net.py",
        "other/net.py": b"model/net.py",
        "train.py": b"train.py",
    }


def test_a_link_in_a_circle_is_followed_no_further_and_named(tmp_path: Path) -> None:
    make(tmp_path, "a/x.py")
    (tmp_path / "src" / "a" / "up").symlink_to("..")
    (tmp_path / "src" / "self").symlink_to("self")
    found = make(tmp_path)
    assert sent(found) == ["a/x.py"]
    assert [each.name for each in found.left_out] == ["a/up", "self"]


@pytest.mark.parametrize("target", ["../secret", "/etc/hostname", "../gone", "a/../../secret"])
def test_a_link_out_of_the_folder_is_refused_by_name(target: str, tmp_path: Path) -> None:
    make(tmp_path, "train.py", "a/b.py")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "src" / "out").symlink_to(target)
    found = make(tmp_path)
    assert sent(found) == ["a/b.py", "train.py"]
    with pytest.raises(KdistError, match=r"spec\.code: out is a link out of the folder") as raised:
        found.read(Path.read_bytes)
    assert "list the name in .kdistignore" in raised.value.hint
    (tmp_path / "src" / ".kdistignore").write_text("out\n")
    assert make(tmp_path).read(Path.read_bytes).keys() == {"a/b.py", "train.py"}


def test_a_link_to_what_is_left_out_is_left_out(tmp_path: Path) -> None:
    make(tmp_path, "train.py", ".env", "private/key", ".kdistignore")
    (tmp_path / "src" / ".kdistignore").write_text("private/\n")
    (tmp_path / "src" / "settings").symlink_to(".env")
    (tmp_path / "src" / "key").symlink_to("private/key")
    found = make(tmp_path)
    assert sent(found) == ["train.py"]
    assert ("settings", "a link to .env: hidden") in found.left_out
    assert ("key", "a link to key: .kdistignore") in found.left_out


def test_gitignore_holds_from_the_repository_down_and_kdistignore_has_the_last_word(
    tmp_path: Path,
) -> None:
    make(tmp_path, "train.py", "a.log", "keep.log", "data/big.bin", "lib/x.tmp", "lib/y.py")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("*.log\nsrc/data/\n")
    (tmp_path / "src" / "lib" / ".gitignore").write_text("*.tmp\n")
    (tmp_path / "src" / ".kdistignore").write_text("!keep.log\nlib/y.py\n")
    found = make(tmp_path)
    assert sent(found) == ["keep.log", "train.py"]
    assert found.left_out == [
        ("a.log", ".gitignore"),
        ("data", ".gitignore"),
        ("lib/x.tmp", ".gitignore"),
        ("lib/y.py", ".kdistignore"),
    ]


def test_patterns_above_the_repository_do_not_hold(tmp_path: Path) -> None:
    make(tmp_path, "train.py")
    (tmp_path / ".gitignore").write_text("*\n")
    assert sent(make(tmp_path)) == ["train.py"]
    (tmp_path / "src" / ".git").mkdir()
    assert sent(make(tmp_path)) == ["train.py"]


@pytest.mark.parametrize("name", [".gitignore", ".kdistignore"])
def test_patterns_that_cannot_be_read_are_named_with_their_file(name: str, tmp_path: Path) -> None:
    make(tmp_path, "train.py", name)
    (tmp_path / "src" / name).write_text("\\\n")
    with pytest.raises(UsageError, match=f"cannot read the patterns of .*{name}"):
        make(tmp_path)


def test_what_no_config_map_can_hold_is_named(tmp_path: Path) -> None:
    make(tmp_path, "train.py")
    os.mkfifo(tmp_path / "src" / "pipe")
    Path(os.fsdecode(os.fsencode(tmp_path / "src") + b"/\xff.py")).touch()
    found = make(tmp_path)
    assert found.left_out == [("pipe", "neither a file nor a folder")]
    assert [each.reason for each in found.refused] == [
        "has a name that is not UTF-8, which a ConfigMap cannot hold"
    ]


def test_the_summary_has_the_count_the_bytes_and_the_first_names(tmp_path: Path) -> None:
    found = make(tmp_path, *(f"m{number}.py" for number in range(7)), ".env")
    assert found.describe() == (
        "spec.code sends 7 files, 35 bytes, of ./src: m0.py, m1.py, m2.py, m3.py, m4.py, 2 more; "
        "left out: .env (hidden)"
    )
    assert found.describe(all_names=True).count("m6.py") == 1


def test_a_job_without_a_code_folder_sends_none(tmp_path: Path) -> None:
    assert find_code(load_text(JOB, source="job.yaml"), tmp_path) is None


def test_a_folder_that_is_missing_or_far_too_big_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_text(JOB, source="job.yaml", overrides=["spec.code=./src"])
    with pytest.raises(UsageError, match="there is no folder"):
        find_code(job, tmp_path)
    make(tmp_path, "a", "weights.bin")
    monkeypatch.setattr(folder, "CODE_BYTES", 10)
    with pytest.raises(KdistError, match="has more than") as raised:
        find_code(job, tmp_path)
    assert "claim" in raised.value.hint
    monkeypatch.setattr(folder, "MAX_ENTRIES", 1)
    with pytest.raises(KdistError, match="has more than 1 entries"):
        find_code(job, tmp_path)
