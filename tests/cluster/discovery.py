"""Finds pods for a Prometheus that was built without Kubernetes, as Debian's is: runs next to it in
its pod, with its account.

It writes what `kubernetes_sd_configs` with the role `pod` yields into a file for `file_sd_configs`:
a target for each port of each container, under the labels that the relabelling asks for. Nothing
but Python's own library, for it runs in any image.

    python discovery.py NAMESPACES FILE
"""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_META = "__meta_kubernetes"


def targets(pods: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Target groups of these pods, those without an address left out."""
    for pod in pods:
        address, own = pod["status"].get("podIP"), _labels(pod)
        for container in pod["spec"]["containers"] if address else []:
            for port in container.get("ports", []):
                place = {
                    f"{_META}_pod_container_name": container["name"],
                    f"{_META}_pod_container_port_name": port.get("name", ""),
                    f"{_META}_pod_container_port_number": str(port["containerPort"]),
                }
                yield {
                    "targets": [f"{address}:{port['containerPort']}"],
                    "labels": {**own, **place},
                }


def _labels(pod: dict[str, Any]) -> dict[str, str]:
    about = pod["metadata"]
    known = {
        f"{_META}_namespace": about["namespace"],
        f"{_META}_pod_name": about["name"],
        f"{_META}_pod_phase": pod["status"]["phase"],
        f"{_META}_pod_node_name": pod["spec"].get("nodeName", ""),
    }
    for name, value in about.get("labels", {}).items():
        plain = re.sub(r"\W", "_", name)
        known |= {f"{_META}_pod_label_{plain}": value, f"{_META}_pod_labelpresent_{plain}": "true"}
    return known


def pods_of(namespace: str) -> list[dict[str, Any]]:
    """The namespace's pods, as the API server shows them to this account."""
    server = (
        f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    )
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    pods = f"{server}/api/v1/namespaces/{namespace}/pods"
    request = urllib.request.Request(pods, headers=headers)  # noqa: S310 - https
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=10, context=trusted) as answer:  # noqa: S310
        found: list[dict[str, Any]] = json.load(answer)["items"]
    return found


def main(namespaces: str, file: Path) -> None:
    """Write the targets again each second; a server that does not answer leaves them as they
    were.
    """
    while True:
        try:
            found = [
                one for namespace in namespaces.split(",") for one in targets(pods_of(namespace))
            ]
        except OSError as error:
            sys.stderr.write(f"{error}\n")
        else:
            fresh = file.with_suffix(".new")
            fresh.write_text(json.dumps(found))
            fresh.replace(file)
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
