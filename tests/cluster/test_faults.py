"""Processes and pods are taken away from a training: it goes on, each sample is used once, and it
ends well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.cluster.kinds import every_kind
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

KILL = """
import os, signal, sys
os.kill(int(sys.argv[1]), signal.SIGKILL)
"""


def kill_rank(namespace: Namespace) -> None:
    """Kill -9 the process of a rank, in its pod."""
    pod = namespace.pods("digits")[-1]["metadata"]["name"]
    started = [
        json.loads(line)
        for line in namespace.kubectl("logs", pod).splitlines()
        if '"worker-started"' in line
    ]
    namespace.kubectl("exec", pod, "--", "python", "-c", KILL, str(started[-1]["pid"]))


def delete_first(namespace: Namespace) -> None:
    namespace.kubectl(
        "delete", "pod", namespace.pods("digits")[0]["metadata"]["name"], "--wait=false"
    )


def delete_last(namespace: Namespace) -> None:
    namespace.kubectl(
        "delete",
        "pod",
        namespace.pods("digits")[-1]["metadata"]["name"],
        "--wait=false",
        "--grace-period=1",
    )


@every_kind
def test_a_training_that_loses_every_process_and_pod_ends_with_the_weights_of_an_uninterrupted_one(
    namespace: Namespace,
    kind: str,
    calm: Callable[..., dict[str, Any]],
    record_property: Callable[[str, object], None],
) -> None:
    namespace.apply({**calm(), "metadata": {"name": "uninterrupted"}})
    namespace.apply(calm(backend=kind))
    namespace.kdist("wait", "digits", "--for=first-step", "--timeout=3m")
    for fault in (kill_rank, delete_first, delete_last):
        before = namespace.until("both nodes train", partial(training, namespace))
        assert before
        fault(namespace)
        name = f"training went on after {fault.__name__}"
        namespace.until(name, partial(training, namespace, after=int(before["generation"])))
    namespace.kdist("wait", "digits", "--timeout=6m", timeout=400)
    volume = namespace.volume("digits")
    assert volume["done"]["outcome"] == "done"
    assert volume["done"]["step"] == 300
    seen = recoveries(volume["events"])
    record_property("recoveries", json.dumps(seen))
    assert len(seen) >= 3
    assert exactly_once(volume["steps"], volume["events"])
    namespace.kdist("wait", "uninterrupted", "--timeout=6m", timeout=400)
    uninterrupted = namespace.volume("uninterrupted")
    assert recoveries(uninterrupted["events"]) == []
    expected = losses(uninterrupted["steps"])
    found = losses(volume["steps"])
    assert found.keys() == expected.keys()
    # nobody knows a loss whose part a rank took with it
    assert {step: loss for step, loss in found.items() if loss} == {
        step: expected[step] for step, loss in found.items() if loss
    }
    assert sum(loss is None for loss in found.values()) < len(found) / 2
    assert volume["done"]["weights"] == uninterrupted["done"]["weights"]
    assert volume["done"]["metrics"] == uninterrupted["done"]["metrics"]


def training(namespace: Namespace, after: int = 0) -> dict[str, Any] | None:
    """What an agent says, if a group of both nodes is at work that formed later than generation
    `after`.
    """
    for reported in namespace.agents("digits"):
        if (
            reported.get("world_size") == 2
            and (reported.get("step") or 0) > 0
            and reported["generation"] > after
        ):
            return reported
    return None


def recoveries(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each generation but the first: why it formed, from which step it went on, and the seconds
    to its first step.
    """
    found = []
    for formed in (
        event for event in events if event["event"] == "generation" and event["generation"] > 1
    ):
        first = [
            event
            for event in events
            if event["event"] == "first_step" and event["generation"] == formed["generation"]
        ]
        seconds = round(first[0]["time"] - formed["time"], 1) if first else None
        found.append(
            {"reason": formed["reason"], "from_step": formed["from_step"], "seconds": seconds}
        )
    return found


def effective(steps: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The steps that count, by number: one that was done again replaces what followed."""
    kept: dict[int, dict[str, Any]] = {}
    for step in steps:
        kept = {number: each for number, each in kept.items() if number < step["step"]}
        kept[step["step"]] = step
    return kept


def losses(steps: list[dict[str, Any]]) -> dict[int, str | None]:
    """Loss of each step that counts, in hexadecimal: equal means bitwise identical."""
    return {number: step["loss"] for number, step in effective(steps).items()}


def exactly_once(steps: list[dict[str, Any]], events: list[dict[str, Any]]) -> bool:
    """Whether the steps that count use every position of the stream once, and so each sample once
    in each epoch.
    """
    assert events
    counted = effective(steps)
    numbers = list(counted)
    ends = [step["last"] + 1 for step in counted.values()]
    starts = [step["first"] for step in counted.values()]
    return numbers == list(range(1, len(numbers) + 1)) and starts == [0, *ends[:-1]]
