"""The pod that takes the place of another one does not compile again what that has compiled."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.kinds import every_kind
from tests.cluster.namespace import CLUSTER, Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.wide, pytest.mark.timeout(1800)]


@every_kind
def test_a_new_pod_begins_with_what_the_lost_one_has_compiled(
    namespace: Namespace,
    calm: Job,
    cluster: dict[str, str],
    record_property: Callable[[str, object], None],
    kind: str,
) -> None:
    if cluster.get("KDIST_E2E") == "kubeconfig":
        pytest.skip("the image with a compiler is made for our own cluster")
    image = subprocess.run(
        [CLUSTER, "compiler", cluster["KDIST_IMAGE"]], check=True, capture_output=True, text=True
    ).stdout.split()[-1]
    resources, train = {"cpu": 1, "memory": "2Gi"}, {"steps": 100_000, "compile": "inductor"}
    namespace.apply(calm(backend=kind, nodes=1, image=image, resources=resources, train=train))
    first = namespace.until(
        "code is kept", lambda: compiled(namespace, "compiled code is kept in"), 900
    )
    namespace.kubectl("delete", "pod", first["name"], "--grace-period=0", "--force")
    second = namespace.until(
        "a new pod trains",
        lambda: compiled(namespace, "compiled code is taken from", other_than=first["uid"]),
    )
    again = second["seconds"] - first["seconds"]  # the counter goes on where the lost pod's was
    record_property("seconds in torch.compile", (first["seconds"], again))
    assert 0 < again < first["seconds"] / 5


def compiled(namespace: Namespace, said: str, other_than: str = "") -> dict[str, Any]:
    """The pod that has done steps, and whose agent says this of compiled code, with its seconds in
    torch.compile; `{}` while there is none.
    """
    for pod in namespace.pods("digits"):
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if uid == other_than or pod["status"]["phase"] != "Running":
            continue
        log = namespace.type_kubectl("logs", name).stdout
        agents = [each for each in namespace.agents("digits") if each["step"]]
        if said in log and agents:
            text = namespace.read_metrics(name)
            values = [
                line for line in text.splitlines() if line.startswith("kdist_compile_seconds_total")
            ]
            return {"name": name, "uid": uid, "seconds": float(values[0].split()[-1])}
    return {}
