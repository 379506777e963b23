"""Targets for tests of what needs no cluster: a job as `kdist apply` would have sent it."""

from __future__ import annotations

from typing import Any, cast

from kdist import backends, render
from kdist.backends import Placement
from kdist.job.cluster.applied import AppliedJob
from kdist.job_file import load_text
from kdist.manifest import Manifest

JOB = """
apiVersion: kdist.dev/v1alpha1
kind: TrainingJob
metadata: {{name: digits, namespace: ml}}
spec:
  image: registry/trainer:1
  nodes: {nodes}
  checkpoints: {{{checkpoints}}}
  nodeSelector: {{disk: fast}}
  podTemplate: {{spec: {{securityContext: {{runAsUser: 1234}}}}}}
  train: {{workload: digits, epochs: 1}}
"""


def target(
    nodes: str = "{min: 1, max: 2}", backend: str = "job", checkpoints: str = "claim: shared"
) -> AppliedJob:
    """The job as it stands in no cluster."""
    job = load_text(JOB.format(nodes=nodes, checkpoints=checkpoints), source="job.yaml")
    placement = Placement(backend, "kubernetes", "run-1")
    objects = render.render(job, placement)
    config_map = next(
        one.document for one in objects if one.kind == "ConfigMap" and one.name == "digits"
    )
    return AppliedJob(cast(Any, None), config_map, job, backends.get(backend), placement)


def objects(of: AppliedJob) -> list[Manifest]:
    """All that would be sent of it."""
    return render.render(of.job, of.placement)
