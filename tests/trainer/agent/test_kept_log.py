"""The copy of a node's log next to the checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kdist_trainer.agent import logs
from kdist_trainer.agent.logs import KeptLog, place_of, read_secrets
from kdist_trainer.checkpoint.__main__ import describe_logs, read_log
from kdist_trainer.checkpoint.manifest import LOGS, list_segments
from tests.patience import soon

NODE = "node-0"


def kept(root: Path, generation: int | None = None) -> bytes:
    return b"".join(read_log(root, NODE, generation=generation))


def test_each_generation_has_its_lines_and_later_agents_add_to_them(tmp_path: Path) -> None:
    for text in (b"first\n", b"second\n"):
        log = KeptLog(tmp_path, NODE, max_bytes=1 << 20)
        log.put(b"start\n")
        log.begin(3)
        log.put(text)
        log.close()
    assert kept(tmp_path, 3) == b"first\nsecond\n"
    assert kept(tmp_path) == b"start\nstart\nfirst\nsecond\n"
    assert describe_logs(tmp_path)["generations"] == [
        {"generation": 0, "nodes": [NODE], "bytes": 12},
        {"generation": 3, "nodes": [NODE], "bytes": 13},
    ]


def test_the_newest_lines_stay_within_the_limit(tmp_path: Path) -> None:
    log = KeptLog(tmp_path, NODE, max_bytes=8000)
    lines = [b"%05d %s\n" % (number, b"x" * 93) for number in range(1000)]
    for generation in range(4):
        log.begin(generation)
        for line in lines[generation * 250 : (generation + 1) * 250]:
            log.put(line)
    log.close()
    found = kept(tmp_path)
    assert 7000 <= len(found) <= 8800
    assert b"".join(lines).endswith(found)
    assert {each.generation for each in list_segments(tmp_path / LOGS / NODE)} == {3}


def test_no_value_of_a_secret_is_written(tmp_path: Path) -> None:
    environment = {
        "TOKEN": "hf_secret",
        "KEY": "-----BEGIN\nline two\n-----END",
        "PIN": "12",
        "QUOTED": 'pass"wörd',
        "BYTES": os.fsdecode(b"not\xffUTF-8"),
    }
    secrets = read_secrets([*environment, "ABSENT"], environment)
    log = KeptLog(tmp_path, NODE, max_bytes=1 << 20, secrets=secrets)
    log.put(b"token=hf_secret, at step 12\n  line two\nnot\xffUTF-8\n")
    log.put('pass"wörd\n'.encode() + json.dumps({"message": environment["QUOTED"]}).encode())
    log.close()
    assert kept(tmp_path) == b'token=***, at step 12\n  ***\n***\n***\n{"message": "***"}'


def test_a_folder_that_cannot_be_written_delays_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "_RETRY_SECONDS", 0.0)
    (tmp_path / LOGS).write_text("in the way")
    printed: list[str] = []

    def is_reported() -> bool:
        printed.append(capfd.readouterr().err)
        return "log-not-kept" in "".join(printed)

    log = KeptLog(tmp_path, NODE, max_bytes=1 << 20)
    log.put(b"lost\n")
    assert soon(is_reported)
    (tmp_path / LOGS).unlink()
    log.put(b"kept\n")
    log.close()
    assert kept(tmp_path) == b"kept\n"


@pytest.mark.parametrize(
    ("pod", "place"),
    [
        ("node-0", "node-0"),
        ("digits-1-x7k2p", "digits-1"),
        ("digits-workers-0-1-abcde", "digits-workers-0-1"),
        ("digits-worker-0", "digits-worker-0"),
    ],
)
def test_the_pod_that_takes_a_place_continues_its_log(pod: str, place: str) -> None:
    assert place_of(pod) == place
