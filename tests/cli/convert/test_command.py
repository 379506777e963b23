"""`kdist convert` reads launch commands, says what is wrong with its input, and offers documents;
`kdist init --from` and the hints of other commands lead to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

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


BROKEN = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: a}
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: two
      template: {spec: {containers: [{name: pytorch, image: a, command: [python, a.py]}]}}
    Worker: {replicas: 1}
"""


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (
            BROKEN,
            [
                "spec.pytorchReplicaSpecs.Master.replicas: is not a whole number",
                "spec.pytorchReplicaSpecs.Worker: has no template: its pods are not described",
            ],
        ),
        (BROKEN.partition("spec:")[0], ["spec.pytorchReplicaSpecs: has no template"]),
        ("apiVersion: batch/v1\nkind: Job\nmetadata: {name: a}\n", ["has no spec.template"]),
    ],
)
def test_what_a_manifest_lacks_is_named(text: str, sentences: list[str], kdist: Kdist) -> None:
    result = kdist("convert", "-", stdin=text)
    assert result.exit_code == 1
    assert [each for each in sentences if each not in result.stderr] == []
    assert "another image" not in result.stderr
    assert "none" not in result.stderr
    load_text(result.stdout, source="converted")


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


SHELL = """\
apiVersion: batch/v1
kind: Job
metadata: {name: shell}
spec:
  template:
    spec:
      volumes: [null, x, {emptyDir: {}}]
      containers:
        - name: trainer
          image: registry.example.com/a:1
          volumeMounts: [{mountPath: /x}, x, null]
          command: [bash, -c]
          args:
            - |
              # prepare
              pip install x && wandb login --token 0123456789 sk-0123456789abcdef
              git clone https://jo:hunter2@example.com/x.git $(date) &&
                export HF_TOKEN=$(cat secret)
              python train.py; rm -rf out
---
apiVersion: batch/v1
kind: Job
metadata: {name: line}
spec: {template: {spec: {containers: [{image: a, command: [sh, -c, "mkdir x; python a.py"]}]}}}
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with texts for a shell, credentials in them, and lists with what is no mapping."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "shell.yaml"
    file.write_text(SHELL)
    return file


def test_each_statement_that_is_left_out_is_named_with_its_place(shell: Path, kdist: Kdist) -> None:
    result = kdist("convert", "shell.yaml")
    for place, text in (
        ("16:15", "`pip install x`"),
        ("16:32", "`wandb login --token … …`"),
        ("17:15", "`git clone https://example.com/x.git $(date)`"),
        ("18:17", "`HF_TOKEN=…`"),
        ("19:32", "`rm -rf out`"),
        ("24:69", "`mkdir x`"),
    ):
        (line,) = [each for each in result.stderr.splitlines() if text in each]
        assert line.startswith(f"shell.yaml:{place}: left out: "), line


def test_no_credential_of_a_statement_that_is_left_out_is_shown(shell: Path, kdist: Kdist) -> None:
    for output in ("yaml", "json"):
        result = kdist("convert", "shell.yaml", "-o", output)
        for secret in ("0123456789", "hunter2"):
            assert secret not in result.stdout + result.stderr


def test_what_is_no_volume_and_no_mount_is_named(shell: Path, kdist: Kdist) -> None:
    result = kdist("convert", "shell.yaml")
    assert "Traceback" not in result.stderr
    for index in (1, 2):
        assert f"volumes[{index}]: is no volume: it has no name" in result.stderr


def test_several_files_become_jobs_and_a_runtime_may_be_in_another(
    shell: Path, kdist: Kdist, tmp_path: Path
) -> None:
    job, *runtimes = (FOLDER / "trainjob-runtime.yaml").read_text().split("---\n")
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "runtime.yml").write_text("---\n".join(runtimes))
    result = kdist("convert", "shell.yaml", "job.yaml", "runtime.yml")
    names = [each["metadata"]["name"] for each in yaml.safe_load_all(result.stdout)]
    assert names[:2] == ["shell", "line"]
    assert len(names) == 3
    assert "its image, pods and sizes are not in the file" not in result.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "DB_PASSWORD=hunter2 ./migrate",
        "PGPASSWORD=hunter2 psql -f a.sql",
        "mysql --password hunter2",
        "login --clientSecret hunter2",
        "git clone https://jo:hunter2@example.com/x.git",
        "git clone https://hunter2@example.com/x.git",
        "curl -H 'Authorization: Bearer hunter2' https://example.com",
        "curl --header='X-Api-Key: hunter2' https://example.com",
        "curl -u jo:hunter2 https://example.com",
        "curl 'https://example.com/?token=hunter2'",
        "aws configure set aws_secret_access_key hunter2",
        'echo \'{"token": "hunter2"}\'',
        "aws configure set region AKIAhunter2hunter2",
    ],
)
def test_no_form_of_a_credential_is_shown(
    statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kdist: Kdist
) -> None:
    monkeypatch.chdir(tmp_path)
    text = json.dumps(f"{statement}; python train.py")
    pod = f"containers: [{{image: a, command: [sh, -c, {text}]}}]"
    Path("job.yaml").write_text(
        "{apiVersion: batch/v1, kind: Job, metadata: {name: a}, spec: {template: {spec: {"
        + pod
        + "}}}}"
    )
    result = kdist("convert", "job.yaml")
    assert "is not run: do it in the image" in result.stderr
    assert "hunter2" not in result.stdout + result.stderr
    assert statement.split()[0].partition("=")[0] in result.stderr
