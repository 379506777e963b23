"""Every document that another version may read says its format: without a number it is that of
0.1.0, and a newer one is refused by name and left as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kdist.agents.client import AgentClient
from kdist.errors import KdistError
from kdist.job.local.run_dir import RunFolder
from kdist.ledger import parse_lines
from kdist.status import ExitRecord
from kdist_trainer.agent import exits
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import (
    CheckpointDirectory,
    UnsupportedCheckpointError,
    write_state,
)
from kdist_trainer.config import TrainConfig
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats import (
    FORMAT,
    FORMATS,
    STRICT,
    NewerFormatError,
    seconds_left,
    stamp,
    take_format,
)
from tests.house.tree import ROOT, python_files


class Document(NamedTuple):
    """A document on a disk: how it is written, read, and refused.

    Attributes:
        write: writes it into a folder and returns its file.
        read: reads it again.
        error: what the reader raises for a newer one.
    """

    write: Callable[[Path], Path]
    read: Callable[[Path], object]
    error: type[Exception]


def write_train(folder: Path) -> Path:
    config = {"name": "job", "nodes": {"min": 1, "max": 1}, "script": {"path": "a.py"}}
    (folder / "train.json").write_text(json.dumps(stamp("train.json", config)))
    return folder / "train.json"


def write_nodes(folder: Path) -> Path:
    write_train(folder)
    (folder / "nodes.json").write_text(json.dumps(stamp("nodes.json", {"min": 1, "max": 2})))
    return folder / "nodes.json"


def write_done(folder: Path) -> Path:
    CheckpointDirectory(folder).write_done({"run_id": "a"})
    return folder / "DONE"


def write_lock(folder: Path) -> Path:
    Lock(folder).acquire(run_id="a", generation=1)
    return next((folder / "lock").iterdir())


def write_event(folder: Path) -> Path:
    RunLedger(folder).append("started")
    return folder / "ledger" / "events.jsonl"


def write_exit(folder: Path) -> Path:
    exits.write_record(exits.success(step=1), folder)
    return folder / "exit.json"


def write_run(folder: Path) -> Path:
    run = RunFolder.open("job")
    run.begin()
    run.end("done")
    run.close()
    return folder / "runs" / "job" / "run.json"


def open_run(_: Path) -> None:
    RunFolder.open("job").close()


def read_events(file: Path) -> None:
    with file.open("rb") as lines:
        list(parse_lines(lines))


ON_DISK = {
    "train.json": Document(write_train, TrainConfig.read, NewerFormatError),
    "nodes.json": Document(
        write_nodes, lambda file: TrainConfig.read(file.with_name("train.json")), NewerFormatError
    ),
    "run.json": Document(write_run, open_run, KdistError),
    "DONE": Document(
        write_done,
        lambda file: CheckpointDirectory(file.parent).read_done(),
        UnsupportedCheckpointError,
    ),
    "lock": Document(
        write_lock, lambda file: Lock(file.parents[1]).last(), CheckpointMismatchError
    ),
    "events.jsonl": Document(
        write_event, lambda file: RunLedger(file.parents[1]).events(), NewerFormatError
    ),
}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))


@pytest.mark.parametrize("name", ON_DISK)
def test_a_document_is_read_with_its_number_and_without_and_a_newer_one_is_refused(
    name: str, tmp_path: Path
) -> None:
    document = ON_DISK[name]
    file = document.write(tmp_path)
    document.read(file)
    written = json.loads(file.read_text())
    assert written.get(FORMAT) == (None if name in STRICT else FORMATS[name])
    written.pop(FORMAT, None)
    file.write_text(json.dumps(written) + "\n")
    document.read(file)
    newer = json.dumps({FORMAT: FORMATS[name] + 1, **written}) + "\n"
    file.write_text(newer)
    with pytest.raises(document.error, match="is of format 2, and this version of kdist knows"):
        document.read(file)
    assert file.read_text() == newer, "it is kept"


def test_a_newer_exit_record_keeps_its_code_and_says_why_no_more_is_known(tmp_path: Path) -> None:
    written = json.loads(write_exit(tmp_path).read_text())
    assert written[FORMAT] == FORMATS["exit.json"]
    assert ExitRecord.read(written) == ExitRecord.read(
        {key: value for key, value in written.items() if key != FORMAT}
    )
    newer = ExitRecord.read({**written, FORMAT: 2, "message": "means something else"})
    assert newer is not None
    assert (newer.code, newer.outcome, newer.whole) == (0, "done", False)
    assert "exit.json is of format 2" in newer.message


def test_a_setting_that_was_removed_is_ignored_where_a_former_version_has_written_it(
    tmp_path: Path,
) -> None:
    file = write_train(tmp_path)
    expected = TrainConfig.read(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), "standby": "warm"}))
    assert TrainConfig.read(file) == expected


def test_a_newer_status_is_named_instead_of_misread() -> None:
    class Transport:
        def get(self, path: str, *, timeout: float, most: int) -> bytes | None:
            assert (path, timeout > 0, most > 0) == ("/status", True, True)
            return json.dumps({FORMAT: 2, "state": 7, "job": "a"}).encode()

    status = AgentClient(Transport()).status()
    assert status is not None
    assert "/status is of format 2" in str(status["state"])


def test_a_newer_line_of_the_ledger_is_named_by_the_command_line() -> None:
    assert list(parse_lines(BytesIO(b'{"event": "a"}\n{"format": 1, "event": "b"}\n')))
    with pytest.raises(KdistError, match=r"events\.jsonl is of format 2"):
        list(parse_lines(BytesIO(b'{"format": 2, "event": "a"}\n')))


def test_the_state_of_a_checkpoint_says_its_format() -> None:
    assert json.loads(write_state({"a": 1}, {}))[FORMAT] == 1, "as earlier versions write it"
    assert json.loads(write_state({"a": (1,)}, {}))[FORMAT] == FORMATS["state.json"]


@pytest.mark.parametrize("number", [0, -1, True, "2", 1.0, None, [], 10**30])
def test_what_is_no_known_number_is_refused(number: Any) -> None:
    with pytest.raises(NewerFormatError, match=r"run\.json is of format"):
        take_format("run.json", {FORMAT: number})


def test_every_declared_document_is_written_and_read_with_its_number() -> None:
    """`job.json` and `report.json` have an apiVersion, and manifest.json had a number before."""
    code = "\n".join(
        path.read_text()
        for path in python_files("cli", "trainer")
        if path != ROOT / "trainer" / "kdist_trainer" / "formats" / "__init__.py"
    )
    constants = {"events.jsonl": "EVENTS_FILE", "nodes.json": "NODES", "state.json": "STATE"}
    readers = {
        name
        for name in FORMATS
        for word in (f'"{name}"', constants.get(name, f'"{name}"'))
        if f"take_format({word}," in code or f"check_format({word}," in code
    }
    assert readers == set(FORMATS) - {"manifest.json"}
    assert 'FORMATS["manifest.json"]' in code
    assert {"job.json", "report.json"}.isdisjoint(FORMATS)
    assert all(f"{name}," in code for name in ("CLI_API_VERSION", "JOB_API_VERSION"))


@pytest.mark.parametrize("pace", [None, 0, -1.0, float("inf"), float("nan"), "2", True, 1e300])
def test_a_pace_that_is_none_estimates_nothing(pace: object) -> None:
    assert seconds_left(3, 10, [pace]) is None


def test_the_slowest_pace_estimates_the_time_left() -> None:
    assert seconds_left(3, 10, [1.0, 2.0, None]) == 14.0
    assert seconds_left(11, 10, [1.0]) == 0.0
    assert seconds_left(None, 10, [1.0]) is seconds_left(3, None, [1.0]) is None
