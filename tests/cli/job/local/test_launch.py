"""How agents are started: what is on their command line and in their environment, and what is
refused before.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist.errors import KdistError, UsageError
from kdist.job.local import launch
from kdist.job.local.run_dir import RunFolder
from kdist.job.local.supervisor import AgentCommand
from kdist.job_file import load_text, resolve_path
from kdist.spec import TrainingJob


def make_job(**spec: Any) -> TrainingJob:
    document = {"train": {"workload": "digits", "epochs": 1}, **spec}
    text = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "job"},
        "spec": document,
    }
    return load_text(json.dumps(text), source="test")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    folder = RunFolder.open("job")
    folder.begin()
    yield folder
    folder.close()


def plan(
    job: TrainingJob,
    folder: RunFolder,
    base: Path,
    *,
    devices: list[str] | None = None,
    **environment: str,
) -> list[AgentCommand]:
    return launch.plan_agents(job, folder, base=base, environment=environment, devices=devices)


def options(command: AgentCommand) -> dict[str, str]:
    words = list(command.argv)[3:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_every_node_of_the_largest_job_gets_an_agent_with_scratch_of_its_own(
    folder: RunFolder, tmp_path: Path
) -> None:
    commands = plan(
        make_job(nodes={"min": 1, "max": 3}, train={"workload": "digits", "epochs": 1}),
        folder,
        tmp_path,
    )
    assert [command.node for command in commands] == ["node-0", "node-1", "node-2"]
    assert [options(command)["--scratch"] for command in commands] == [
        str(folder.root / f"node-{n}") for n in range(3)
    ]


def test_all_agents_share_config_run_id_rendezvous_and_lifeline(
    folder: RunFolder, tmp_path: Path
) -> None:
    commands = plan(make_job(nodes=2), folder, tmp_path)
    shared = [
        {k: v for k, v in options(command).items() if k not in ("--node", "--scratch")}
        for command in commands
    ]
    assert (
        shared[0]
        == shared[1]
        == {
            "--config": str(folder.root / "train.json"),
            "--run-id": folder.run_id,
            "--rendezvous": f"file:{folder.root / 'rendezvous-1' / 'store'}",
            "--port": "0",
            "--parent-pipe": str(folder.root / "parent-pipe"),
            "--checkpoints": str(folder.root / "checkpoints"),
        }
    )


def test_data_and_code_are_found_relative_to_the_job_file(
    folder: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "images").mkdir()
    job = make_job(code="./src", data=[{"path": "images", "mountPath": "/data"}])
    assert options(plan(job, folder, tmp_path)[0])["--code"] == str(tmp_path / "src")
    assert options(plan(job, folder, tmp_path)[0])["--data"] == f"/data={tmp_path / 'images'}"


@pytest.mark.parametrize(
    ("code", "said"),
    [({"claim": "team"}, "claim team is"), ({"configMap": "mine"}, "ConfigMap mine is")],
)
def test_code_that_is_on_a_cluster_is_named(
    folder: RunFolder, tmp_path: Path, code: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=f"spec.code: {said} on a cluster"):
        plan(make_job(code=code), folder, tmp_path)


def test_a_home_directory_in_a_path_is_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve_path(tmp_path, "~/images") == Path("/home/me/images")
    assert resolve_path(tmp_path, "~nobody-of-this-name/x") == tmp_path / "~nobody-of-this-name/x"


def test_everything_that_is_missing_here_is_reported_at_once(
    folder: RunFolder, tmp_path: Path
) -> None:
    job = make_job(
        code="./src",
        data=[
            {"claim": "imagenet", "mountPath": "/data"},
            {"path": "images", "mountPath": "/images"},
        ],
        env=[{"name": "TOKEN", "secret": {"name": "s", "key": "k"}}],
    )
    with pytest.raises(UsageError) as caught:
        plan(job, folder, tmp_path)
    reported = str(caught.value)
    assert f"spec.code: there is no folder {tmp_path / 'src'}" in reported
    assert "spec.data[0] is in the claim imagenet of a cluster" in reported
    assert f"spec.data[1].path: {tmp_path / 'images'} does not exist" in reported
    assert (
        "TOKEN is a secret (key k of the Secret s on a cluster): set it in the "
        "environment of kdist run"
    ) in reported


def test_a_secret_comes_from_the_callers_environment_and_never_shows_on_a_command_line(
    folder: RunFolder, tmp_path: Path
) -> None:
    job = make_job(
        env=[
            {"name": "API_KEY", "secret": {"name": "s", "key": "k"}},
            {"name": "MODE", "value": "offline"},
        ]
    )
    (command,) = plan(job, folder, tmp_path, API_KEY="s3cret", MODE="online", PATH="/bin")
    expected = {"API_KEY": "s3cret", "MODE": "offline", "PATH": "/bin"}
    assert {name: command.environment[name] for name in ("API_KEY", "MODE", "PATH")} == expected
    assert "s3cret" not in " ".join(command.argv)


def test_the_jobs_own_folder_of_checkpoints_is_relative_to_its_file(tmp_path: Path) -> None:
    assert (
        launch.checkpoint_folder(make_job(checkpoints={"path": "ckpt"}), tmp_path)
        == tmp_path / "ckpt"
    )
    assert launch.checkpoint_folder(make_job(checkpoints={"claim": "ckpt"}), tmp_path) is None
    assert launch.checkpoint_folder(make_job(), tmp_path) is None


@pytest.mark.parametrize(
    ("count", "devices", "shares"),
    [
        (2, ["0", "1", "2", "3"], ["0,1", "2,3"]),
        (2, ["0", "1", "2"], ["0", "1"]),
        (2, ["0"], ["", ""]),
        (1, ["0", "1"], [None]),
        (2, None, [None, None]),
    ],
)
def test_gpus_are_dealt_to_the_nodes_so_that_no_two_share_one(
    folder: RunFolder,
    tmp_path: Path,
    count: int,
    devices: list[str] | None,
    shares: list[str | None],
) -> None:
    commands = plan(make_job(nodes=count), folder, tmp_path, devices=devices)
    assert [command.environment.get("CUDA_VISIBLE_DEVICES") for command in commands] == shares


@pytest.mark.parametrize(
    ("chosen", "devices"),
    [("2,3", ["2", "3"]), ("", []), ("-1", []), ("1,-1,2", ["1"]), ("GPU-a", ["GPU-a"])],
)
def test_only_gpus_that_the_caller_allows_are_used(chosen: str, devices: list[str]) -> None:
    assert launch.list_devices({"CUDA_VISIBLE_DEVICES": chosen}) == devices


@pytest.mark.parametrize(
    ("lacking", "installer"),
    [
        ({"torch"}, f"{sys.executable} -m pip install"),
        ({"torch", "pip"}, f"uv pip install --python {sys.executable}"),
    ],
)
def test_without_torch_the_error_says_how_to_get_all_that_a_training_needs(
    lacking: set[str], installer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None if name in lacking else object())
    with pytest.raises(KdistError) as caught:
        launch.check_torch()
    assert "kdist run needs torch>=2.13 in the environment of kdist" in caught.value.message
    assert caught.value.next_command == f"{installer} {shlex.join(launch.FOR_TRAINING)}"


def test_agents_are_told_the_commit_of_the_files_folder_unless_it_is_set(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_commit", {tmp_path: "1f2e"}.__getitem__)
    (found,) = plan(make_job(), folder, tmp_path)
    (kept,) = plan(make_job(), folder, tmp_path, KDIST_COMMIT="own")
    assert [each.environment["KDIST_COMMIT"] for each in (found, kept)] == ["1f2e", "own"]
