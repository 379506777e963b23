"""Jobs that break one rule across fields each, by the rule's message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kdist.errors import InvalidJobError
from kdist.job_file import load_text
from kdist.spec import models
from kdist_trainer.config import sources
from tests.manifests.jobs import full

ON_CODES = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}}
BROKEN: dict[str, list[tuple[str, Any]]] = {
    "needs train (the managed loop) or script (a torchrun script)": [("train", None)],
    "train and script exclude each other; keep one": [("script", {"module": "a"})],
    "belongs to train: a script creates its own process group": [
        ("train", None),
        ("script", {"module": "a"}),
        ("preflight", {"allReduce": {"minBusBandwidth": "1G"}}),
    ],
    "needs exactly one of onExitCodes and onErrors": [
        ("restart", {"rules": [{"action": "Count"}]})
    ],
    "belongs to script: ranks of train exit with kdist's own codes": [
        ("restart", {"rules": [ON_CODES]})
    ],
    "can never match: earlier rules match all of its exit codes": [
        ("train", None),
        ("script", {"module": "a"}),
        ("restart", {"rules": [ON_CODES, ON_CODES]}),
    ],
    "can never match: an earlier rule matches exit code 1, that of every error": [
        ("train", None),
        ("script", {"module": "a"}),
        ("restart", {"rules": [ON_CODES, {"action": "Count", "onErrors": ["A"]}]}),
    ],
    "can never match: earlier rules match all of its errors": [
        ("restart", {"rules": [{"action": "Count", "onErrors": ["A"]}] * 2})
    ],
    "must be a whole number from 1 to 1024 or auto": [("procsPerNode", "all")],
    models.NO_SOURCE: [("data", [{"mountPath": "/data"}])],
    models.TWO_SOURCES: [("data", [{"mountPath": "/data", "claim": "a", "url": "s3://bucket"}])],
    sources.NEEDS_URL: [("data", [{"mountPath": "/data", "claim": "a", "size": "1Gi"}])],
    sources.NO_SCHEME: [("data", [{"mountPath": "/data", "url": "ftp://host/file"}])],
    sources.NO_ENDPOINT_HERE: [
        ("data", [{"mountPath": "/data", "url": "gs://bucket", "endpoint": "https://host"}])
    ],
    "needs exactly one of path and url": [
        ("train", {"workload": "digits", "epochs": 1, "init": {"strict": "on"}})
    ],
    "needs exactly one of claim, size, path and url": [("checkpoints", {})],
    "belongs to a bucket: it needs url": [("checkpoints", {"claim": "a", "secret": "b"})],
    sources.HAS_CREDENTIALS: [("checkpoints", {"url": "s3://me:secret@bucket"})],
    sources.HAS_QUERY: [("checkpoints", {"url": "s3://bucket/runs?versionId=1"})],
    models.NO_BUCKET: [("checkpoints", {"url": "https://bucket.s3.amazonaws.com"})],
    sources.NO_SERVER: [("checkpoints", {"url": "s3://bucket", "endpoint": "s3://minio"})],
    "is for s3:// and az://: the buckets of gs:// have one address": [
        ("checkpoints", {"url": "gs://bucket", "endpoint": "https://gcs.example.com"})
    ],
    "is for s3:// only": [("checkpoints", {"url": "az://bucket", "region": "eu-1"})],
    "applies to a claim that is created for the job: it needs size": [
        ("checkpoints", {"claim": "a", "class": "b"})
    ],
    "needs exactly one of value and secret": [("env", [{"name": "A"}])],
    "must be Exists if there is no key": [("tolerations", [{"operator": "Equal"}])],
    "cannot be used with the operator Exists": [
        ("tolerations", [{"key": "a", "operator": "Exists", "value": "b"}])
    ],
    "needs exactly one of path and module": [("train", None), ("script", {})],
    "pattern is no regular expression: missing )": [
        ("train", None),
        ("script", {"path": "train.py", "progress": {"pattern": "(?P<step>"}}),
    ],
    "pattern needs the group (?P<step>...), and may have loss and target": [
        ("train", None),
        ("script", {"path": "train.py", "progress": {"pattern": "(?P<number>.)"}}),
    ],
    "needs exactly one of epochs and steps": [("train", {"workload": "digits"})],
    "needs auto, seconds, steps, or steps with one of the others": [
        ("train", {"workload": "digits", "epochs": 1, "checkpoint": {"every": {}}})
    ],
    "checkpoint.keep.best needs evaluateEverySteps": [
        ("train", {"workload": "digits", "epochs": 1, "checkpoint": {"keep": {"best": {}}}})
    ],
    "auto and seconds exclude each other; keep one": [
        (
            "train",
            {
                "workload": "digits",
                "epochs": 1,
                "checkpoint": {"every": {"auto": True, "seconds": 60}},
            },
        )
    ],
}


def break_rule(message: str) -> dict[str, Any]:
    """The document of a job that breaks the rule with this message."""
    document = full()
    for name, value in BROKEN[message]:
        document["spec"][name] = value
    return document


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_rule_is_refused_in_its_words(message: str) -> None:
    with pytest.raises(InvalidJobError) as raised:
        load_text(json.dumps(break_rule(message)), source="job.yaml")
    assert any(message in problem.sentence for problem in raised.value.problems)
