"""`--set path=value` is typed by the model, and a wrong path or value is told of like a line of the
file.
"""

from __future__ import annotations

from typing import Any

import pytest

from kdist.errors import InvalidJobError
from kdist.job_file import load_text
from tests.cli.conftest import JOB, Kdist

WITH_MORE = JOB + "  nodes: {min: 1, max: 2}\n  queue: team-a\n  env:\n    - {name: A, value: x}\n"


def changed(*options: str) -> dict[str, Any]:
    """The spec of a job after `--set` options, as plain values."""
    document: dict[str, Any] = load_text(
        WITH_MORE, source="job.yaml", overrides=options
    ).to_document()["spec"]
    return document


def refusal_of(*options: str) -> str:
    with pytest.raises(InvalidJobError) as refused:
        changed(*options)
    return str(refused.value.problems[0])


@pytest.mark.parametrize(
    ("option", "path", "value"),
    [
        ("spec.nodes.max=4", ("nodes",), {"min": 1, "max": 4}),
        ("spec.nodes=3", ("nodes",), {"min": 3, "max": 3}),
        ("spec.nodes={min: 2, max: 3}", ("nodes",), {"min": 2, "max": 3}),
        ("spec.image=012", ("image",), "012"),
        ("spec.image=true", ("image",), "true"),
        ("spec.env[0].value=1:30", ("env", 0, "value"), "1:30"),
        ("spec.env[0].value=a=b: [c", ("env", 0, "value"), "a=b: [c"),
        ("spec.env[0].value=", ("env", 0, "value"), ""),
        ("spec.env[1]={name: B, value: y}", ("env", 1, "name"), "B"),
        ("spec.procsPerNode=auto", ("procsPerNode",), "auto"),
        ("spec.procsPerNode=2", ("procsPerNode",), 2),
        ("spec.resources.cpu=500m", ("resources", "cpu"), "500m"),
        ("spec.resources.cpu=2", ("resources", "cpu"), "2"),
        ("spec.train.optimizer.learningRate=1e-4", ("train", "optimizer", "learningRate"), 1e-4),
        (
            "spec.train.checkpoint.every.steps=5",
            ("train", "checkpoint", "every"),
            {"seconds": None, "steps": 5},
        ),
        (
            "spec.train.options.width=2",
            ("train", "options"),
            {"width": 2},
        ),
        (
            'spec.nodeSelector["example.com/disk"]=ssd',
            ("nodeSelector",),
            {"example.com/disk": "ssd"},
        ),
        ("spec.queue=null", ("queue",), None),
        ("spec.env[0]=null", ("env",), []),
    ],
)
def test_a_value_takes_the_type_of_its_field(
    option: str, path: tuple[str | int, ...], value: object
) -> None:
    found: Any = changed(option)
    for part in path:
        found = found[part]
    assert found == value


def test_one_bound_is_set_next_to_what_the_file_or_the_default_says_of_the_other() -> None:
    for text, nodes in (
        (JOB, (1, 4)),
        (JOB + "  nodes: 3\n", (3, 4)),
        (JOB + "  nodes: {min: 2, max: 2}\n", (2, 4)),
    ):
        job = load_text(text, source="job.yaml", overrides=["spec.nodes.max=4"])
        assert (job.spec.nodes.min, job.spec.nodes.max) == nodes


def test_later_options_win() -> None:
    assert changed("spec.nodes=2", "spec.nodes.max=5")["nodes"] == {"min": 2, "max": 5}
    assert changed("spec.maxRestarts=2", "spec.maxRestarts=3")["maxRestarts"] == 3


@pytest.mark.parametrize(
    ("option", "reported"),
    [
        ("spec.standby=warm", "spec.standby: no longer exists"),
        ("spec.node=3", "spec.node: there is no such field; did you mean `spec.nodes`?"),
        (
            "spec.nodes.maximum=3",
            "spec.nodes.maximum: there is no such field; did you mean `spec.nodes.max`?",
        ),
        (
            "spec.trian.epochs=3",
            "spec.trian.epochs: there is no such field; did you mean `spec.train.epochs`?",
        ),
        ("spec.epochs=3", "spec.epochs: there is no such field; did you mean `spec.train.epochs`?"),
        ("epochs=3", "epochs: there is no such field; did you mean `spec.train.epochs`?"),
        (
            "spec.max_restarts=3",
            "spec.max_restarts: there is no such field; did you mean `spec.maxRestarts`?",
        ),
        ("spec.env[5].name=x", "spec.env[5].name: the list has no such item"),
        (
            "spec.nodes.max=four",
            "spec.nodes.max: must be a whole number from 1 to 4096, found the text `four`",
        ),
        (
            "spec.nodes=0",
            "spec.nodes: must be a whole number from 1 to 4096 or {min, max, standby}, "
            "found the number 0",
        ),
        (
            "spec.train.evaluate=nevre",
            (
                "spec.train.evaluate: must be one of end, never, found the text `nevre`; did "
                "you mean `never`?"
            ),
        ),
        ("spec.nodes={min: 1", "the mapping `{` that opens here is not closed"),
        ("spec.nodes=", "spec.nodes: the value is empty"),
        ("spec.nodes", "must be path=value"),
        ("=3", "must be path=value"),
        ("spec..nodes=3", "must be path=value"),
        ("spec.nodes=\x1f", "the file contains the control character U+001F"),
    ],
)
def test_a_wrong_option_is_reported_by_itself(option: str, reported: str) -> None:
    source = option.replace("\x1f", "\\x1f")
    assert refusal_of(option) == f"--set {source}: {reported}"


def test_an_option_mends_a_wrong_file() -> None:
    wrong = JOB.replace("epochs: 5", "epochs: five")
    assert load_text(wrong, source="job.yaml", overrides=["spec.train.epochs=5"]) == load_text(
        JOB, source="job.yaml"
    )


def test_problems_of_options_follow_those_of_the_file(kdist: Kdist) -> None:
    result = kdist(
        "validate", "-", "--set", "spec.nodes=no", "--set", "spec.fast=1", stdin=JOB + "  ttl: 3\n"
    )
    lines = [
        line for line in result.stderr.splitlines() if line.startswith(("stdin", "--set", "Error"))
    ]
    expected = ["stdin:9:3", "--set spec.fast=1", "--set spec.nodes=no", "Error"]
    assert [line.split(": ")[0] for line in lines] == expected
    assert result.exit_code == 2
