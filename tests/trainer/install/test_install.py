"""The trainer and packages come into a Python that has torch: only what it lacks, only what the
digests say, and what fails is told as Kubernetes and `kdist why` read it.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kdist.render.packages import _pack

pytestmark = pytest.mark.processes


def make_wheel(folder: Path, name: str, requires: str = "") -> str:
    """A wheel with one module; its line for a lock."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    files = {
        f"{name}.py": "answer = 42\n",
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        lines = []
        for file, text in files.items():
            wheel.writestr(file, text)
            digest = base64.urlsafe_b64encode(sha256(text.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{file},sha256={digest},{len(text)}")
        wheel.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,", ""]))
    return f"{name}==1.0 --hash=sha256:{sha256(path.read_bytes()).hexdigest()}"


class Pod:
    """What an init container has: the archive, the list, and an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.wheels, self.record = folder / "wheels", folder / "record"
        self.root, self._archive = folder / "packages", folder / "trainer.zip"
        self._listed = folder / "requirements.txt"
        self._archive.write_bytes(_pack())

    def install(self, *listed: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
        """Run the program as the container does; its event."""
        self._listed.write_text("\n".join(listed) + "\n")
        options = options or ("--no-index", f"--find-links={self.wheels}")
        arguments = [f"--folder={self.root}", f"--archive={self._archive}", *options]
        arguments += [f"--requirements={self._listed}", f"--termination-message={self.record}"]
        done = subprocess.run(
            [sys.executable, "-m", "kdist_trainer.install", *arguments],
            env={"PYTHONPATH": str(self._archive), "PATH": "/usr/bin:/bin", "PIP_RETRIES": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        event: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
        return {**event, "exit": done.returncode}

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
