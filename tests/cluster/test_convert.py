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
            spec = job.spec.model_copy(update={"image": job.spec.image or "example.com/none:1"})
            placement = Placement(backends.get(kind).name, "kubernetes", namespace.name)
            objects = render(job.model_copy(update={"spec": spec}), placement)
            documents = {
                "apiVersion": "v1",
                "kind": "List",
                "items": [made.document for made in objects],
            }
            done = namespace.type_kubectl(
                "create", "--dry-run=server", "-f", "-", stdin=json.dumps(documents)
            )
            if done.returncode:
                refused[file.name] = done.stderr
    assert refused == {}
