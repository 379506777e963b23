"""Documents come from a cluster, where anybody may have written anything: nothing in them leads to
a traceback.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kdist import backends
from kdist.diagnose import RULES, diagnose
from kdist.diagnose.rule import DiagnosticContext
from kdist.status import Snapshot, WorkloadState
from kdist.views import status_table
from tests.cli.diagnose.scenes import (
    FAILED,
    asking,
    claim,
    creating,
    event,
    mounting,
    node,
    nodes,
    scene,
)
from tests.cli.status.objects import ended_pod, lost_pod, pod, record, report, unscheduled, waiting

VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -1, 2.5, float("nan"), 10**40, "", "x", "7", {}, [], [None]]
)
ANYTHING = (
    VALUES
    | st.lists(VALUES, max_size=2)
    | st.dictionaries(st.sampled_from(["name", "status", "x"]), VALUES, max_size=2)
)

SEEN = [
    scene(
        [pod(0), lost_pod(1)],
        event("NodeNotReady", "x"),
        reports={"digits-0-abcde": report()},
        nodes=nodes(node("worker-2")),
    ),
    scene(
        [
            ended_pod(0, 70, record=record(70, "user_code", traceback=["a"])),
            ended_pod(1, 137, "OOMKilled"),
        ],
        state=FAILED,
    ),
    scene(
        [asking(unscheduled(0, "0/2 nodes are available: 2 Insufficient cpu."), cpu="4")],
        nodes=nodes(node("a"), node("b")),
    ),
    scene(
        [mounting(creating(), "ckpt")],
        event("FailedMount", 'secret "x" not found'),
        claims={"ckpt": claim("ckpt")},
    ),
    scene(
        [pod(0, phase="Pending", **waiting("ImagePullBackOff", "not found"))],
        event("Failed", "Failed to pull image"),
    ),
    scene(
        [],
        event("FailedCreate", "exceeded quota: q, requested: a, used: b, limited: c", kind="Job"),
        state=WorkloadState(),
    ),
    scene([pod(0)], reports={"digits-0-abcde": report("rendezvous")}),
]
PARTS = ("config_map", "workload", "pods", "events", "reports", "nodes", "claims", "admission")


def spots(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document that holds a value."""
    keys = (
        document.keys()
        if isinstance(document, dict)
        else range(len(document))
        if isinstance(document, list | tuple)
        else ()
    )
    return [
        *([path] if path else []),
        *(spot for key in keys for spot in spots(document[key], (*path, key))),
    ]


def put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    """Write a value at such a place."""
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


def check(seen: Snapshot) -> None:
    """Everything that is made of a snapshot can be made, and shown."""
    assert json.dumps(seen.status.to_document(), allow_nan=False)
    assert json.dumps(diagnose(seen).to_document())
    assert list(status_table.status_rows(seen.status))
    assert all(
        len(row) == len(status_table.RANK_HEADER) for row in status_table.rank_rows(seen.status)
    )
    for rule in RULES:
        rule(DiagnosticContext(seen))


@given(st.data())
def test_a_document_with_a_foreign_value_in_it_reports_less_and_never_fails(
    data: st.DataObject,
) -> None:
    seen = data.draw(st.sampled_from(SEEN))
    parts = {name: copy.deepcopy(getattr(seen, name)) for name in PARTS}
    parts["pods"], parts["events"] = list(parts["pods"]), list(parts["events"])
    for _ in range(data.draw(st.integers(1, 3))):
        places = [spot for spot in spots(parts) if len(spot) > 1]
        # the next one may go into it
        put(parts, data.draw(st.sampled_from(places)), copy.deepcopy(data.draw(ANYTHING)))
    for name in ("pods", "events"):
        parts[name] = [each for each in parts[name] if isinstance(each, dict)]
    check(Snapshot("digits", "ml", state=seen.state, taken=seen.taken, **parts))


@settings(max_examples=25)
@given(st.data())
def test_rubbish_reads_as_a_job_of_which_nothing_is_known(data: st.DataObject) -> None:
    documents = st.dictionaries(
        st.sampled_from(["metadata", "spec", "status", "data", "state", "ranks"]), ANYTHING
    )
    check(
        Snapshot(
            name="digits",
            namespace="ml",
            config_map=data.draw(documents),
            workload=data.draw(st.none() | documents),
            state=data.draw(st.none() | st.just(WorkloadState())),
            pods=data.draw(st.lists(documents, max_size=3)),
            events=data.draw(st.lists(documents, max_size=3)),
            reports={"x": data.draw(documents)},
            nodes={"n": data.draw(documents)},
            claims={"c": data.draw(documents)},
            admission=data.draw(st.none() | documents),
        )
    )


def test_every_rule_is_in_the_table_once() -> None:
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
    assert set(backends.NAMES) >= {"job", "statefulset", "jobset", "pytorchjob", "trainjob"}
