"""What one namespace writes does not hold up the jobs of another: TrainingJobs as large as the API
server takes, jobs whose objects it refuses, and pods that claim to be a job's. The controller has
its rights in the whole cluster.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.attempts import LABELS, PAUSED
from tests.cluster.conftest import Job
from tests.cluster.controller import SELECTOR
from tests.cluster.tenants import ALICE, EVE, Tenants
from tests.cluster.test_tenants import tenants

__all__ = ["tenants"]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.needs("helm", "whole-cluster"),
    pytest.mark.timeout(900),
]

Report = Callable[[str], None]
HUGE, REFUSED = 10, 16
SPEC_BYTES = 900_000
SECONDS = 10.0
"""In which the job of a neighbour has its workload, on a loaded machine."""
IDLE: dict[str, Any] = {
    "backend": "job",
    "nodes": 1,
    "nodeSelector": {"kdist.dev/none": "such"},
    "checkpoints": None,
}
_MEMORY = """
from pathlib import Path
for name in ("memory/memory.max_usage_in_bytes", "memory.peak", "memory.current"):
    path = Path("/sys/fs/cgroup", name)
    if path.exists():
        print(int(path.read_text()) >> 20)
        break
"""


def named(document: dict[str, Any], name: str, **spec: Any) -> dict[str, Any]:
    """The TrainingJob under another name, with other fields."""
    return {**document, "metadata": {"name": name}, "spec": {**document["spec"], **spec}}


def seconds_until_made(tenants: Tenants, document: dict[str, Any], name: str) -> float:
    """Create a TrainingJob of alice's, and measure until its workload is there; then delete it."""
    began = time.monotonic()
    tenants.create(ALICE, named(document, name))
    tenants.a.until(f"the Job {name}", lambda: tenants.a.get("job", name), 120)
    seconds = time.monotonic() - began
    tenants.kubectl(ALICE, "delete", "trainingjob", name, "--wait=false")
    return seconds


def replicas(tenants: Tenants) -> list[dict[str, Any]]:
    return tenants.system.find("pods", SELECTOR)


def restarts(tenants: Tenants) -> dict[str, int]:
    """How often each replica of the controller has been started again."""
    return {
        pod["metadata"]["name"]: sum(
            each["restartCount"] for each in pod["status"].get("containerStatuses") or ()
        )
        for pod in replicas(tenants)
    }


def memory(tenants: Tenants) -> list[str]:
    """The most that each replica has used, in MiB."""
    names = [pod["metadata"]["name"] for pod in replicas(tenants)]
    line = ("--", "python", "-c", _MEMORY)
    return [tenants.system.kubectl("exec", name, *line).strip() for name in names]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Print what a reader asks for."""

    def write(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{text}")

    return write


def test_trainingjobs_as_large_as_the_server_takes_end_no_controller_and_hold_up_nobody(
    tenants: Tenants, job: Job, report: Report
) -> None:
    document = job(**IDLE)
    before, used = restarts(tenants), memory(tenants)
    calm = seconds_until_made(tenants, document, "calm")
    values = [{"": 0}] * (SPEC_BYTES // len('{"":0},'))
    options = {**document["spec"]["train"], "options": {"values": values}}
    for number in range(HUGE):
        tenants.create(EVE, named(document, f"huge-{number}", train=options))
    crowded = seconds_until_made(tenants, document, "crowded")

    def refused() -> list[str]:
        message = "{.status.conditions[?(@.type=='Accepted')].message}{'\\n'}"
        line = ("get", "trainingjobs", "-o", f"jsonpath={{range .items[*]}}{message}{{end}}")
        found = tenants.b.kubectl(*line)
        messages = [line for line in found.splitlines() if "values" in line]
        return messages if len(messages) == HUGE else []

    messages = tenants.b.until("each is refused", refused, 120)
    leader = replicas(tenants)[0]["metadata"]["name"]
    tenants.system.kubectl("delete", "pod", leader, "--grace-period=0", "--force")
    tenants.system.kubectl("rollout", "status", "deployment", "--timeout=120s")
    again = seconds_until_made(tenants, document, "again")
    report(
        f"the workload of a neighbour's job: {calm:.1f} s before, {crowded:.1f} s with them, "
        f"{again:.1f} s with them after a replica was killed; MiB at most: {used} before, "
        f"{memory(tenants)} after; {messages[0]}\n"
    )
    assert {name: count for name, count in restarts(tenants).items() if name in before} == {
        name: count for name, count in before.items() if name != leader
    }, "no replica was started again"
    assert not any(restarts(tenants).values())
    assert max(crowded, again) < SECONDS + calm


def test_jobs_whose_objects_the_server_refuses_hold_up_no_other_namespace(
    tenants: Tenants, job: Job, report: Report
) -> None:
    document = job(**IDLE)
    calm = seconds_until_made(tenants, document, "calm")
    broken = {"spec": {"schedulingGates": [{"name": "not a name"}]}}
    for number in range(REFUSED):
        tenants.create(EVE, named(document, f"refused-{number}", podTemplate=broken))

    def tried() -> bool:
        logged = "".join(
            tenants.system.kubectl("logs", pod["metadata"]["name"]) for pod in replicas(tenants)
        )
        return all(f"/refused-{number}: " in logged for number in range(REFUSED))

    tenants.b.until("each was tried", tried, 120)
    measured = [seconds_until_made(tenants, document, f"crowded-{number}") for number in range(5)]
    told = tenants.b.get("trainingjob", "refused-0")["status"]["conditions"]
    report(
        f"the workload of a neighbour's job: {calm:.1f} s before, with them "
        f"{', '.join(f'{each:.1f}' for each in measured)} s; a refused one says: {told}\n"
    )
    assert max(measured) < SECONDS + calm


FAKE = """
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
STATUS = json.dumps({
    "job": "digits", "phase": "failed", "state": "failed", "cause": "user_code", "format": 1,
    "nodes": {"min": 1, "max": 1, "wanted": 0}, "wanted_nodes": 0, "outcome": "failed",
    "restarts": 99, "step": 10**9,
}).encode()
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", str(len(STATUS)))
        self.end_headers()
        self.wfile.write(STATUS)
