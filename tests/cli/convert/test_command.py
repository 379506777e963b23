"""`kdist convert` reads launch commands, says what is wrong with its input, and offers documents;
`kdist init --from` and the hints of other commands lead to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdist.convert.workloads import KINDS
from kdist.job_file import load_text, problems
from kdist.spec import Spec
from tests.cli.conftest import Kdist

FOLDER = Path(__file__).parent / "manifests"

COMMANDS: dict[str, dict[str, Any]] = {
    "torchrun --nnodes 2 --nproc_per_node=4 train.py --lr 1": {
        "nodes": 2,
        "procsPerNode": 4,
        "script": {"path": "train.py", "args": ["--lr", "1"]},
    },
    "torchrun --nnodes=1:4 --max-restarts=3 --rdzv-backend c10d -m pkg.train a b": {
        "nodes": {"min": 1, "max": 4},
        "procsPerNode": 1,
        "maxRestarts": 3,
        "script": {"module": "pkg.train", "args": ["a", "b"]},
    },
    "torchrun --standalone --nproc-per-node gpu --redirects 3 run.py": {
        "procsPerNode": "auto",
        "script": {"path": "run.py"},
    },
    "python -m torch.distributed.launch --use_env --nproc_per_node 2 train.py": {
        "procsPerNode": 2,
        "script": {"path": "train.py"},
    },
    "accelerate launch --num_machines 2 --num_processes 8 --mixed_precision bf16 a/train.py -x": {
        "nodes": 2,
        "procsPerNode": 4,
        "env": [{"name": "ACCELERATE_MIXED_PRECISION", "value": "bf16"}],
        "script": {"path": "a/train.py", "args": ["-x"]},
    },
    "accelerate launch --cpu --num_cpu_threads_per_process 2 -m pkg": {
        "threadsPerRank": 2,
        "env": [{"name": "ACCELERATE_USE_CPU", "value": "true"}],
        "script": {"module": "pkg"},
    },
    "NCCL_DEBUG=INFO python -u train.py": {
        "procsPerNode": 1,
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "script": {"path": "train.py"},
    },
    "deepspeed --num_gpus 2 train.py --deepspeed ds.json": {
        "script": {"path": "train.py", "args": ["--deepspeed", "ds.json"]},
    },
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_line_becomes_a_job(line: str, kdist: Kdist) -> None:
    result = kdist("convert", "--", *line.split())
    assert result.exit_code == 0, result.stderr
    job = load_text(result.stdout, source="converted")
    expected = Spec.model_validate(COMMANDS[line], by_alias=True, by_name=False)
    assert job.spec == expected
    assert job.metadata.name in ("train", "run", "pkg")


def test_each_word_that_is_left_out_is_named(kdist: Kdist) -> None:
    result = kdist("convert", "--", "torchrun", "--run-path", "--nnodes", "$N", "--odd=1", "x.py")
    for word in ("`--run-path`", "`--odd=1`", "`--nnodes $N`"):
        assert word in result.stderr + result.stdout


def test_a_program_that_is_no_script_needs_a_hand(kdist: Kdist) -> None:
    result = kdist("convert", "--", "/usr/bin/trainer", "--fast")
    assert result.exit_code == 1
    assert "is no Python script" in result.stderr
    assert load_text(result.stdout, source="converted").spec.script is not None


@pytest.mark.parametrize("output", [(), ("-o", "json")])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "has 1 problem"),
        ("kind: Pod\napiVersion: v1\n", "has nothing to convert, found Pod"),
        ("", "the file is empty"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    text: str, message: str, output: tuple[str, ...], kdist: Kdist
) -> None:
    result = kdist("convert", "-", *output, stdin=text)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_document_has_each_value_with_its_outcome(kdist: Kdist) -> None:
    result = kdist("convert", str(FOLDER / "pytorchjob-elastic.yaml"), "-o", "json")
    document = json.loads(result.stdout)
    assert (document["apiVersion"], document["kind"]) == ("cli.kdist.dev/v1", "Conversion")
    (job,) = document["jobs"]
    assert job["complete"]
    assert load_text(job["text"], source="converted").metadata.name == "elastic-resnet"
    outcomes = {each["path"]: each for each in job["values"]}
    assert outcomes["spec.runPolicy.cleanPodPolicy"]["outcome"] == "leftOut"
    assert outcomes["spec.runPolicy.ttlSecondsAfterFinished"] == {
        "path": "spec.runPolicy.ttlSecondsAfterFinished",
        "line": 18,
        "column": 5,
        "outcome": "kept",
        "message": "spec.ttlSecondsAfterFinished",
    }


def test_init_from_a_workload_writes_its_job(
    kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = kdist("init", "--from", str(FOLDER / "trainjob.yaml"))
    assert result.exit_code == 0
    assert "left out: spec.podTemplateOverrides" in result.stderr
    assert result.stderr.endswith("Wrote job.yaml.\n")
    assert kdist("validate", "job.yaml").exit_code == 0
    assert kdist("init", "-", "--from", str(FOLDER / "trainjob.yaml")).stdout == (
        Path("job.yaml").read_text()
    )
    again = kdist("init", "--from", str(FOLDER / "trainjob.yaml"))
    assert "`job.yaml` exists already" in again.stderr


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "trainjob.yaml", "jobset.yaml"])
@pytest.mark.parametrize("command", ["validate", "run", "render"])
def test_another_kind_leads_to_convert(name: str, command: str, kdist: Kdist) -> None:
    file = str(FOLDER / name)
    result = kdist(command, file)
    assert result.exit_code == 2
    assert f"`kdist convert {file}` makes one of this" in result.stderr


def test_the_hint_knows_the_kinds_that_are_converted() -> None:
    assert set(problems.CONVERTED) == {kind for _, kind in KINDS}
