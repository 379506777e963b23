"""How a list of checkpoints is shown, and what counts as damaged."""

from __future__ import annotations

from typing import Any

from kdist.views import checkpoints

ENTRY = {
    "name": "step-00000020-e1",
    "step": 20,
    "epoch": 1,
    "time": 940.0,
    "bytes": 2048,
    "worldSize": 2,
    "samplesSeen": 1280,
    "state": "complete",
    "problem": None,
}


def document(*entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "time": 1000.0,
        "latest": "step-00000020-e1",
        "resumesFrom": "step-00000020-e1",
        "checkpoints": list(entries),
    }


def test_a_row_says_age_size_and_which_one_is_resumed() -> None:
    assert checkpoints.checkpoint_rows(document(ENTRY)) == [
        (
            "20",
            "step-00000020-e1",
            "60s",
            "2.0 KiB",
            "2",
            "1,280",
            "complete",
            "LATEST <- resumes here",
        )
    ]


def test_a_damaged_one_says_why_and_is_counted() -> None:
    bad = ENTRY | {
        "name": "step-00000010-e1",
        "step": 10,
        "state": "damaged",
        "problem": "x.distcp is missing",
        "bytes": None,
    }
    found = document(ENTRY, bad)
    expected = ("-", "2", "1,280", "damaged: x.distcp is missing", "")
    assert checkpoints.checkpoint_rows(found)[1][3:] == expected
    assert checkpoints.rejected(found, "damaged") == ["step-00000010-e1"]


def test_one_of_another_version_is_not_damaged_and_counted_too() -> None:
    newer = ENTRY | {"state": "unsupported", "problem": "manifest.json is of format 9"}
    found = document(newer)
    assert checkpoints.checkpoint_rows(found)[0][6] == "unsupported: manifest.json is of format 9"
    assert checkpoints.rejected(found, "unsupported") == ["step-00000020-e1"]
    assert checkpoints.rejected(found, "damaged") == []


def test_evidence_that_was_set_aside_long_ago_is_no_new_damage() -> None:
    aside = {"name": "step-00000010-e1.damaged", "step": 10, "state": "damaged", "problem": None}
    assert checkpoints.rejected(document(ENTRY, aside), "damaged") == []


def test_an_answer_without_a_list_is_an_empty_list() -> None:
    assert (
        checkpoints.checkpoint_rows({}),
        checkpoints.rejected({"checkpoints": "?"}, "damaged"),
    ) == ([], [])
