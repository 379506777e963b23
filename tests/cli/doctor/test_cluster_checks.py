"""The pod that `kdist doctor` rehearses is judged as the pods of jobs will be."""

from __future__ import annotations

from kdist.doctor.cluster_checks import make_pod
from kdist.render import find_pods
from kdist.render.overlay import violations
from tests.manifests.jobs import make, place


def test_the_rehearsed_pod_is_a_rendered_one_that_needs_nothing_else() -> None:
    pod = make_pod()
    (rendered,) = [
        each for manifest in place(make(), "job") for each in find_pods(manifest.document)
    ]
    assert pod["spec"]["securityContext"] == rendered["spec"]["securityContext"]
    assert (
        pod["spec"]["containers"][0]["securityContext"]
        == rendered["spec"]["containers"][0]["securityContext"]
    )
    assert (pod["kind"], pod["metadata"]["name"], "serviceAccountName" in pod["spec"]) == (
        "Pod",
        "kdist-doctor",
        False,
    )
    assert violations(pod) == []