HTTPServer(("", 9401), Handler).serve_forever()
"""


def test_a_pod_with_a_jobs_labels_and_a_status_of_its_own_neither_fails_nor_scales_the_job(
    tenants: Tenants, job: Job
) -> None:
    document = job(**{**IDLE, "backend": "statefulset", "nodes": 2})
    tenants.create(ALICE, document)
    tenants.a.until("the StatefulSet", lambda: tenants.a.get("statefulset", "digits"))
    container = {
        "name": "trainer",
        "image": tenants.a.environment["KDIST_IMAGE"],
        "command": ["python", "-c", FAKE],
        "ports": [{"name": "metrics", "containerPort": 9401}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    metadata = {"name": "digits-0-impostor", "labels": LABELS}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    tenants.create(ALICE, {**pod, "spec": {**PAUSED, "containers": [container]}})
    line = ("wait", "pod/digits-0-impostor", "--for=condition=Ready", "--timeout=120s")
    tenants.a.kubectl(*line)
    tenants.settle()
    end = time.monotonic() + 30  # several turns of the controller's questions to agents
    while time.monotonic() < end:
        assert tenants.a.get("statefulset", "digits")["spec"]["replicas"] == 2
        conditions = tenants.a.get("trainingjob", "digits")["status"]["conditions"]
        assert ("Failed", "True") not in {(each["type"], each["status"]) for each in conditions}
        time.sleep(1)
    known = json.loads(tenants.a.kdist("status", "digits", "-o", "json"))
    assert known["phase"] != "Failed", known
    assert "impostor" not in json.dumps(known), known
    assert tenants.a.get("pod", "digits-0-impostor"), "left alone"


def test_a_job_whose_pods_the_server_refuses_names_the_refusal_in_its_conditions(
    tenants: Tenants, job: Job, report: Report
) -> None:
    privileged = {"podTemplate": {"spec": {"hostNetwork": True}}}
    tenants.create(ALICE, job(**IDLE, **privileged))
    began = time.monotonic()

    def named_refusal() -> str:
        found = tenants.condition("digits", "Running")
        message = str(found.get("message", ""))
        return message if "hostNetwork" in message or "PodSecurity" in message else ""

    message = tenants.a.until("the condition names the refusal", named_refusal, 120)
    accepted = tenants.condition("digits", "Accepted")
    report(f"after {time.monotonic() - began:.0f} s Running says: {message}; {accepted}\n")
    assert tenants.condition("digits", "Running")["status"] == "False"
