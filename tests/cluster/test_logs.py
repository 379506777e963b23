"""`kdist logs -f` follows a job on a real cluster from before its first pod to its end, over a pod
that is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def read_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(pod, event) of every raw line that holds one."""
    found = []
    for line in text.splitlines():
        pod, _, rest = line.partition("] ")
        if pod.startswith("[") and rest.startswith('{"time"'):
            found.append((pod[1:], json.loads(rest)))
    return found


@pytest.mark.sampled
def test_logs_are_followed_over_a_replaced_pod_and_no_line_comes_twice(
    namespace: Namespace, calm: Callable[..., dict[str, Any]]
) -> None:
    namespace.apply(calm(backend="job"))
    output = namespace.home / "logs.txt"
    following = namespace.start_kdist("logs", "digits", "-f", "--raw", output=output)
    try:
        namespace.until(
            "a checkpoint is told of", lambda: "checkpoint-committed" in output.read_text()
        )
        victim = namespace.pods("digits")[1]["metadata"]["name"]
        namespace.kubectl("delete", "pod", victim, "--wait=false")
        namespace.until(
            "the job has ended and the command with it", lambda: following.poll() is not None
        )
    finally:
        following.kill()
    assert following.returncode == 0, output.read_text()[-2000:]
    lines = [line for line in output.read_text().splitlines() if '{"time"' in line]
    assert len(lines) == len(set(lines))
    events = read_events(output.read_text())
    generations = {
        event["generation"] for _, event in events if event["event"] == "rendezvous-completed"
    }
    assert len(generations) >= 2
    steps = [event["step"] for _, event in events if event["event"] == "checkpoint-committed"]
    assert steps[-1] == 300
    assert {event["rank"] for _, event in events if event["event"] == "worker-started"} == {0, 1}
    assert "digits: Succeeded" in output.read_text().splitlines()[-1]
    only = read_events(namespace.kdist("logs", "digits", "--rank", "1", "--raw"))
    assert {event["rank"] for _, event in only if "rank" in event} == {1}
    check_kept_logs(namespace, generations)


def check_kept_logs(namespace: Namespace, generations: set[int]) -> None:
    """What is shown when no pod is left."""
    namespace.kubectl("delete", "pods", "--all")
    last = read_events(namespace.kdist("logs", "digits", "--raw"))
    assert {node for node, _ in last} == {"digits-0", "digits-1"}
    assert "done" in {event["event"] for _, event in last}
    first = namespace.kdist("logs", "digits", "--raw", "--generation", str(min(generations)))
    assert {event["rank"] for _, event in read_events(first) if "rank" in event} == {0, 1}
    assert "training-started" in first
    assert '"event":"done"' not in first.replace(" ", "")
