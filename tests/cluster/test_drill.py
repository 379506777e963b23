"""`kdist drill` on a real cluster: faults in pods, their reports, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kinds import every_kind
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Job = Callable[..., dict[str, Any]]
STEPS = 4000  # more than any drill takes


def begin(namespace: Namespace, document: dict[str, Any]) -> None:
    """A job that trains and has saved a checkpoint."""
    namespace.apply(document)
    namespace.kdist("wait", "digits", "--for=checkpoint", "--timeout=4m", timeout=300)
    namespace.until("both nodes train", lambda: trains(namespace))


def trains(namespace: Namespace) -> bool:
    found = namespace.agents("digits")
    return len(found) == 2 and all(each["state"] == "running" for each in found)


def drill(namespace: Namespace, *words: str) -> dict[str, Any]:
    """The report of a drill, after which both nodes train again."""
    namespace.until("both nodes train", lambda: trains(namespace))
    done = namespace.type_kdist("drill", "digits", "--yes", "-o", "json", *words, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def find_annotations(namespace: Namespace) -> dict[str, str]:
    found: dict[str, str] = namespace.get("configmap", "digits")["metadata"]["annotations"]
    return found


@pytest.mark.sampled
@every_kind
def test_a_rank_an_agent_and_a_pod_are_taken_away_and_every_promise_is_kept(
    namespace: Namespace, kind: str, calm: Job, record_property: Callable[[str, object], None]
) -> None:
    begin(namespace, calm(backend=kind, train={"steps": STEPS}))
    for words in (("rank", "--rank", "0"), ("agent", "--node", "1"), ("pod", "--node", "0")):
        report = drill(namespace, "--fault", *words)
        record_property(words[0], json.dumps(report))
        assert report["kept"] is True
        assert [each["kept"] for each in report["promises"]][:3] == [True, True, True]
        assert report["generation"]["after"] > report["generation"]["before"]
        assert report["stallSeconds"] > 0
        assert "kdist.dev/drill" not in find_annotations(namespace)


@pytest.mark.sampled
def test_a_silent_node_is_waited_for_or_left_and_always_wakes_up(
    namespace: Namespace, calm: Job, tmp_path: Path
) -> None:
    begin(namespace, calm(train={"steps": STEPS}))
    short = drill(namespace, "--fault", "silence", "--for", "2s")
    assert short["kept"] is True
    assert (short["stepsLost"], short["restarts"]) == (0, 0)
    long = drill(namespace, "--fault", "silence", "--node", "1", "--for", "20s")
    assert long["kept"] is True
    assert long["restarts"] >= 1
    output = tmp_path / "interrupted"
    words = ("drill", "digits", "--fault", "silence", "--for", "45s", "--yes")
    namespace.until("both nodes train", lambda: trains(namespace))
    process = namespace.start_kdist(*words, output=output)
    try:
        namespace.until("a node is silent", lambda: len(namespace.agents("digits")) == 1)
    finally:
        process.kill()  # nothing that it could still do wakes the node
        process.wait()
    namespace.until("both nodes train", lambda: trains(namespace), seconds=40)


@pytest.mark.sampled
def test_what_the_job_would_not_survive_or_the_user_may_not_do_is_refused(
    namespace: Namespace, calm: Job
) -> None:
    begin(namespace, calm(train={"steps": STEPS}))
    preview = json.loads(namespace.kdist("drill", "digits", "-o", "json"))
    survives = {each["fault"]: each["survives"] for each in preview["faults"]}
    assert survives == dict.fromkeys(("rank", "agent", "pod", "silence"), True)
    before = {each["metadata"]["uid"] for each in namespace.pods("digits")}
    namespace.kdist("drill", "digits", "--fault", "pod", code=2)
    viewer = f"system:serviceaccount:{namespace.name}:viewer"
    namespace.kubectl("create", "serviceaccount", "viewer")
    namespace.kubectl(
        "create",
        "rolebinding",
        "viewer",
        "--clusterrole=view",
        f"--serviceaccount={namespace.name}:viewer",
    )
    done = namespace.type_kdist("drill", "digits", "--fault", "pod", "--yes", "--as", viewer)
    assert done.returncode in (1, 7), done.stderr
    namespace.kubectl(
        "annotate", "configmap", "digits", "kdist.dev/drill=9999999999 rank", "--overwrite"
    )
    done = namespace.type_kdist("drill", "digits", "--fault", "rank", "--yes")
    assert "another drill is in progress" in done.stderr
    assert {each["metadata"]["uid"] for each in namespace.pods("digits")} == before
    assert all(each["generation"] == 1 for each in namespace.agents("digits"))
