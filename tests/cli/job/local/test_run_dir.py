"""The run folder: one owner, one run id until `--fresh`, nothing deleted."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kdist.errors import KdistError
from kdist.job.local import run_dir as folders
from kdist.job.local.run_dir import RunFolder
from kdist.spec import TrainingJob, job_document


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    return tmp_path / "runs"


def invoke(*, fresh: bool = False, checkpoints: Path | None = None) -> RunFolder:
    """One whole invocation."""
    folder = RunFolder.open("job", fresh=fresh, checkpoints=checkpoints)
    folder.begin()
    folder.end("done")
    folder.close()
    return folder


def test_without_a_home_the_runs_are_next_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KDIST_HOME")
    monkeypatch.chdir(tmp_path)
    assert folders.home() == tmp_path / ".kdist"


def test_a_second_invocation_is_the_same_run_with_a_new_rendezvous(home: Path) -> None:
    first, second = invoke(), invoke()
    assert first.run_id == second.run_id
    assert (first.invocation, second.invocation) == (1, 2)
    assert first.store != second.store
    assert [path.name for path in home.glob("job/rendezvous-*")] == ["rendezvous-2"]


def test_the_rendezvous_that_agents_are_planned_for_is_that_of_the_invocation_that_begins() -> None:
    invoke()
    folder = RunFolder.open("job")
    planned = folder.store
    folder.begin()
    assert folder.store == planned
    assert planned.parent.is_dir()
    folder.close()


def test_who_only_asks_whether_a_run_is_at_work_keeps_none_from_starting(home: Path) -> None:
    invoke()
    with (home / "job" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        asking = threading.Timer(0.2, fcntl.flock, (lock, fcntl.LOCK_UN))
        asking.start()
        folder = RunFolder.open("job")
        asking.join()
    assert folder.number == 2, "it waited for the moment that the look took"
    folder.close()


def test_a_run_folder_on_a_full_disk_is_refused_in_words(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.open("job")
    monkeypatch.setattr(folders, "write_json", lambda *_: Path("/dev/full").write_text("x"))
    with pytest.raises(
        KdistError,
        match=f"the run folder {home / 'job'} cannot be written: No space left on device",
    ):
        folder.begin()
    folder.close()


def test_notes_of_agents_that_are_gone_do_not_outlive_their_invocation(home: Path) -> None:
    folder = invoke()
    (folder.node("node-0") / "agent.json").write_text("{}")
    (folder.node("node-0") / "log").write_text("kept")
    invoke()
    assert sorted(path.name for path in (home / "job" / "node-0").iterdir()) == ["log"]


def test_a_fresh_run_puts_the_old_one_aside_whole(home: Path) -> None:
    old = invoke()
    (old.checkpoints / "kept").touch()
    new = invoke(fresh=True)
    assert new.run_id != old.run_id
    assert new.invocation == 1
    assert [path.parent for path in new.moved] == [home]
    assert (new.moved[0] / "checkpoints" / "kept").exists()
    assert json.loads((new.moved[0] / "run.json").read_text())["run_id"] == old.run_id


def test_a_fresh_run_puts_checkpoints_of_the_old_one_aside_wherever_they_are(
    tmp_path: Path,
) -> None:
    elsewhere = tmp_path / "disk" / "checkpoints"
    invoke(checkpoints=elsewhere)
    (elsewhere / "kept").touch()
    new = invoke(fresh=True, checkpoints=elsewhere)
    assert list(elsewhere.iterdir()) == []
    assert {path.parent for path in new.moved} == {elsewhere.parent, new.root.parent}
    assert any((moved / "kept").exists() for moved in new.moved)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_checkpoints_of_an_archived_run_are_its_own(tmp_path: Path, elsewhere: bool) -> None:
    place = tmp_path / "disk" if elsewhere else None
    old = invoke(checkpoints=place)
    (old.checkpoints / "kept").touch()
    archive = invoke(fresh=True, checkpoints=place).moved[-1]
    assert (folders.folder_of(archive) / "kept").exists()
    assert folders.location_of(archive).text == str(folders.folder_of(archive))


def test_a_fresh_run_puts_aside_what_a_deleted_one_has_left() -> None:
    old = invoke()
    (old.checkpoints / "kept").touch()
    folders.delete(old.root, keep=("checkpoints",))
    new = invoke(fresh=True)
    assert list(new.checkpoints.iterdir()) == []
    assert [(each / "checkpoints" / "kept").exists() for each in new.moved] == [True]


def test_fresh_without_an_old_run_moves_nothing() -> None:
    assert invoke(fresh=True).moved == []


def test_two_fresh_runs_within_a_second_keep_both_old_ones(home: Path) -> None:
    ids = [invoke(fresh=True).run_id for _ in range(4)]
    kept = [json.loads(path.read_text())["run_id"] for path in home.glob("*/run.json")]
    assert sorted(kept) == sorted(ids)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_is_at_work_lets_nobody_else_in_and_says_who_it_is(fresh: bool) -> None:
    folder = RunFolder.open("job")
    with pytest.raises(KdistError, match=rf"another kdist run \(pid {os.getpid()}\) is active in"):
        RunFolder.open("job", fresh=fresh)
    folder.close()
    RunFolder.open("job").close()


@pytest.mark.processes
def test_the_lock_of_a_killed_owner_is_free(home: Path) -> None:
    code = (
        "import os, signal; from kdist.job.local.run_dir import RunFolder; RunFolder.open('job'); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (home / "job" / "lock").read_text().strip().isdigit()
    RunFolder.open("job").close()


def test_a_folder_that_cannot_be_made_is_an_error_with_its_reason(home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(KdistError, match=r"cannot be used: (Not a directory|File exists)"):
        RunFolder.open("job")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run_id": 5, "invocations": []}'])
def test_a_damaged_note_begins_a_new_run(home: Path, text: str) -> None:
    (home / "job").mkdir(parents=True)
    (home / "job" / "run.json").write_text(text)
    assert invoke().invocation == 1


def test_done_is_only_what_this_run_did(tmp_path: Path) -> None:
    folder = RunFolder.open("job")
    assert folder.done() is None
    folder.checkpoints.mkdir()
    (folder.checkpoints / "DONE").write_text(json.dumps({"run_id": "another", "step": 5}))
    assert folder.done() is None
    (folder.checkpoints / "DONE").write_text(json.dumps({"run_id": folder.run_id, "step": 5}))
    done = folder.done()
    assert done is not None
    assert done["step"] == 5
    folder.close()


def test_scratch_is_for_its_owner_alone() -> None:
    folder = RunFolder.open("job")
    assert folder.node("node-0").stat().st_mode & 0o777 == 0o700
    folder.close()


def test_a_run_is_one_scripts_and_refused_to_another_until_it_is_put_aside(
    home: Path, tmp_path: Path
) -> None:
    first, second = str(tmp_path / "mnist" / "main.py"), str(tmp_path / "minGPT" / "main.py")
    # a run of before scripts were noted becomes the first one's
    for script in (None, first, first):
        folder = RunFolder.open("main", script=script)
        folder.begin()
        folder.close()
    for other in (second, "-m minGPT.main"):
        with pytest.raises(KdistError, match=f"another script, {first}") as reported:
            RunFolder.open("main", script=other)
        assert "--fresh" in str(reported.value.hint)
    fresh = RunFolder.open("main", script=second, fresh=True)
    assert fresh.run["script"] == os.path.relpath(second, home / "main")
    fresh.close()


def test_a_function_that_was_edited_is_the_script_of_its_run(home: Path) -> None:
    job = TrainingJob.model_validate(job_document("ck", script={"path": "run_ck.py"}))

    def begin(name: str) -> RunFolder:
        folder = RunFolder.open("ck", script=str(folders.generated() / name))
        folder.begin()
        folder.close()
        return folder

    first = begin("ck-0123456789ab/run_ck.py")
    assert not first.edited
    again = begin("ck-ba9876543210/run_ck.py")
    assert (again.edited, again.run_id) == (True, first.run_id)
    assert not begin("ck-ba9876543210/run_ck.py").edited
    with pytest.raises(KdistError, match="another script"):
        begin("other-ba9876543210/run_other.py")
    done = {"job": {"script": {"path": "run_ck.py"}}}
    train_json = json.dumps(done["job"])
    assert folders.is_finished(job, done, train_json)
    with pytest.raises(KdistError, match="its code or arguments were edited since"):
        folders.is_finished(job, done, train_json, edited=True)


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_what_a_run_writes_is_its_users_alone_also_where_an_older_run_was_open(
    mask: int, home: Path
) -> None:
    (home / "job").mkdir(parents=True)
    (home / "job" / "run.json").write_text("{}")
    (home / "job" / "node-0").mkdir()
    for path in (home / "job", home / "job" / "node-0"):
        path.chmod(0o777)
    before = os.umask(mask)
    try:
        folder = RunFolder.open("job")
        folder.begin("{}", command=["run", "--token=x"])
        folders.open_private(folder.log("node-0"), "ab").close()
        folders.write_json(folder.root / "report.json", {})
        folder.end("done")
        folder.close()
    finally:
        os.umask(before)
    made = [path.relative_to(home).as_posix() for path in (home / "job").rglob("*")]
    assert {"job/run.json", "job/train.json", "job/report.json", "job/node-0/log"} <= set(made)
    assert [path for path in (home / "job").rglob("*") if path.stat().st_mode & 0o077] == []
    assert (home / "job").stat().st_mode & 0o777 == 0o700


def test_a_checkpoint_folder_of_the_users_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    invoke(checkpoints=tmp_path / "shared")
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755


def test_a_log_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        folders.open_private(tmp_path / "log", "ab")
    assert not (tmp_path / "other").exists()
