"""Compiled code is kept for the next start where nobody but the job can have written it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch._inductor.exc import InductorError

from kdist_trainer.agent import compile_cache
from kdist_trainer.agent.compile_cache import (
    INDUCTOR,
    CacheArchive,
    remove_damaged,
    set_variables,
)
from kdist_trainer.agent.logs import place_of
from kdist_trainer.agent.settings import Settings
from kdist_trainer.checkpoint import commit
from kdist_trainer.checkpoint.manifest import COMPILED, CheckpointDirectory
from kdist_trainer.ipc.failure import describe
from kdist_trainer.object_store.store import ObjectLocation, ObjectPath, ObjectStore
from tests.patience import soon
from tests.trainer.agent.test_settings import make_settings
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server

KEY = "k" * 32


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """An agent's, with a temporary folder of its own and no variable of a cache."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (INDUCTOR, "TRITON_CACHE_DIR", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"):
        monkeypatch.setenv(name, "")  # so that what is set is undone
        monkeypatch.delenv(name)
    return make_settings(tmp_path)


def with_cache(settings: Settings, where: str) -> Settings:
    return replace(settings, config=settings.config.model_copy(update={"compile_cache": where}))


def test_ranks_find_a_folder_that_only_they_can_write(settings: Settings, tmp_path: Path) -> None:
    set_variables(settings)
    folder = Path(os.environ[INDUCTOR])
    assert folder.parent == tmp_path / f"kdist-compile-{os.geteuid()}"
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")


def test_a_variable_of_the_users_wins_and_off_sets_none(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(with_cache(settings, "off"))
    assert INDUCTOR not in os.environ
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine/triton")
    set_variables(settings)
    assert os.environ["TRITON_CACHE_DIR"] == "/mine/triton"
    monkeypatch.setenv(INDUCTOR, "/mine")
    set_variables(settings)
    assert os.environ[INDUCTOR] == "/mine"


def test_the_folder_is_below_the_path_that_the_job_names(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "volume").mkdir()
    set_variables(with_cache(settings, str(tmp_path / "volume")))
    assert Path(os.environ[INDUCTOR]).parent.parent == tmp_path / "volume"


@pytest.mark.parametrize("way", ["open", "link", "file", "missing"])
def test_a_folder_that_others_can_write_is_not_used(
    settings: Settings, tmp_path: Path, logged: list[str], way: str
) -> None:
    base = tmp_path / f"kdist-compile-{os.geteuid()}"
    if way == "open":
        base.mkdir()
        base.chmod(0o777)
    elif way == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        base.symlink_to(tmp_path / "elsewhere")
    elif way == "file":
        base.touch()
    where = "auto" if way != "missing" else str(tmp_path / "nowhere")
    set_variables(with_cache(settings, where))
    assert Path(os.environ[INDUCTOR]).is_relative_to(settings.scratch)
    assert "compile-cache-failed" in logged[0]


def test_other_packages_have_another_folder(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for version in ("1.0", "1.0", "2.0"):
        monkeypatch.delenv(INDUCTOR, raising=False)
        site = tmp_path / version
        (site / f"package-{version}.dist-info").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(sys, "path", [*sys.path[:1], str(site)])
        set_variables(settings)
        folders.append(os.environ[INDUCTOR])
    assert folders[0] == folders[1] != folders[2]


FAILED = [describe(InductorError(AttributeError("no attribute 'call'"), None))]


@pytest.mark.parametrize("where", ["auto", "volume"])
def test_damaged_code_is_removed_if_ranks_fail_to_compile_where_no_other_node_uses_it(
    settings: Settings, tmp_path: Path, logged: list[str], where: str
) -> None:
    (tmp_path / "volume").mkdir()
    chosen = with_cache(settings, where if where == "auto" else str(tmp_path / where))
    set_variables(chosen)
    folder = Path(os.environ[INDUCTOR])
    fill(folder, "ab/code.py")
    (folder / "ab/code.so.load_ok").touch()
    remove_damaged(chosen, FAILED)
    assert (folder / "ab/code.py").exists(), "the program may be at fault"
    (folder / "ab/other.py").touch()
    remove_damaged(chosen, [describe(ValueError("of the user"))])
    assert not logged
    remove_damaged(chosen, FAILED)
    assert (folder / "ab/code.py").exists() is (where != "auto")
    assert "is damaged" in logged[0]
    if where == "auto":
        assert not list(folder.parent.glob("*/*"))


def test_agents_that_remove_the_same_damaged_code_at_once_do_not_fail_each_other(
    settings: Settings,
) -> None:
    set_variables(settings)
    folder = Path(os.environ[INDUCTOR])
    for _ in range(20):
        fill(folder, *(f"{number}/code.py" for number in range(100)))
        (folder / "99/other.py").touch()
        in_parallel(lambda: remove_damaged(settings, FAILED))
        assert not folder.exists()


def in_parallel(act: Callable[[], None]) -> None:
    """Call it on four threads at once."""
    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(act) for _ in range(4)]:
            each.result()


def test_a_folder_of_the_users_is_never_removed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "mine"))
    set_variables(settings)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/code.py").touch()
    remove_damaged(settings, FAILED)
    assert (tmp_path / "mine/code.py").exists()


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


