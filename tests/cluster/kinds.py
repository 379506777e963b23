"""The workload kinds that the tests go through, with what kubectl calls their object."""

from __future__ import annotations

import pytest

RESOURCE = {
    "job": "job.batch",
    "statefulset": "statefulset.apps",
    "jobset": "jobset.jobset.x-k8s.io",
    "pytorchjob": "pytorchjob.kubeflow.org",
    "trainjob": "trainjob.trainer.kubeflow.org",
}
# CI goes through two: that of every cluster that is new enough, and the one whose pods never end by themselves.
FIRST = ("job", "statefulset")

_MARKED = [kind if kind in FIRST else pytest.param(kind, marks=pytest.mark.wide) for kind in RESOURCE]
every_kind = pytest.mark.parametrize("kind", _MARKED)
"""Each kind, for tests that take minutes."""
each_kind = pytest.mark.parametrize("kind", RESOURCE)
"""Each kind, for tests that take seconds."""
