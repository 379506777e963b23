"""What looks like a credential and would be sent is named with its place and the way out, and its
value is not repeated.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kdist.errors import Problem
from kdist.job_file import load_files
from tests.cli.conftest import Kdist
from tests.cli.conftest import kdist as kdist

JOB = """\
apiVersion: kdist.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits}
spec:
  image: registry.example.com/team/kdist-trainer:dev
  train: {workload: digits, epochs: 1}
"""


def warnings_of(folder: Path, text: str) -> list[Problem]:
    """What is said about a job file with this text at its end."""
    (folder / "job.yaml").write_text(JOB + text)
    found: list[Problem] = []
    load_files(folder / "job.yaml", warnings=found)
    return found


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "TOKEN", "MY_SECRET_ID", "DB_PASSWORD", "db_password"]
)
def test_a_value_of_a_telling_name_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    (found,) = warnings_of(
        tmp_path, f"  env:\n    - {{name: A, value: b}}\n    - name: {name}\n      value: hunter2\n"
    )
    assert (found.line, found.column, found.path) == (10, 14, "spec.env[1]")
    assert "secret: {name: SECRET, key: KEY}" in found.hint
    assert "hunter2" not in f"{found} {found.hint}"


@pytest.mark.parametrize(
    "variable",
    [
        "{name: HF_TOKEN, secret: {name: hub, key: token}}",
        "{name: TOKENIZERS_PARALLELISM, value: 'false'}",
        "{name: KEYBOARD, value: us}",
        "{name: HF_TOKEN, value: ''}",
    ],
)
def test_a_reference_and_an_innocent_name_are_left_alone(variable: str, tmp_path: Path) -> None:
    assert warnings_of(tmp_path, f"  env: [{variable}]\n") == []


def test_a_value_in_the_pod_template_is_named_too(tmp_path: Path) -> None:
    container = "{name: agent, env: [{name: API_KEY, value: hunter2}]}"
    text = f"  podTemplate: {{spec: {{containers: [{container}]}}}}\n"
    (found,) = warnings_of(tmp_path, text)
    assert found.path == "spec.podTemplate.spec.containers[0].env[0]"
    assert "secretKeyRef" in found.hint


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("key.pem", "x"),
        ("server.key", "x"),
        ("id_rsa", "x"),
        ("id_ed25519.bak", "x"),
        ("credentials.json", "{}"),
        ("credentials-prod.json", "{}"),
        ("prod.env", "A=1"),
        ("kubeconfig", "x"),
        ("my-service-account.json", "{}"),
        ("aws.txt", "key = AKIAABCDEFGHIJKLMNOP"),
        ("notes.txt", "-----BEGIN OPENSSH PRIVATE KEY-----"),
        ("google.json", '{"type": "service_account", "x": 1}'),
        ("settings.py", "TOKEN = 'hf_" + "a" * 34 + "'"),
        ("cluster.yaml", "users: [{user: {client-key-data: abc}}]"),
    ],
)
def test_a_file_that_looks_like_a_credential_is_named(
    name: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / name).write_text(content)
    (tmp_path / "src" / "train.py").write_text("import os\nkey = os.environ['API_KEY']\n")
    (found,) = warnings_of(tmp_path, "  code: ./src\n")
    assert (found.line, found.column, found.path) == (7, 9, "spec.code")
    assert f"./src/{name} looks like a credential" in found.message
    assert "./src/.kdistignore" in found.hint
    (tmp_path / "src" / ".kdistignore").write_text(f"{name}\n")
    assert warnings_of(tmp_path, "  code: ./src\n") == []


def test_where_a_credential_would_be_sent_follows_the_size_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "key.pem").write_text("x")
    (found,) = warnings_of(tmp_path, "  code: ./src\n")
    assert "would be sent in a ConfigMap, which also the role `view` may read" in found.message
    (tmp_path / "src" / "table.bin").write_bytes(bytes(1 << 20))
    (found,) = warnings_of(tmp_path, "  code: ./src\n")
    assert "would be sent to the bucket or claim with the checkpoints" in found.message
    assert "ConfigMap" not in found.message


def test_public_keys_and_code_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name in ("id_rsa.pub", "secrets.py", "keys.py", "tokenizer.json", "environment.yaml"):
        (tmp_path / "src" / name).write_text("import secrets\n")
    assert warnings_of(tmp_path, "  code: ./src\n") == []


def test_validate_render_and_apply_say_what_is_sent_and_what_looks_wrong(
    kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    for name in ("train.py", "key.pem", "a.log", ".gitignore"):
        (Path("src") / name).write_text("*.log\n" if name == ".gitignore" else "x = 1\n")
    Path("job.yaml").write_text(f"{JOB}  code: ./src\n  env: [{{name: API_KEY, value: hunter2}}]\n")
    listed = "spec.code sends 2 files, 12 bytes, of ./src: key.pem, train.py; left out: "
    for command in (
        ["validate", "job.yaml", "-v"],
        ["render"],
        ["apply", "job.yaml", "--dry-run=client"],
    ):
        done = kdist(*command)
        assert done.exit_code == 0, done.stderr
        shown = done.stdout if command[0] == "validate" else done.stderr
        assert f"{listed}a.log (.gitignore)" in " ".join(shown.split())
        told = " ".join(done.stderr.split())
        assert "job.yaml:7:9: spec.code: ./src/key.pem looks like a credential" in told
        assert "job.yaml:8:32: spec.env[0]: the value of API_KEY" in told
        assert "hunter2" not in done.stderr


def test_a_link_out_of_the_folder_is_a_problem_of_the_job_file(
    kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    Path("src/out").symlink_to("/etc/hostname")
    Path("job.yaml").write_text(f"{JOB}  code: ./src\n")
    for command in (["validate", "job.yaml"], ["apply", "job.yaml", "--dry-run=client"]):
        done = kdist(*command)
        assert done.exit_code == 2
        assert "job.yaml:7:9: spec.code: ./src/out is a link out of the folder" in done.stderr
    done = kdist("render", "job.yaml")
    assert done.exit_code == 1
    assert "out is a link out of the folder, to /etc/hostname" in " ".join(done.stderr.split())


def test_a_script_that_is_left_out_is_a_problem_before_anything_is_sent(
    kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    Path("src/train.py").write_text("x = 1\n")
    Path("src/.gitignore").write_text("train.py\n")
    job = JOB.replace("  train: {workload: digits, epochs: 1}\n", "  script: {path: train.py}\n")
    Path("job.yaml").write_text(f"{job}  code: ./src\n")
    done = kdist("apply", "job.yaml", "--dry-run=client")
    assert done.exit_code == 2
    assert "src/train.py is left out of what is sent to the cluster" in done.stderr
    Path("src/.kdistignore").write_text("!train.py\n")
    assert kdist("apply", "job.yaml", "--dry-run=client").exit_code == 0
