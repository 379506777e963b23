"""What Kubernetes says is shown, whether kdist knows it or not."""

from __future__ import annotations

import pytest

from kdist.diagnose import diagnose
from kdist.status import Snapshot
from tests.cli.diagnose.scenes import FAILED, creating, event, scene
from tests.cli.status.objects import Document, pod

SANDBOX = 'failed to setup network for sandbox "1f": plugin type="bridge" failed'


def refused(reason: str, message: str) -> Document:
    """A pod that the kubelet has refused: no container of it ever ran."""
    return pod(0, phase="Failed", reason=reason, message=message)


@pytest.mark.parametrize(
    ("seen", "cause", "words"),
    [
        (
            scene(
                [creating(0), creating(1)],
                event("FailedCreatePodSandBox", SANDBOX, count=7),
            ),
            "warning",
            ["FailedCreatePodSandBox", "plugin type", "7 times"],
        ),
        (
            scene([creating(0), creating(1)], event("NeverHeardOf", "the moon is full")),
            "warning",
            ["NeverHeardOf: the moon is full"],
        ),
        (
            scene([], event("Odd", "no tokens left", kind="Job")),
            "warning",
            ["Odd: no tokens left"],
        ),
        *[
            (
                scene([refused(reason, message)], state=FAILED),
                "pod-refused",
                [reason, message, "never ran"],
            )
            for reason, message in (
                ("OutOfcpu", "Node didn't have enough resource: cpu, requested: 4000"),
                ("UnexpectedAdmissionError", "Allocate failed due to no devices"),
                ("NodeShutdown", "Pod was rejected as the node is shutting down."),
            )
        ],
    ],
)
def test_what_no_rule_knows_is_shown_as_it_is(seen: Snapshot, cause: str, words: list[str]) -> None:
    found = diagnose(seen)
    assert found.cause == cause
    told = " ".join([found.sentence, *found.evidence])
    assert [word for word in words if word not in told] == []
    assert "wait a moment" not in found.fix
    assert not any(command.startswith("kdist logs") for command in found.commands)


def test_a_warning_that_was_overcome_or_is_old_is_not_shown() -> None:
    early = event("FailedCreatePodSandBox", SANDBOX, ago=100)
    late = event("Pulling", "Pulling image", ago=10)
    assert diagnose(scene([creating(0), creating(1)], early, late)).cause == "starting"
    old = event("FailedCreatePodSandBox", SANDBOX, ago=2000)
    assert diagnose(scene([creating(0), creating(1)], old)).cause == "starting"
