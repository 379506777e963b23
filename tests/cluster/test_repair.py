"""A job whose code failed is mended: what `why` says, or the same by kubectl alone, lets it go on
from its checkpoint.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import Job
from tests.cluster.kinds import RESOURCE
from tests.cluster.namespace import Namespace
from tests.cluster.test_faults import exactly_once

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BROKEN = """
from calm import Calm

class Part(Calm):
    losses = 0

    def loss(self, model, batch):
        self.losses += 1
        if self.losses > 25:
            raise ValueError("the answer is 41")
        return super().loss(model, batch)
"""
MENDED = "from calm import Calm as Part\n"
TRAIN = {"workload": "part:Part", "steps": 40, "checkpoint": {"every": {"steps": 10}}}


def fail(namespace: Namespace, calm: Job, kind: str) -> str:
    """Send a job whose code raises after a checkpoint, and see it fail; returns its file, and
    leaves the code mended.
    """
    namespace.copy_sources()
    code = Path(namespace.home, "src", "part.py")
    code.write_text(BROKEN)
    file = namespace.write(calm(backend=kind, train=TRAIN))
    if kind == "job":
        render(namespace, file, "--claims=only")
        render(namespace, file)
    else:
        namespace.kdist("apply", file)
    namespace.kdist("wait", "digits", "--timeout=4m", code=10, timeout=300)
    code.write_text(MENDED)
    return file


def render(namespace: Namespace, file: str, *options: str) -> None:
    """What a repository of manifests does: no kdist in between."""
    command = [sys.executable, "-m", "kdist", "render", file, *options]
    printed = subprocess.run(
        command,
        cwd=namespace.home,
        env=namespace.environment,
        check=True,
        capture_output=True,
        text=True,
    )
    namespace.kubectl("apply", "--server-side", "-f", "-", stdin=printed.stdout)


def assert_gone_on(namespace: Namespace) -> None:
    namespace.kdist("wait", "digits", "--timeout=4m", timeout=300)
    volume = namespace.volume("digits")
    assert (volume["done"]["outcome"], volume["done"]["step"]) == ("done", 40)
    formed = [event for event in volume["events"] if event["event"] == "generation"]
    assert formed[-1]["from_step"] > 0
    assert exactly_once(volume["steps"], volume["events"])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "statefulset" else pytest.param(kind, marks=pytest.mark.wide)
        for kind in RESOURCE
        if kind != "job"
    ],
)
def test_the_lines_that_why_prints_let_a_mended_job_go_on_from_its_checkpoint(
    namespace: Namespace, calm: Job, kind: str
) -> None:
    file = fail(namespace, calm, kind)
    reported = json.loads(namespace.kdist("why", "digits", "-o", "json"))
    assert reported["cause"] == "user-code"
    assert reported["change"], "it would fail again without"
    typed = " && ".join(reported["commands"]).replace("JOB.yaml", file).split(" && ")
    lines = [shlex.split(line) for line in typed]
    repair = [words[1:] for words in lines if words[1] in ("apply", "restart")]
    assert [words[0] for words in repair] == ["apply", "restart"]
    for words in repair:
        namespace.kdist(*words)
    assert_gone_on(namespace)


@pytest.mark.sampled
def test_a_mended_render_that_kubectl_sends_goes_on_from_the_checkpoint(
    namespace: Namespace, calm: Job
) -> None:
    file = fail(namespace, calm, "job")
    namespace.kubectl("delete", "job", "digits")
    render(namespace, file)
    assert_gone_on(namespace)
