"""Whatever a manifest contains, each of its values becomes a field, is kept in podTemplate, or is
named; and kdist takes the job.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdist.convert.manifests import Conversion, convert_files
from kdist.errors import KdistError
from kdist.job_file import load_text
from kdist.job_file.yaml_parser import read
from kdist.spec.reference import parse
from kdist.terminal import visible

TEXT = st.text("abcXYZ019-._/:$()= \n\"'{}#", max_size=12)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | TEXT,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(TEXT.filter(bool), each, max_size=3),
    max_leaves=6,
)
NAME = st.sampled_from(["a", "code", "data-0", "shm", "trainer", "pytorch", "x"])
QUANTITY = st.sampled_from(["1", "500m", "1.5", 2, "1Gi", "1.5Gi", "1000000", "1e3", "0", "many"])
PATHS = st.sampled_from(["/data", "/tmp", "/dev/shm", "/code", "/checkpoints", "/x/y/", "/etc", ""])  # noqa: S108
WORD = (
    st.sampled_from(
        ["torchrun", "python", "train.py", "-m", "--nnodes=2", "bash", "-c", "accelerate", "launch"]
    )
    | TEXT
)
NUMBER = st.integers(0, 9) | st.sampled_from(["8", "auto", "gpu", "x"])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with some of the fields, of which each may also be anything, and one unknown."""
    choices = {name: each | ANY for name, each in fields.items()}
    return st.fixed_dictionaries({}, optional={**choices, "unknown": ANY})


CONTAINER = some(
    name=NAME,
    image=st.just("registry.example.com/a:1"),
    command=st.lists(WORD, max_size=4),
    args=st.lists(WORD, max_size=4),
    env=st.lists(some(name=st.sampled_from(["A", "RANK", "a.b"]), value=TEXT), max_size=3),
    resources=some(limits=some(cpu=QUANTITY, memory=QUANTITY), requests=some(memory=QUANTITY)),
    volumeMounts=st.lists(some(name=NAME, mountPath=PATHS, readOnly=st.booleans()), max_size=3),
    ports=st.lists(some(containerPort=NUMBER, name=NAME), max_size=2),
    securityContext=some(runAsUser=NUMBER, privileged=st.booleans()),
    livenessProbe=ANY,
)
POD = some(
    containers=st.lists(CONTAINER, min_size=1, max_size=2),
    initContainers=st.lists(CONTAINER, max_size=1),
    volumes=st.lists(
        some(
            name=NAME, emptyDir=some(sizeLimit=QUANTITY), persistentVolumeClaim=some(claimName=NAME)
        ),
        max_size=2,
    ),
    tolerations=st.lists(some(key=NAME, operator=st.just("Exists")), max_size=2),
    nodeSelector=st.dictionaries(NAME, TEXT, max_size=2),
    imagePullSecrets=st.lists(some(name=NAME), max_size=2),
    restartPolicy=st.just("Never"),
    hostNetwork=st.booleans(),
    securityContext=some(runAsUser=NUMBER),
)
METADATA = some(
    name=TEXT, namespace=NAME, labels=st.dictionaries(TEXT.filter(bool), TEXT, max_size=2)
)
ROLE = some(replicas=NUMBER, template=some(metadata=METADATA, spec=POD), restartPolicy=NAME)
PYTORCHJOB = st.fixed_dictionaries(
    {
        "apiVersion": st.just("kubeflow.org/v1"),
        "kind": st.just("PyTorchJob"),
        "spec": some(
            pytorchReplicaSpecs=some(Master=ROLE, Worker=ROLE),
            nprocPerNode=NUMBER,
            elasticPolicy=some(minReplicas=NUMBER, maxReplicas=NUMBER, maxRestarts=NUMBER),
            runPolicy=some(backoffLimit=NUMBER, suspend=st.booleans(), cleanPodPolicy=NAME),
        ),
    },
    optional={"metadata": METADATA, "status": ANY},
)
OTHER = st.fixed_dictionaries(
    {
        "apiVersion": st.sampled_from(["batch/v1", "apps/v1", "jobset.x-k8s.io/v1alpha2"]),
        "kind": st.sampled_from(["Job", "StatefulSet", "JobSet"]),
        "metadata": METADATA,
        "spec": some(
            replicas=NUMBER,
            parallelism=NUMBER,
            template=some(metadata=METADATA, spec=POD),
            replicatedJobs=st.lists(
                some(name=NAME, replicas=NUMBER, template=some(spec=ANY)), max_size=2
            ),
            volumeClaimTemplates=st.lists(some(metadata=METADATA), max_size=1),
        ),
    }
)


def check(conversion: Conversion, leaves: int) -> None:
    text = conversion.write()
    assert len(conversion.values) == leaves
    for value, outcome in conversion.values:
        if outcome.kind in ("leftOut", "needless"):
            assert outcome.text
            assert visible(outcome.text).split("`")[0] in text
            continue
        # a field that nothing knows is not among those that the job has
        assert outcome.kind == "podTemplate" or "unknown" not in value.path, value.path
        if outcome.text.startswith(("spec.", "metadata.")):
            place: Any = conversion.draft.document
            for part in parse(outcome.text) or ():
                if "?" in str(part):  # a character that paths do not show
                    break
                place = place[part]
            if outcome.kind == "podTemplate" and value.text and not isinstance(place, dict):
                assert json.dumps(value.value()) in json.dumps(place)
    if not any(each.message.startswith("the job is not valid") for each in conversion.changes):
        load_text(text, source="converted")


@pytest.mark.parametrize("kind", ["PyTorchJob", "others"])
def test_no_value_is_lost(kind: str, tmp_path: Path) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
    @given(PYTORCHJOB if kind == "PyTorchJob" else OTHER)
    def attempt(document: dict[str, Any]) -> None:
        file = tmp_path / "manifest.json"
        file.write_text(json.dumps(document))
        try:
            conversions, _ = convert_files(str(file))
        except KdistError:  # not YAML in kdist's bounds, or no workload
            return
        (tree,), _ = read(file.read_text(), source="again")
        check(conversions[0], count_leaves(tree.value()))

    attempt()


def count_leaves(value: Any) -> int:
    below = (
        list(value.values())
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else []
    )
    return sum(map(count_leaves, below)) if below else 1
