"""What a person reads on a terminal of 80 columns after each command that takes a job, in five
situations: the job is on a cluster, it is an active or an ended run on this machine, nothing has
its name, or there is neither a run nor a cluster. The file `SITUATION.txt` holds them.

`KDIST_REGENERATE=1 pytest tests/cli/situations` writes the texts again, to be read before they are
committed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kdist.app import COMMANDS, load_command
from tests.cli.cluster.api import write_kubeconfig
from tests.cli.cluster.conftest import Serve, _hurry, serve
from tests.cli.situations import runs
from tests.cli.situations.cluster import JOB, Cluster
from tests.cli.situations.terminal import show
from tests.cli.status import objects

__all__ = ["_hurry", "serve"]

HERE = Path(__file__).parent
LOOKS = (
    "get digits",
    "status digits",
    "logs digits --tail 2",
    "wait digits --timeout 0",
    "events digits",
    "why digits",
    "top digits --once",
    "profile digits --steps 2",
    "report digits",
    "checkpoints digits",
    "exec digits -- echo hello",
    "port-forward digits :9401",
)
TENSORBOARD = "port-forward digits :tensorboard"
SCALE = "scale digits --nodes 3 --no-wait"
CHANGES = (
    SCALE,
    "resume digits",
    "restart digits",
    "restart digits --fresh",
    "recover digits",
    "drill digits --fault rank",
    "suspend digits",
    "delete digits",
)
SUSPENDED = (
    "suspend digits",
    "status digits",
    "wait digits --timeout 0",
    "why digits",
    "resume digits",
)
FILES = ("diff job.yaml", "apply job.yaml")
TYPED = {
    "job-on-a-cluster": (
        *("apply job.yaml", *LOOKS, "diff job.yaml", *CHANGES[:-1]),
        *(*SUSPENDED, "delete digits"),
    ),
    "active-run": (*LOOKS, TENSORBOARD, *CHANGES[:-1], *SUSPENDED[:-1], "delete digits"),
    "ended-run": (*LOOKS, TENSORBOARD, *CHANGES),
    "unknown-name": (*LOOKS, TENSORBOARD, *CHANGES),
    "no-cluster": (*LOOKS, TENSORBOARD, *CHANGES, *FILES),
}
INTERRUPTED = {"port-forward digits :9401": "Forwarding from", TENSORBOARD: "http://"}
WAY_OUT = re.compile(r"^(Hint|Next): \S", re.MULTILINE)

# A command that takes a job has one of these parameters.
JOB_PARAMETERS = {"job", "jobs", "names", "words"}
WITHOUT_SITUATION = {"run"}  # its file becomes a run here, whatever there is


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory with a job.yaml. Its path always has the same length, so that lines
    break at the same word.
    """
    found = Path(tempfile.mkdtemp(prefix="kdist-", dir="/tmp"))
    monkeypatch.chdir(found)
    monkeypatch.setenv("HOME", str(found))
    monkeypatch.setenv("TERM", "dumb")  # no live views
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("KUBECONFIG", "KDIST_HOME", "KDIST_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(["Linux", "laptop", "", "", ""]))
    (found / "job.yaml").write_text(JOB)
    yield found
    shutil.rmtree(found)


@pytest.fixture(params=TYPED)
def situation(
    request: pytest.FixtureRequest, home: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Its name, as soon as it is there."""
    name: str = request.param
    ended = name == "ended-run"
    now = runs.AT + (600 if ended else 0)
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(objects, "NOW", datetime.fromtimestamp(now, UTC))
    with ExitStack() as stack:
        if name != "no-cluster":
            is_local = name.endswith("-run")
            root = runs.write_run(home if is_local else home / "pods", ended=ended)
            if not ended:
                stack.enter_context(runs.activate(root))
            if not is_local:
                write_kubeconfig(home / "config", serve(Cluster(root)).url)
                monkeypatch.setenv("KUBECONFIG", str(home / "config"))
            if name == "unknown-name":  # of a job digit, next to the job digits
                show("apply", "job.yaml")
        yield name


def type_in(command: str, home: Path) -> str:
    """The command with what it prints and its exit code."""
    code, text = show(*command.split(), press_at=INTERRUPTED.get(command, ""))
    assert "Traceback" not in text
    assert "internal error" not in text
    return f"$ kdist {command}\n{mask(text, home)}[exit {code}]\n"


def mask(text: str, home: Path) -> str:
    """The text with what is never the same replaced by words of the same length."""
    text = text.replace(str(home), "/home/me/my-project")
    text = re.sub(r"127\.0\.0\.1:\d{5}", "127.0.0.1:54321", text)
    text = re.sub(r"(run |digits-train-)[0-9a-f]{8,}", r"\1c0ffee42", text)
    return re.sub(r"\(pid \d+\)", "(pid 12345)", text)


@pytest.mark.sampled
def test_every_command_says_what_is_there_and_what_to_type_next(situation: str, home: Path) -> None:
    job = "digit" if situation == "unknown-name" else "digits"
    texts = [type_in(each.replace("digits", job), home) for each in TYPED[situation]]
    file = HERE / f"{situation}.txt"
    if os.environ.get("KDIST_REGENERATE"):
        file.write_text("\n".join(texts))
    assert "\n".join(texts) == file.read_text()
    without = [text for text in texts if "\nError: " in text and not WAY_OUT.search(text)]
    assert without == []


@pytest.mark.parametrize("situation", TYPED)
def test_every_command_that_takes_a_job_is_among_them(situation: str) -> None:
    taking = {
        name
        for section in COMMANDS.values()
        for name in section
        for parameter in load_command(name).params
        if parameter.name in JOB_PARAMETERS
    }
    assert taking - {each.split()[0] for each in TYPED[situation]} == WITHOUT_SITUATION & taking


@pytest.mark.parametrize("situation", ["unknown-name", "no-cluster"])
def test_what_does_not_exist_is_reported_by_every_command_in_the_same_words(situation: str) -> None:
    parts = (HERE / f"{situation}.txt").read_text().split("\n\n")
    texts = {part.split("\n", 1)[1].strip() for part in parts if "job.yaml" not in part}
    assert len(texts) == 1, texts
