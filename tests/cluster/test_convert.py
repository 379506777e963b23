"""What `kdist convert` writes is taken by an API server, whatever the manifest was of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdist import backends
from kdist.backends import Placement
from kdist.convert.manifests import convert_files
from kdist.job_file import load_text
from kdist.render import render
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.needs("whole-cluster")]

MANIFESTS = Path(__file__).parents[1] / "cli/convert/manifests"


@pytest.mark.sampled
def test_the_objects_of_every_converted_job_pass_a_dry_run_of_the_server(
    namespace: Namespace,
) -> None:
    refused = {}
    for file in sorted(MANIFESTS.iterdir()):
        conversions, _ = convert_files(str(file))
        assert conversions, file.name
        for each in conversions:
            job = load_text(each.write(), source=file.name)
            kind = "job" if job.spec.backend == "auto" else job.spec.backend
            spec = {"image": job.spec.image or "example.com/none:1"}
            here = {
                "metadata": job.metadata.model_copy(update={"namespace": namespace.name}),
                "spec": job.spec.model_copy(update=spec),
            }
            placement = Placement(backends.get(kind).name, "kubernetes", namespace.name)
            objects = [each.document for each in render(job.model_copy(update=here), placement)]
            runtimes = [each for each in objects if each["kind"] == "TrainingRuntime"]
            for runtime in runtimes:  # which the webhook of a TrainJob asks for
                namespace.send("create", stdin=json.dumps(runtime))
            others = [each for each in objects if each not in runtimes]
            documents = json.dumps({"apiVersion": "v1", "kind": "List", "items": others})
            line = ("create", "--dry-run=server", "-f", "-")
            done = namespace.type_until_known(*line, stdin=documents)
            if done.returncode:
                refused[file.name] = done.stderr
    assert refused == {}
