"""How people and programs reach a training's pod: kubectl's forwarded ports, the API server's
proxy, the kubelet's probes; in the pod's own network and in its node's.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

METRICS = 9401
_LISTENING = """
import contextlib, json
from pathlib import Path
own, found = set(), set()
for process in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):
        own |= {str(each.readlink()) for each in (process / "fd").iterdir()}
for table in ("tcp", "tcp6"):
    for line in Path("/proc/net", table).read_text().splitlines()[1:]:
        words = line.split()
        address, port = words[1].split(":")
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            found.add((int(address, 16) == 0, int(port, 16)))
print(json.dumps(sorted(found)))
"""


def forwarded(namespace: Namespace, pod: str, path: str, output: Path) -> str:
    """What a page of the pod says through `kubectl port-forward`."""
    with output.open("w") as target:
        forwarding = subprocess.Popen(
            ["kubectl", "-n", namespace.name, "port-forward", f"pod/{pod}", f":{METRICS}"],
            env=namespace.environment,
            stdout=target,
            stderr=subprocess.STDOUT,
        )
    try:
        printed: Any = namespace.until(
            "it forwards", lambda: re.search(r"127\.0\.0\.1:(\d+) ->", output.read_text())
        )
        url = f"http://127.0.0.1:{printed[1]}{path}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text: str = answer.read().decode()
            return text
    finally:
        forwarding.kill()
        forwarding.wait(30)


@pytest.mark.sampled
@pytest.mark.parametrize("of_the_node", [False, True], ids=["own-network", "network-of-the-node"])
def test_a_training_is_reached_by_forwarded_ports_the_proxy_and_probes_and_by_nothing_else(
    of_the_node: bool, namespace: Namespace, calm: Job, tmp_path: Path
) -> None:
    template: dict[str, Any] = {}
    if of_the_node:
        label = "pod-security.kubernetes.io/enforce=privileged"
        namespace.kubectl("label", "namespace", namespace.name, label, "--overwrite")
        template = {"podTemplate": {"spec": {"hostNetwork": True}}}
    train = {"steps": 1_000_000, "evaluate": "never"}
    namespace.apply(calm(nodes=1, checkpoints=None, train=train, **template))
    namespace.kdist("wait", "digits", "--for=first-step", "--timeout=4m")
    ready = ("--for=condition=Ready", "--timeout=60s")
    namespace.kubectl("wait", "pod", "-l", "kdist.dev/job=digits", *ready)
    (pod,) = namespace.pods("digits")
    name = pod["metadata"]["name"]
    assert [each["restartCount"] for each in pod["status"]["containerStatuses"]] == [0]
    assert bool(pod["spec"].get("hostNetwork")) is of_the_node

    assert json.loads(forwarded(namespace, name, "/status", tmp_path / "status"))["job"] == "digits"
    assert "kdist_last_step{" in forwarded(namespace, name, "/metrics", tmp_path / "metrics")
    assert "kdist_last_step{" in namespace.read_metrics(name)
    line = ("exec", name, "--", "python", "-c", _LISTENING)
    listening = json.loads(namespace.kubectl(*line))
    assert METRICS in {port for _, port in listening}, listening
    assert not [port for everywhere, port in listening if everywhere]
