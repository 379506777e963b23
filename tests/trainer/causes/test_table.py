"""The table of causes: each row, raised by a real rank in three places, is what it says; what no
row recognizes is tried again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from mmap import PROT_READ, mmap
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.causes import BY_NAME, TABLE, Row
from kdist_trainer.config.exit_codes import Cause, Fault
from tests.draw import read_seed
from tests.house.tree import ROOT

SCRIPT = Path(__file__).with_name("rows_script.py")
LIBRARIES = Path(sysconfig.get_path("purelib"))
MACHINES = {Fault.DEVICE, Fault.NODE, Fault.NETWORK, Fault.STORAGE, Fault.UNKNOWN}
LEAST_ROWS = 60


@pytest.fixture(scope="module")
def judged() -> list[dict[str, Any]]:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), read_seed(ROOT)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def of_rows(judged: list[dict[str, Any]]) -> list[tuple[Row, dict[str, Any]]]:
    return [(BY_NAME[one["row"]], one) for one in judged if one["row"] in BY_NAME]


def test_there_are_enough_rows_and_their_names_are_unique() -> None:
    assert len(TABLE) >= LEAST_ROWS
    assert len(BY_NAME) == len(TABLE)


def test_every_row_is_recognized_wherever_it_is_raised(judged: list[dict[str, Any]]) -> None:
    found = of_rows(judged)
    assert len(found) == 4 * len(TABLE)
    wrong = [
        (row.name, one["place"], one["signature"])
        for row, one in found
        if one["signature"] != row.name
        and not (row.only_users and one["place"] in ("in_kdist", "in_collective"))
    ]
    assert wrong == []


def test_nothing_of_the_machines_is_called_the_users(judged: list[dict[str, Any]]) -> None:
    wrong = [
        (row.name, one["place"], one["cause"])
        for row, one in of_rows(judged)
        if row.fault in MACHINES
        and not (row.users and one["place"] in ("in_own_call", "by_own_raise"))
        and (one["fault"] == Fault.USER or one["cause"] == Cause.USER_CODE)
    ]
    assert wrong == []


def test_few_failures_are_certainly_the_machines() -> None:
    assert {row.name for row in TABLE if row.of_machine} == {
        *("cuda-ecc", "cuda-nvlink", "cuda-contained", "cuda-system"),
        *("nccl-fabric", "nvml-lost", "xid"),
    }


@pytest.mark.parametrize(
    ("message", "row"),
    [
        ("NVRM: Xid (PCI:0000:cb:00): 79, pid=31, name=python", "xid"),
        ("NVRM: Xid (0000:03:00): 130, Channel 00000001", "xid"),
        ("Xid error: 48", "xid"),
        ("NVRM: Xid (PCI:0000:cb:00): 13, pid=79, name=python", "xid-program"),
        ("NVRM: Xid (PCI:0079:cb:00): 31, Ch 00000008", "xid-program"),
        ("Xid 43", "xid-program"),
        ("an Xid was seen on GPU 3", "xid-program"),
    ],
)
def test_an_xid_of_the_program_or_without_a_number_is_not_the_machines(
    message: str, row: str
) -> None:
    found = [each.name for each in TABLE if each.pattern.search(message)]
    assert found[0] == row


def test_in_kdists_frames_a_missing_file_is_not_the_users(judged: list[dict[str, Any]]) -> None:
    found = [one for row, one in of_rows(judged) if row.only_users and one["place"] == "in_kdist"]
    assert found
    assert {one["fault"] for one in found} <= {Fault.KDIST}
    assert not any(one["permanent"] for one in found)


def test_nothing_of_the_users_is_tried_more_than_twice(judged: list[dict[str, Any]]) -> None:
    from kdist_trainer.agent.restart_policy import alike_limit
    from kdist_trainer.ipc.failure import Failure

    asked_for = {"retry", "replicas-differ", "shm-full", "shm-bus-error"}
    for row, one in of_rows(judged):
        if one["fault"] != Fault.USER or row.name in asked_for:
            continue
        failure = Failure.from_json(
            json.dumps(
                {"cause": one["cause"], "code": one["code"], "primary": True, "message": ""}
                | {"signature": one["signature"]}
            )
        )
        assert failure.permanent or 0 < alike_limit(failure) <= 2, one


def test_the_users_own_sockets_files_and_ports_are_the_users(judged: list[dict[str, Any]]) -> None:
    found = [
        one
        for row, one in of_rows(judged)
        if row.users and one["place"] in ("in_own_call", "by_own_raise")
    ]
    assert {one["row"] for one in found} >= {"peer-socket", "disk-read-only", "address-taken"}
    for one in found:
        assert (one["cause"], one["code"], one["permanent"]) == ("user_code", 70, True)
        assert "rows_script.py" in one["line"]
        assert "lost its connection" not in one["advice"], "it is about another rank"


def test_a_hundred_unlisted_texts_are_never_final_at_the_first_time(
    judged: list[dict[str, Any]],
) -> None:
    found = [one for one in judged if one["row"].startswith("unlisted")]
    assert len(found) == 100
    assert [one for one in found if one["permanent"]] == []
    own = [one for one in found if one["cause"] != Cause.UNKNOWN]
    assert all((one["place"], one["cause"]) == ("by_own_raise", "user_code") for one in own)


@pytest.mark.sampled
def test_the_source_of_a_row_holds_what_it_says() -> None:
    by_file: dict[str, list[tuple[Row, str, str]]] = {}
    for row in TABLE:
        file, _, words = row.source.partition(" ")
        path, _, line = file.partition(":")
        by_file.setdefault(path, []).append((row, words, line))
    installed = {path: rows for path, rows in by_file.items() if (LIBRARIES / path).is_file()}
    assert sum(map(len, installed.values())) >= LEAST_ROWS, "most sources are installed"
    for path, rows in installed.items():
        with (
            (LIBRARIES / path).open("rb") as opened,
            mmap(opened.fileno(), 0, prot=PROT_READ) as text,
        ):
            missing = [row.name for row, words, _ in rows if text.find(words.encode()) < 0]
        assert missing == [], path


def test_the_numbers_of_cuda_are_those_of_its_header() -> None:
    numbered = [row for row in TABLE if ".h:" in row.source]
    header = (LIBRARIES / numbered[0].source.partition(":")[0]).read_text(errors="replace")
    for row in numbered:
        line, _, words = row.source.partition(":")[2].partition(" ")
        stated = re.search(rf"\b{words}\s*=\s*(\d+)", header)
        assert stated is not None, row.name
        assert {int(stated[1])} == row.device_codes, row.name
        assert words in header.splitlines()[int(line) - 1], row.name


def test_a_pattern_that_looks_through_the_whole_text_does_so_once() -> None:
    """Else `search` begins again from each character: milliseconds for a message of gloo's."""
    from_anywhere = re.compile(r"(\(\?s\))?(\(\?=)?\.[*+]")
    assert [row.name for row in TABLE if from_anywhere.match(row.text)] == []
    assert sum(row.text.startswith(r"(?s)\A") for row in TABLE) > 5