def archive(
    folder: Path,
    checkpoints: Path | ObjectPath,
    node: str = "digits-0-x7k2p",
    key: str | None = KEY,
) -> CacheArchive:
    return CacheArchive(folder, checkpoints / COMPILED, place_of(node), lambda: key)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "node" / ("a" * 16)


def test_the_pod_that_takes_the_place_of_another_has_what_that_has_compiled(
    folder: Path, tmp_path: Path
) -> None:
    fill(folder, "fxgraph/one", "ab/kernel.so", "locks/one.lock", "ab/.1.2.tmp", "tmp.pid_1/x")
    archive(folder, tmp_path).write()
    kept = tmp_path / "compiled" / "digits-0.tar.gz"
    assert kept.stat().st_mode & 0o777 == 0o600
    shutil.rmtree(folder)
    fill(folder, "fxgraph/two")
    archive(folder, tmp_path, "digits-0-abcde").restore()
    assert names(folder) == {"fxgraph/one", "fxgraph/two", "ab/kernel.so"}
    assert (folder / "ab/kernel.so").read_text() == "ab/kernel.so"


def test_agents_of_one_machine_unpack_the_same_archive_at_once(
    folder: Path, tmp_path: Path
) -> None:
    written = {f"fxgraph/{number}" for number in range(50)}
    fill(folder, *written)
    archive(folder, tmp_path).write()
    for _ in range(10):
        shutil.rmtree(folder)
        in_parallel(lambda: archive(folder, tmp_path).restore())
        assert names(folder) == written
        assert all((folder / each).read_text() == each for each in written)


def test_a_bucket_keeps_it_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    fill(folder, "fxgraph/one")
    with S3Server(page=3) as server:
        location = ObjectLocation(f"s3://{BUCKET}", endpoint=server.endpoint)
        checkpoints = ObjectPath(ObjectStore(location, retry_seconds=5.0), "digits")
        archive(folder, checkpoints).write()
        shutil.rmtree(folder)
        archive(folder, checkpoints).restore()
    assert names(folder) == {"fxgraph/one"}


@pytest.mark.parametrize("how", ["changed", "other key", "no key", "other machine", "cut", "empty"])
def test_an_archive_that_the_job_has_not_written_for_this_machine_is_not_unpacked(
    folder: Path, tmp_path: Path, logged: list[str], how: str
) -> None:
    fill(folder, "fxgraph/one")
    archive(folder, tmp_path).write()
    (kept,) = (tmp_path / "compiled").iterdir()
    shutil.rmtree(folder)
    key: str | None = KEY
    data = bytearray(kept.read_bytes())
    if how == "changed":
        data[40] ^= 1
    elif how == "other key":
        key = "j" * 32
    elif how == "no key":
        key = None
    elif how == "other machine":
        folder = folder.with_name("b" * 16)
    elif how == "cut":
        del data[100:]
    else:
        data.clear()
    kept.write_bytes(data)
    archive(folder, tmp_path, key=key).restore()
    assert names(folder) == set()
    refusals = [each for each in logged if "is of another key, machine or image" in each]
    assert len(refusals) == (how != "no key"), "without a key nothing is known of it"


def test_only_the_first_node_begins_an_archive_and_others_add_what_it_lacks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "_QUIET_SECONDS", 0.05)
    monkeypatch.setattr(compile_cache, "_RETRY_SECONDS", 0.05)
    kept = tmp_path / "compiled"
    first, second = folder / "first" / ("a" * 16), folder / "second" / ("a" * 16)
    archive(second, tmp_path, "digits-1-x7k2p").open()
    fill(second, "fxgraph/both")
    archive(first, tmp_path).open()
    fill(first, "fxgraph/both")
    assert soon(lambda: len(list(kept.glob("*.gz"))) == 1, 20)
    assert [each.name for each in kept.glob("*.gz")] == ["digits-0.tar.gz"]
    shutil.rmtree(second)
    archive(second, tmp_path, "digits-1-abcde").open()
    assert names(second) == {"fxgraph/both"}
    fill(second, "fxgraph/own")
    assert soon(lambda: len(list(kept.glob("*.gz"))) == 2, 20)


