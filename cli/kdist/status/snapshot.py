"""All that was seen of one job at one moment: its documents as they came, and the status that follows from them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kdist.status import fields
from kdist.status.fields import Document
from kdist.status.job import JobStatus
from kdist.status.read import BACKEND, read, read_job
from kdist.status.workload import WorkloadState


@dataclass(frozen=True)
class Snapshot:
    """Documents of a job. What does not exist, or may not be seen, is empty; `taken` is unix time.

    `reports` are the agents' `/status` documents by pod, `nodes` those that matter, `claims` the volume claims that waiting pods
    name (an empty document for one that does not exist), `admission` what the queue says of the job, `deployments` those of
    all namespaces, if nobody makes pods. `unasked` counts agents that there was no time to ask.
    """

    name: str
    namespace: str = ""
    config_map: Document = field(default_factory=dict)
    workload: Document | None = None
    state: WorkloadState | None = None
    pods: Sequence[Document] = ()
    events: Sequence[Document] = ()
    reports: Mapping[str, Document] = field(default_factory=dict)
    nodes: Mapping[str, Document] = field(default_factory=dict)
    claims: Mapping[str, Document] = field(default_factory=dict)
    admission: Document | None = None
    unasked: int = 0
    deployments: Sequence[Document] = ()
    taken: float = field(default_factory=time.time)

    @property
    def backend(self) -> str:
        """Name of the workload's kind in job.yaml."""
        return fields.annotation(self.config_map, BACKEND)

    @property
    def job(self) -> Document:
        """The TrainingJob with every default."""
        return read_job(self.config_map)

    @property
    def gap(self) -> str:
        """What this snapshot does not know because there are too many pods; empty if nothing."""
        return f"there was no time to ask {self.unasked} of the {len(self.pods)} pods" if self.unasked else ""

    @cached_property
    def lost_nodes(self) -> list[str]:
        """Names of the nodes that are known not to answer."""
        return [name for name, node in self.nodes.items() if is_silent(node)]

    @cached_property
    def status(self) -> JobStatus:
        """What the job is doing."""
        return read(
            self.config_map,
            self.workload,
            self.pods,
            self.reports,
            state=self.state,
            lost_nodes=self.lost_nodes,
            now=self.taken,
            name=self.name,
            namespace=self.namespace,
        )


def is_silent(node: Document) -> bool:
    """Whether the control plane has not heard from a node, or says that it is unwell."""
    status = fields.text(fields.condition(node, "Ready"), "status")
    return status in ("Unknown", "False")
