"""What the shells are offered: through click's protocol in a process of its own, through kubectl's,
and once in a real bash.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import click
import pytest

from kdist import completion
from kdist.app import cli
from kdist.job.find import Place
from tests.cli.cluster.api import Api, Asked, Reply, write_kubeconfig

PATIENCE = 60.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run `digits`, and no cluster yet."""
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    run = tmp_path / "runs" / "digits"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"name": "digits", "invocations": []}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(asked: Asked) -> Reply:
    """A cluster with the job `gpt`, the TrainingJob `bare` without objects and two namespaces."""
    named = {"name": "gpt-config", "labels": {"kdist.dev/job": "gpt"}}
    if asked.path.endswith("/configmaps"):
        return Reply(document={"items": [{"metadata": named}]})
    if asked.path.endswith("/trainingjobs"):
        return Reply(document={"items": [{"metadata": {"name": "bare"}}]})
    return Reply(document={"items": [{"metadata": {"name": each}} for each in ("ml", "default")]})


def ask(line: str, shell: str = "bash", *, kind: str = "plain") -> list[str]:
    """The values of this kind that `shell` is offered at the end of `line`; those of kind `file`
    begin the paths that it completes by itself.
    """
    word = line.rsplit(" ", 1)[1]
    environment = os.environ | {"_KDIST_COMPLETE": f"{shell}_complete", "COMP_WORDS": line}
    if shell == "bash":
        environment["COMP_LINE"] = line
    else:
        environment["COMP_CWORD"] = word if shell == "fish" else str(line.count(" "))
    ended = subprocess.run(
        [sys.executable, "-m", "kdist"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.stderr == ""
    lines = ended.stdout.splitlines()
    if shell == "zsh":
        return lines[1::3]
    return [each.removeprefix(f"{kind},") for each in lines if each.startswith(f"{kind},")]


@pytest.mark.processes
@pytest.mark.sampled
def test_names_come_from_the_cluster_and_from_this_machine(home: Path) -> None:
    with closing(Api(answer)) as api:
        write_kubeconfig(home / "config", api.url)
        assert ask("kdist status ") == ["bare", "digits", "gpt"]
        assert ask("kdist logs -n ml ") == ["bare", "gpt"], "a namespace excludes this machine"
        assert "/api/v1/namespaces/ml/configmaps" in [each.path for each in api.asked]
        assert ask("kdist get d") == ["digits"]
        assert ask("kdist get -n m") == ["ml"]


@pytest.mark.processes
@pytest.mark.sampled
def test_a_damaged_kubeconfig_is_silent(home: Path) -> None:
    (home / "config").write_text("contexts: [")
    assert ask("kdist suspend ") == ["digits"]
    assert ask("kdist get -n ") == ask("kdist get --context ") == []


def test_a_cluster_that_does_not_answer_offers_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_kubeconfig(home / "config", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert completion.job_names(Place()) == ["digits"]
        assert completion.namespaces(Place()) == []


def test_contexts_are_those_of_the_chosen_kubeconfig(home: Path) -> None:
    write_kubeconfig(home / "other", "http://127.0.0.1:1")
    assert completion.contexts(Place()) == []
    assert completion.contexts(Place(kubeconfig=str(home / "other"))) != []


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("spec.train.ch", ["spec.train.checkpoint."]),
        ("spec.env.na", ["spec.env.name"]),
        ("sp", ["spec."]),
        ("spec.nothing.", []),
    ],
)
def test_explain_is_offered_fields(word: str, offered: list[str]) -> None:
    assert completion.fields(word) == offered


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("spec.train.pre", ["spec.train.precision="]),
        ("spec.train.check", ["spec.train.checkpoint."]),
        ("spec.train.precision=f", ["spec.train.precision=fp32", "spec.train.precision=fp16"]),
        ("spec.train.epochs=", []),
        ("spec.train.nothing=", []),
    ],
)
def test_set_is_offered_fields_and_their_values(word: str, offered: list[str]) -> None:
    assert completion.settings(word) == offered


@pytest.mark.processes
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_value_behind_an_equals_sign_is_offered_as_the_whole_word(shell: str) -> None:
    assert ask("kdist wait digits --for=run", shell) == ["--for=running"]


def test_every_option_that_takes_a_path_is_offered_files() -> None:
    found = list(
        options_for_paths(cli, click.Context(cli, info_name="kdist", **cli.context_settings))
    )
    offered = {
        (context.command_path, option.opts[-1]): [
            each.type for each in option.shell_complete(context, "")
        ]
        for context, option in found
    }
    assert ("kdist delete", "--filename") in offered
    assert ("kdist bench", "--out") in offered
    assert [key for key, kinds in offered.items() if kinds not in (["file"], ["dir"])] == []


def options_for_paths(
    command: click.Command, context: click.Context
) -> Iterator[tuple[click.Context, click.Option]]:
    """The options of a command and of those below it whose value is a path."""
    for each in command.params:
        if isinstance(each, click.Option) and not each.hidden:
            metavar = each.make_metavar(context)
            if metavar in ("FILE", "FOLDER", "DIRECTORY", "PATH"):
                yield context, each
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from options_for_paths(
                inner, click.Context(inner, info_name=name, parent=context)
            )


@pytest.mark.processes
@pytest.mark.parametrize("words", ["delete -f", "checkpoints -f", "bench all_reduce -f", "apply"])
@pytest.mark.sampled
def test_job_files_are_completed_by_the_shell(home: Path, words: str) -> None:
    assert ask(f"kdist {words} ", kind="file") == [""]
    assert ask(f"kdist {words} ") == []


@pytest.mark.processes
@pytest.mark.parametrize("words", ["delete", "checkpoints verify", "checkpoints export", "report"])
@pytest.mark.sampled
def test_runs_are_completed_by_name_and_their_folders_by_the_shell(home: Path, words: str) -> None:
    assert ask(f"kdist {words} ") == ["digits"]
    assert ask(f"kdist {words} ./runs/", kind="file") == ["./runs/"]


@pytest.mark.sampled
@pytest.mark.processes
def test_kubectl_is_offered_values_and_a_directive(home: Path) -> None:
    def ask_for(*words: str) -> list[str]:
        ended = subprocess.run(
            [sys.executable, "-c", "from kdist.app import complete; complete()", *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        return ended.stdout.splitlines()

    assert ask_for("va") == ["validate", ":4"]
    assert ask_for("explain", "spec.train.ch") == ["spec.train.checkpoint.", ":6"]
    assert ask_for("apply", "--backend", "jobs") == ["jobset", ":4"]
    assert ask_for("status", "") == ["digits", ":0"], "job files too"


@pytest.mark.processes
def test_bash_completes_at_the_keyboard(home: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    (home / "kdist").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kdist "$@"\n')
    (home / "kdist").chmod(0o755)
    path = f"{home}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PS1": "> ", "TERM": "dumb"}
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        [bash, "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    seen = b""

    def type_until(keys: str, expected: bytes) -> None:
        nonlocal seen
        os.write(ours, keys.encode())
        end, start = time.monotonic() + PATIENCE, len(seen)
        while expected not in seen[start:]:
            assert time.monotonic() < end, seen
            try:
                seen += os.read(ours, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)

    try:
        type_until('source <(kdist completion bash); echo "re"ady\n', b"ready\r\n")
        type_until("kdist run job.yaml --set spec.train.pre\t", b"precision=")
        type_until("bf16-\t", b"bf16-params ")
        type_until("\x15kdist wait --for=sus\t", b"--for=suspended ")
        type_until("\x15kdist status dig\t", b"digits ")
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
