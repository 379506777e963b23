"""Rendering: what a job becomes, that it is pure, and that no value can break out of its place."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kdist import render
from kdist.errors import KdistError
from kdist.job_file import load_text
from kdist.manifest import Manifest, sort
from kdist.render.templates import as_json, render_template
from kdist.spec import TrainConfig, TrainingJob
from kdist_trainer.config import Training
from tests.house.tree import ROOT


def make_job(metadata: dict[str, Any] | None = None, **train: Any) -> TrainingJob:
    document = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "digits", **(metadata or {})},
        "spec": {"nodes": 2, "train": {"workload": "digits", "epochs": 1, **train}},
    }
    return load_text(json.dumps(document), source="test")


def test_the_job_becomes_a_config_map_that_carries_train_json_whole() -> None:
    job = make_job(options={"width": 8})
    (config_map,) = render.render(job)
    assert config_map.identity == ("v1", "ConfigMap", "", "digits")
    assert (
        TrainConfig.model_validate_json(render.read_train_json([config_map]))
        == job.to_train_config()
    )


def test_train_json_writes_out_every_default() -> None:
    train = json.loads(render.read_train_json(render.render(make_job())))["train"]
    written = [field for field in Training.model_fields.values() if field.exclude_if is None]
    assert set(train) == {field.alias for field in written}


def test_every_object_can_be_found_by_its_labels_and_a_job_cannot_change_them() -> None:
    labels = {"team": "vision", "app.kubernetes.io/instance": "another"}
    job = make_job({"labels": labels, "annotations": {"note": "a: b"}})
    metadata = render.render(job)[0].document["metadata"]
    assert metadata["labels"] == {
        "team": "vision",
        "app.kubernetes.io/name": "kdist",
        "app.kubernetes.io/instance": "digits",
        "app.kubernetes.io/component": "training",
        "app.kubernetes.io/managed-by": "kdist",
        "kdist.dev/job": "digits",
    }
    assert metadata["annotations"] == {"note": "a: b"}


def test_a_namespace_is_written_only_where_the_job_names_one() -> None:
    assert "namespace" not in render.render(make_job())[0].document["metadata"]
    assert render.render(make_job({"namespace": "ml"}))[0].namespace == "ml"


def test_the_same_job_renders_to_the_same_objects() -> None:
    assert render.render(make_job()) == render.render(make_job())


HOSTILE = [
    "}}{{ 7 * 7 }}",
    '"\n---\napiVersion: v1\nkind: Secret\nmetadata: {name: evil}\n',
    "a: b\n- c",
    "# no comment",
    "&a *a !!python/object:os.system",
    "no",
    "012",
    "1:30",
    "2026-01-31",
    "~",
    "\u2028\u2029\x85\ufeff",
    "tab\t nul-free \x07 bell \x1b[31m",
    "😀 ünï 漢字",
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_arrives_as_the_value_it_is(value: str) -> None:
    objects = render.render(
        make_job(
            {"annotations": {"note": value}},
            workload="team.model:Model",
            options={"value": value, value: 1},
        )
    )
    assert len(objects) == 1
    assert objects[0].document["metadata"]["annotations"]["note"] == value
    assert json.loads(render.read_train_json(objects))["train"]["options"] == {
        "value": value,
        value: 1,
    }


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(_JSON)
@pytest.mark.sampled
def test_whatever_json_can_say_comes_back_from_yaml_unchanged(value: Any) -> None:
    text = f"key: {as_json(value)}\nlast: 1\n"
    assert yaml.safe_load(text) == {"key": value, "last": 1}
    assert yaml.load(text, Loader=yaml.CSafeLoader) == {"key": value, "last": 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_json_does_not_know_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        as_json(value)


def test_no_template_holds_a_default() -> None:
    default = re.compile(r"""\bor\s+["'\d]|\|\s*d(?:efault)?\b""")
    templates = sorted((ROOT / "manifests").glob("*.j2"))
    assert len(templates) > 5
    assert [each.name for each in templates if default.search(each.read_text())] == []


def test_a_name_that_a_template_was_not_given_is_an_error() -> None:
    with pytest.raises(
        KdistError, match=r"configmap\.yaml\.j2 cannot be rendered: 'placement' is undefined"
    ):
        render_template("configmap.yaml.j2", {"name": "digits"})


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"apiVersion": "v1", "kind": "Pod"},
        {"apiVersion": "v1", "kind": "", "metadata": {"name": "a"}},
    ],
)
def test_what_is_no_object_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a manifest needs its"):
        Manifest(document)


def make_object(kind: str, name: str = "a") -> Manifest:
    return Manifest({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}})


def test_what_others_lean_on_is_sent_first() -> None:
    kinds = ["Job", "Service", "ConfigMap", "Role", "ServiceAccount"]
    expected = ["ServiceAccount", "Role", "ConfigMap", "Service", "Job"]
    assert [each.kind for each in sort(map(make_object, kinds))] == expected


def test_one_object_described_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="Job/a is described twice"):
        sort([make_object("Job"), make_object("Job", "b"), make_object("Job")])


def test_objects_without_train_json_are_an_error() -> None:
    with pytest.raises(KdistError, match=r"no train\.json"):
        render.read_train_json([make_object("ConfigMap")])