@pytest.mark.parametrize("machine", ["a", "b"], ids=["of one kind", "of another kind"])
def test_a_node_adds_a_part_of_its_own_in_its_first_life_once_the_first_one_has_begun(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    monkeypatch.setattr(compile_cache, "_QUIET_SECONDS", 0.05)
    monkeypatch.setattr(compile_cache, "_RETRY_SECONDS", 0.05)
    kept, first, second = tmp_path / "compiled", folder / (machine * 16), folder / "2" / ("a" * 16)
    fill(first, "fxgraph/first")
    fill(second, "fxgraph/second")
    archive(second, tmp_path, "digits-1-x7k2p").open()
    time.sleep(0.5)
    assert not kept.exists()
    archive(first, tmp_path).write()
    assert soon(lambda: len(list(kept.glob("*.gz"))) == 2, 20)
    shutil.rmtree(second)
    archive(second, tmp_path, "digits-1-abcde").restore()
    both = {"fxgraph/first", "fxgraph/second"}
    assert names(second) == (both if machine == "a" else {"fxgraph/second"})


def test_equal_code_is_kept_once_whatever_each_machine_calls_its_copy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(compile_cache, "_QUIET_SECONDS", 0.05)
    monkeypatch.setattr(compile_cache, "_RETRY_SECONDS", 0.05)
    first, second = folder / "1" / ("a" * 16), folder / "2" / ("a" * 16)
    for number, each in enumerate((first, second)):
        fill(each, "ab/cab.so", f"fxgraph/ff/f{'k' * 51}/{number}")
    archive(first, tmp_path).write()
    shutil.move(tmp_path / "compiled", tmp_path / "later")
    archive(second, tmp_path, "digits-1-x7k2p").open()
    shutil.move(tmp_path / "later", tmp_path / "compiled")
    assert soon(lambda: "taken from" in "".join(logged), 20)
    time.sleep(0.5)
    assert [each.name for each in (tmp_path / "compiled").iterdir()] == ["digits-0.tar.gz"]


def test_what_a_killed_pod_has_left_unfinished_is_removed_once_it_is_old(tmp_path: Path) -> None:
    left = [tmp_path / f"compiled/digits-{place}.tar.gz.tmp-1-2" for place in (0, 1)]
    fill(tmp_path, *(str(each.relative_to(tmp_path)) for each in left))
    os.utime(left[0], (1, 1))
    commit.clean_stale(CheckpointDirectory(tmp_path), before=1)
    assert [each.exists() for each in left] == [False, True]


def test_an_archive_is_in_memory_at_most_twice(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(32):
        (folder / str(number)).write_bytes(os.urandom(1 << 17))
    archive(folder, tmp_path).write()
    size = (tmp_path / "compiled" / "digits-0.tar.gz").stat().st_size
    shutil.rmtree(folder)
    tracemalloc.start()
    try:
        archive(folder, tmp_path).restore()
        assert tracemalloc.get_traced_memory()[1] < 2.5 * size
    finally:
        tracemalloc.stop()
    assert len(names(folder)) == 32


def test_agents_that_start_at_once_remove_the_same_unused_code(
    settings: Settings, tmp_path: Path
) -> None:
    base = tmp_path / f"kdist-compile-{os.geteuid()}"
    for _ in range(5):
        for name in map(str, range(50)):
            fill(base / name, "fxgraph/one")
            os.utime(base / name, (0, 0))
        base.chmod(0o700)
        in_parallel(lambda: compile_cache._remove_unused(base / "own"))
        assert {each.name for each in base.iterdir()} == {"own"}


def test_code_of_packages_that_are_not_used_any_more_is_removed_after_a_month(
    settings: Settings, tmp_path: Path
) -> None:
    base = tmp_path / f"kdist-compile-{os.geteuid()}"
    for name, days in (("old", 31), ("recent", 29)):
        fill(base / name, "fxgraph/one")
        os.utime(base / name, (0, time.time() - days * 86_400))
    base.chmod(0o700)
    set_variables(settings)
    own = Path(os.environ[INDUCTOR])
    assert {each.name for each in base.iterdir()} == {"recent", own.name}
