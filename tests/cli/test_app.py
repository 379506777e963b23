"""The one door of the command line: help without imports, errors as text, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kdist import __version__
from kdist.app import COMMANDS, MEANT, cli, load_command, report, sections
from kdist.errors import Code, InvalidJobError, KdistError, NotFoundError, Problem, UsageError
from tests.cli.cluster.api import Api, Asked, Reply, write_kubeconfig
from tests.cli.conftest import Kdist

HEAVY = {
    *("torch", "kubernetes", "pydantic", "jinja2", "rich", "asyncio", "requests", "yaml", "socket"),
    *(
        "kdist.spec",
        "kdist.job_file",
        "kdist.cluster",
        "kdist.backends",
        "kdist.job.cluster",
        "kdist.status",
        "kdist.job.local",
    ),
}
# words that a help text says of an exit code
MEANINGS = {
    Code.USAGE: "usage|invalid|error",
    Code.UNCHANGED: "unchanged",
    Code.NOT_FOUND: "no such",
    Code.UNREACHABLE: "unreachable",
    Code.TIMEOUT: "time",
    Code.FORBIDDEN: "permission|right",
    Code.JOB_FAILED: "failed",
    Code.JOB_CANCELLED: "stopped|not confirmed",
    Code.HUNG_UP: "SIGHUP",
    Code.INTERRUPTED: "interrupted|Ctrl-C",
    Code.TERMINATED: "SIGTERM",
}
# what a file without problems, `--set` or code needs nothing of
UNUSED = {
    *("torch", "kubernetes", "jinja2", "rich", "asyncio", "requests", "subprocess", "difflib"),
    *(
        "kdist.job_file.problems",
        "kdist.job_file.overrides",
        "kdist.job_file.code",
        "kdist.spec.reference",
    ),
    *("importlib.metadata", "kdist_trainer.config.edit_rules"),
    *(
        "kdist.terminal.nonblocking",
        "kdist.cluster",
        "kdist.job.cluster",
        "kdist.status",
        "kdist.job.local",
    ),
}


def loaded(unwanted: set[str], args: list[str]) -> str:
    """Which of these modules a command imports, and its exit code."""
    program = (
        "import sys\nfrom kdist.app import cli\n"
        f"try: cli.main({args!r})\nexcept SystemExit as end: code = end.code\n"
        f"print('loaded', *sorted({unwanted!r} & set(sys.modules)), code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return ended.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], ["-h"], ["validate", "--help"], ["run", "--help"], ["init", "-h"]],
)
def test_help_and_version_import_nothing_heavy(args: list[str]) -> None:
    assert loaded(HEAVY, args) == "loaded 0"


def test_a_valid_file_is_checked_without_what_only_problems_and_clusters_need() -> None:
    assert loaded(UNUSED, ["validate", "examples/digits.yaml"]) == "loaded 0"


def test_python_does_not_search_the_imported_modules_for_garbage_as_kdist_exits() -> None:
    program = (
        "import atexit, gc\nfrom kdist.__main__ import main\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > len(gc.get_objects())))\nmain()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1] == "True"


def test_help_shows_every_command_in_its_section(kdist: Kdist) -> None:
    shown = kdist("--help").stdout
    for section, commands in COMMANDS.items():
        block = shown.split(f"{section}:\n")[1].split("\n\n")[0]
        assert dict(re.findall(r"^  ([\w-]+) +(.*)$", block, re.MULTILINE)) == commands


def test_examples_come_first_in_the_help_of_every_command(kdist: Kdist) -> None:
    for name in (name for section in COMMANDS.values() for name in section):
        shown = kdist(name, "--help").stdout
        examples = shown.split("Examples:\n")[1].split("\n\n")[0]
        assert len(re.findall(r"kdist", examples)) >= 3
        assert shown.index("Examples:") < shown.index("Options:")


def test_the_table_and_the_help_of_a_command_say_the_same_sentence() -> None:
    for commands in sections().values():
        for name, sentence in commands.items():
            assert (load_command(name).help or "").split("\n\n")[0] == sentence


def test_the_exit_codes_in_help_texts_are_those_of_the_errors() -> None:
    shown: set[str] = set()
    for name in (name for commands in sections().values() for name in commands):
        block = (load_command(name).help or "").partition("Exit codes:")[2]
        for numbers, words in re.findall(r"((?:\d+, )*\d+) ([^\d]+)", block):
            for code in map(Code, map(int, numbers.split(", "))):
                assert re.search(MEANINGS.get(code, ""), words), (name, code, words)
                shown.add(code.name)
    assert shown > {code.name for code in MEANINGS if code < 128}


@pytest.mark.parametrize(
    "moment",
    [
        "class Late(type(sys)): cli = property(lambda _: signal.raise_signal(signal.SIGINT))\n"
        "sys.modules['kdist.app'] = Late('kdist.app')\n",
        "app.cli.main = lambda **_: sys.exit(130)\n"
        "class Out: flush = staticmethod(lambda: signal.raise_signal(signal.SIGINT))\n"
        "sys.stdout = Out\n",
    ],
    ids=["while it starts", "again while it ends"],
)
def test_ctrl_c_leaves_no_traceback(moment: str) -> None:
    program = f"import signal, sys\nfrom kdist import __main__, app\n{moment}__main__.main()"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_with_its_code_and_a_document(number: signal.Signals) -> None:
    program = (
        "import signal, sys\nfrom kdist import __main__, job_file\n"
        f"signal.signal({int(number)}, signal.SIG_DFL)\n"  # nohup has SIGHUP ignored
        f"job_file.load_files = lambda *_, **__: signal.raise_signal({int(number)})\n"
        "sys.argv = ['kdist', 'validate', 'job.yaml', '-o', 'json']\n__main__.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    error = json.loads(ended.stdout)
    assert (ended.returncode, error["exitCode"]) == (128 + number, 128 + number)
    assert error["message"] == f"ended by {number.name}"
    assert ended.stderr.strip() == f"Ended by {number.name}."


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_no_traceback(closed: str) -> None:
    command = f"exec {sys.executable} -m kdist explain spec.nodse {closed}"
    ended = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (4, "")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("logs", "digits", "-f"), 1),
        (("events", "digits", "--watch"), 1),
        (("status", "digits", "-w"), 1),
        (("status", "-f", "job.yaml"), 10),
    ],
)
def test_an_error_is_one_line_where_documents_are(
    words: tuple[str, ...],
    lines: int,
    kdist: Kdist,
    job_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(job_file.with_name("none")))
    told = kdist(*words, "-o", "json")
    assert json.loads(told.stdout)["kind"] == "Error"
    assert told.stdout.count("\n") >= lines
    assert (told.stdout.count("\n") == 1) == (lines == 1)


def test_the_version_is_one_line(kdist: Kdist) -> None:
    assert kdist("--version").stdout == f"kdist {__version__}\n"
    assert kdist("version").stdout.splitlines()[0] == f"kdist {__version__}"


def test_without_a_command_the_help_is_reported_on_stderr(kdist: Kdist) -> None:
    result = kdist()
    assert (result.exit_code, result.stdout) == (Code.USAGE, "")
    assert "Examples:" in result.stderr


@pytest.mark.parametrize(
    ("typed", "meant"), [("validat", "validate"), ("expain", "explain"), ("xyzzy", "")]
)
def test_an_unknown_command_gets_a_near_one(typed: str, meant: str, kdist: Kdist) -> None:
    result = kdist(typed)
    hint = f"Hint: did you mean `kdist {meant}`?\n" if meant else ""
    assert result.exit_code == Code.USAGE
    assert result.stderr == f"Error: there is no command `{typed}`\n{hint}Next: kdist --help\n"


@pytest.mark.parametrize(("typed", "meant"), MEANT.items())
def test_a_word_of_another_tool_gets_the_command_that_does_it(
    typed: str, meant: str, kdist: Kdist
) -> None:
    assert f"Hint: did you mean `{meant}`?\n" in kdist(typed).stderr
    assert kdist(meant.split()[1], "--help").exit_code == 0


def test_help_and_a_command_show_the_help_of_the_command(kdist: Kdist) -> None:
    assert kdist("help", "get").stdout == kdist("get", "--help").stdout
    assert kdist("help").stdout == kdist("--help").stdout


def test_the_options_of_a_cluster_may_stand_before_the_command(
    kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api(lambda _: Reply(document={"items": []}))
    asked: list[Asked] = api.asked
    with closing(api):
        write_kubeconfig(tmp_path / "config", api.url)
        config = ("--kubeconfig", str(tmp_path / "config"))
        monkeypatch.chdir(tmp_path)
        assert "namespace a" in kdist(*config, "-n", "a", "get").stderr
        assert "namespace b" in kdist(*config, "-n", "a", "--as", "eve", "get", "-n", "b").stderr
    namespaces = [re.search("/namespaces/([^/]+)/", request.path) for request in asked]
    assert {found[1] if found else None for found in namespaces} == {"a", "b"}
    assert "eve" in {request.headers.get("impersonate-user") for request in asked}
    assert kdist("-n", "a", "explain", "spec").stdout == kdist("explain", "spec").stdout


def test_an_unknown_option_is_reported_with_the_help_to_ask_for(kdist: Kdist) -> None:
    result = kdist("validate", "--fast", "job.yaml")
    assert result.exit_code == Code.USAGE
    assert result.stderr.startswith("Error: No such option")
    assert result.stderr.endswith("Next: kdist validate --help\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KdistError("x"), 1),
        (KdistError("x", code=Code.JOB_FAILED), 10),
        (UsageError("x"), 2),
        (NotFoundError("x"), 4),
        (InvalidJobError("f", [Problem("f", 1, 1, "", "x")]), 2),
        (click.UsageError("x"), 2),
        (click.ClickException("x"), 1),
        (click.Abort(), 130),
        (PermissionError(13, "Permission denied", "f"), 1),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_every_error_has_its_exit_code_and_a_line_on_stderr(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KDIST_DEBUG", raising=False)
    assert report(error) == code
    reported = capsys.readouterr()
    assert reported.out == ""
    assert reported.err.splitlines()
    assert "Traceback" not in reported.err


def test_a_bug_is_called_a_bug_and_shows_where_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("KDIST_DEBUG", "1")
    try:
        raise ZeroDivisionError("by nought")
    except ZeroDivisionError as error:
        report(error)
    reported = capsys.readouterr().err
    assert "Traceback (most recent call last)" in reported
    assert "Error: internal error: ZeroDivisionError: by nought" in reported


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kdist.job_file.load_files", interrupt)
    result = CliRunner().invoke(cli, ["validate", "job.yaml"])
    assert result.exit_code == Code.INTERRUPTED


def test_a_reader_that_goes_away_is_no_traceback(job_file: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "kdist", "explain", "-r"]
        ended = subprocess.run(
            command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(write)
    assert ended.returncode == 1
    assert ended.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_names_the_command(shell: str, kdist: Kdist) -> None:
    result = kdist("completion", shell)
    assert result.exit_code == 0
    assert "_KDIST_COMPLETE" in result.stdout


def test_completion_offers_commands_and_their_files() -> None:
    environment = os.environ | {
        "_KDIST_COMPLETE": "bash_complete",
        "COMP_WORDS": "kdist va",
        "COMP_CWORD": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "kdist"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout.split() == ["plain,validate"]
