"""A TrainJob of Kubeflow Trainer (v2) with its own TrainingRuntime, which contains the pod
template.
"""

from __future__ import annotations

from kdist.backends.base import Backend
from kdist.backends.jobset import JobSet


class TrainJob(Backend):
    """`backend: trainjob`. Trainer requires the container's name, and creates a JobSet with the
    job's name.
    """

    name = "trainjob"
    api_version = "trainer.kubeflow.org/v1alpha1"
    kind = "TrainJob"
    template = "trainjob.yaml.j2"
    host = JobSet.host
    parts = ("job", "jobset")
    deletes_itself = True
    sizes = (*JobSet.sizes, "numNodes")
    uid_label = "jobset.sigs.k8s.io/jobset-uid"
    container = "node"
    keeps_template = True  # Trainer uses its own snapshot of the runtime
    scalable = "the number of nodes of a TrainJob cannot be changed"

    def pod_owners(self, name: str) -> tuple[tuple[str, str, str], ...]:
        """The JobSet that Trainer creates, and its only Job."""
        return (
            ("jobset.x-k8s.io/v1alpha2", "JobSet", name),
            ("batch/v1", "Job", f"{name}-node-0"),
        )
