"""The trainer and packages come into a Python that has torch: only what it lacks, only what the
digests say, and what fails is told as Kubernetes and `kdist why` read it.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import signal
import subprocess
import sys
import time
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kdist.render.packages import _pack
from tests.hostile import serve, stay_silent
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, Entry, S3Server

pytestmark = pytest.mark.processes
MODULE = "kdist_trainer.install"
Started = subprocess.Popen[str]


def make_wheel(folder: Path, name: str, requires: str = "", version: str = "1.0") -> str:
    """A wheel with one module; its line for a lock."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": "answer = 42\n",
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        lines = []
        for file, text in files.items():
            wheel.writestr(file, text)
            digest = base64.urlsafe_b64encode(sha256(text.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{file},sha256={digest},{len(text)}")
        wheel.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,", ""]))
    return f"{name}=={version} --hash=sha256:{sha256(path.read_bytes()).hexdigest()}"


def wait(installation: Started) -> dict[str, Any]:
    """The event of an installation that has ended."""
    event: dict[str, Any] = json.loads(installation.communicate()[1].splitlines()[-1])
    return {**event, "exit": installation.returncode}


class Pod:
    """What an init container has: the archive, the list, and an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.wheels, self.record = folder / "wheels", folder / "record"
        self.root, self._archive = folder / "packages", folder / "trainer.zip"
        self._listed = folder / "requirements.txt"
        self._archive.write_bytes(_pack())
        self.cache: Path | None = None
        self.variables: dict[str, str] = {}

    def start(self, *listed: str, options: tuple[str, ...] = (), program: str = "") -> Started:
        """Run the installation as the container does, or a program in its place."""
        self._listed.write_text("\n".join(listed) + "\n")
        options = options or ("--no-index", f"--find-links={self.wheels}")
        arguments = [f"--folder={self.root}", f"--archive={self._archive}", *options]
        arguments += [f"--requirements={self._listed}", f"--termination-message={self.record}"]
        arguments += [f"--cache={self.cache}"] if self.cache is not None else []
        path = {"PYTHONPATH": str(self._archive), "PATH": "/usr/bin:/bin", "PIP_RETRIES": "1"}
        return subprocess.Popen(
            [sys.executable, *(["-c", program] if program else ["-m", MODULE]), *arguments],
            env={**path, **self.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def install(self, *listed: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
        """Run the installation to its end; its event."""
        return wait(self.start(*listed, options=options))

    def run(self, program: str) -> str:
        """What a program prints that runs with the packages."""
        environment = {"PYTHONPATH": str(self.root / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout


def test_packages_and_the_trainer_are_there_and_what_the_image_has_is_not_installed_again(
    tmp_path: Path,
) -> None:
    pod = Pod(tmp_path)
    make_wheel(pod.wheels, "tiny", "torch>=2")
    event = pod.install("tiny", "numpy>=1.26")
    assert event["exit"] == 0, event
    assert (event["event"], event["level"]) == ("packages-installed", "info")
    assert "the trainer and 1 packages in" in event["message"]
    program = "import tiny, kdist_trainer, torch; print(kdist_trainer.__file__, torch.__file__)"
    ours, torch = pod.run(program).split()
    assert ours == str(pod.root / "site/kdist_trainer/__init__.py")
    assert not torch.startswith(str(pod.root))
    assert list((pod.root / "site/kdist_trainer/__pycache__").glob("__init__.*.pyc"))
    assert pod.install("tiny")["exit"] == 0, "the container may be started again"


@pytest.mark.sampled
def test_a_lock_installs_exactly_what_its_digests_say(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    line = make_wheel(pod.wheels, "tiny", "nowhere>=3")
    strict = ("--no-deps", "--require-hashes", "--no-index", f"--find-links={pod.wheels}")
    assert pod.install(line, options=strict)["exit"] == 0
    other = Pod(tmp_path)
    other.root = tmp_path / "other"
    event = other.install(f"tiny==1.0 --hash=sha256:{'0' * 64}", options=strict)
    assert event["exit"] == 65
    assert "DO NOT MATCH THE HASHES" in event["message"]
    record = json.loads(other.record.read_text())
    assert (record["code"], record["cause"], record["outcome"]) == (65, "data", "failed")
    assert record["message"] == event["message"]


@pytest.mark.sampled
def test_a_package_that_does_not_exist_ends_the_job_and_an_index_that_is_away_is_tried_again(
    tmp_path: Path,
) -> None:
    pod = Pod(tmp_path)
    pod.wheels.mkdir()
    event = pod.install("no-such-package")
    assert (event["exit"], event["level"]) == (65, "error")
    assert "No matching distribution found for no-such-package" in event["message"]
    away = pod.install("tiny", options=("--index-url=http://127.0.0.1:9/simple",))
    assert away["exit"] == 203, away
    assert json.loads(pod.record.read_text())["cause"] == "storage"


@pytest.mark.sampled
def test_an_installation_that_was_killed_begins_again_and_leaves_nothing(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    line = make_wheel(pod.wheels, "tiny")
    with serve(stay_silent) as server:
        url = f"--index-url=http://127.0.0.1:{server.port}/simple"
        options = (url, f"--find-links={pod.wheels}")
        for number in (1, 2):
            begun = pod.start(line, options=options)
            while server.connections < number:
                assert begun.poll() is None, begun.communicate()
                time.sleep(0.02)
            left = list(pod.root.glob(".unfinished-*"))
            assert (left[0] / "built" / "site" / "kdist_trainer").is_dir()
            assert not (pod.root / "site").exists(), "a half tree is no tree"
            if number == 1:  # of a pod that is deleted
                begun.terminate()
                assert begun.wait() == 143
                assert not list(pod.root.glob(".unfinished-*"))
            else:
                os.killpg(begun.pid, signal.SIGKILL)  # as a container is
                begun.wait()
    assert pod.install(line, options=options)["exit"] == 0
    assert pod.run("import tiny; print(tiny.answer)") == "42\n"
    assert not list(pod.root.glob(".unfinished-*"))


@pytest.mark.sampled
def test_pods_that_share_a_cache_install_once_and_never_take_a_damaged_tree(tmp_path: Path) -> None:
    pods = [Pod(make_folder(tmp_path / name)) for name in ("one", "two", "three")]
    line = make_wheel(tmp_path / "wheels", "tiny")
    options = ("--no-deps", "--require-hashes", "--no-index", f"--find-links={tmp_path}/wheels")
    cache = tmp_path / "cache"
    for pod in pods:
        pod.cache = cache
    both = [wait(each) for each in [pod.start(line, options=options) for pod in pods[:2]]]
    assert [each["exit"] for each in both] == [0, 0], both
    assert sorted("they were there" in each["message"] for each in both) == [False, True]
    for pod in pods[:2]:
        assert pod.run("import tiny, kdist_trainer; print(tiny.answer)") == "42\n"
    (tree,) = [each for each in cache.iterdir() if (each / "site").is_dir()]
    (tree / "site" / "tiny.py").write_text("")
    again = pods[2].install(line, options=options)
    assert "they were there" not in again["message"]
    assert pods[2].run("import tiny; print(tiny.answer)") == "42\n"
    assert "they were there" in pods[2].install(line, options=options)["message"]
    other = make_wheel(tmp_path / "wheels", "tiny", version="2.0")
    assert "they were there" not in pods[2].install(other, options=options)["message"]
    assert not list(cache.glob(".unfinished-*"))


@pytest.mark.sampled
def test_a_cache_without_locks_or_writers_serves_and_what_cannot_be_read_is_left_alone(
    tmp_path: Path,
) -> None:
    pod = Pod(tmp_path)
    make_wheel(pod.wheels, "tiny")
    pod.cache = make_folder(tmp_path / "cache")
    others = make_folder(pod.cache / ".unfinished-others")
    assert wait(pod.start("tiny", program=without("fcntl.flock", "ENOLCK")))["exit"] == 0
    (tree,) = [each for each in pod.cache.iterdir() if (each / "site").is_dir()]
    assert others.is_dir(), "another pod may be at work in it"
    lock = tree.with_suffix(".lock")
    lock.unlink()
    lock.mkdir()  # which cannot be opened
    assert "they were there" in pod.install("tiny")["message"]
    lock.rmdir()
    refused = wait(pod.start("tiny", "numpy", program=without("tempfile.mkdtemp", "EROFS")))
    assert refused["exit"] == 64
    assert "must be able to read and write there" in refused["message"]
    os.utime(others, (0, 0))
    note = tree / "files.sha256"
    note.unlink()
    note.symlink_to(note)
    assert pod.install("tiny")["exit"] == 203
    assert (tree / "site" / "tiny.py").exists(), "ranks of other jobs may use it"
    note.unlink()
    host = f".unfinished-{tree.name}-{platform.node()}"
    make_folder(pod.cache / f"{host}@left")
    neighbours = make_folder(pod.cache / f"{host}-0@left")
    assert "they were there" not in pod.install("tiny")["message"]
    assert list(pod.cache.glob(".unfinished-*")) == [neighbours], "a lock may hold on one node"


def without(function: str, error: str) -> str:
    """The installation in a system where a function fails."""
    return (
        "import errno, fcntl, os, runpy, tempfile\n"
        f"def fail(*_): raise OSError(errno.{error}, os.strerror(errno.{error}))\n"
        f"{function} = fail; runpy.run_module('{MODULE}', run_name='__main__')"
    )


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.sampled
def test_a_version_of_the_image_that_does_not_fit_is_named_before_anything_runs(
    tmp_path: Path,
) -> None:
    pod = Pod(tmp_path)
    make_wheel(pod.wheels, "torch", version="2.1.2")
    event = pod.install("torch==2.1.2")
    assert event["exit"] == 64
    assert "the image has torch 2.1.2, where torch>=2.13 is needed" in event["message"]
    old = "import runpy, sys; sys.version_info = (3, 10, 4, 'final', 0); sys.argv[0] = ''; "
    refused = pod.start("tiny", program=f"{old} runpy.run_module('{MODULE}', run_name='__main__')")
    message = "spec.install: the image is Python 3.10, and 3.11 is needed"
    refused.communicate()
    record = json.loads(pod.record.read_text())
    assert (refused.returncode, record["code"], record["message"]) == (64, 64, message)


@pytest.mark.sampled
def test_wheels_come_from_a_bucket_and_what_is_not_in_it_is_said(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    make_wheel(pod.wheels, "tiny")
    with S3Server() as server:
        for wheel in pod.wheels.iterdir():
            server.objects[f"team/{wheel.name}"] = Entry(wheel.read_bytes(), '"first"', 0.0)
        pod.variables = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        url, endpoint = f"--url=s3://{BUCKET}/team", f"--endpoint={server.endpoint}"
        arguments = (url, endpoint, "--field=spec.install.wheels")
        options = ("--no-index", *(f"--wheels={each}" for each in arguments), "--needed=obstore")
        event = pod.install("tiny", options=options)
        assert event["exit"] == 0, event
        assert pod.run("import tiny; print(tiny.answer)") == "42\n"
        options = (options[0], f"--wheels=--url=s3://{BUCKET}/gone", *options[2:])
        failed = pod.start("tiny", options=options)
        failed.communicate()
    assert failed.returncode == 65
    record = json.loads(pod.record.read_text())
    assert "spec.install.wheels: there is neither an object" in record["message"]
