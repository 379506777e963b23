"""Which of the logs that are kept next to the checkpoints are shown."""

from __future__ import annotations

import pytest

from kdist.errors import KdistError, NotFoundError
from kdist.job.cluster.logs import choose

KEPT = {
    "generations": [
        {"generation": 3, "nodes": ["digits-0", "digits-1"], "bytes": 10},
        {"generation": 4, "nodes": ["digits-0"], "bytes": 10},
    ]
}


def test_the_last_generation_is_shown_or_the_one_that_was_asked_for() -> None:
    assert choose("digits", KEPT, None) == (4, ["digits-0"])
    assert choose("digits", KEPT, 3) == (3, ["digits-0", "digits-1"])


def test_a_generation_of_which_nothing_is_kept_is_answered_with_those_that_are_there() -> None:
    with pytest.raises(NotFoundError, match=r"generation 1 of digits is kept; .* of 3, 4"):
        choose("digits", KEPT, 1)
    with pytest.raises(NotFoundError, match="no log of digits is kept") as caught:
        choose("digits", {"generations": []}, None)
    assert caught.value.next_command == "kdist explain spec.logs"


@pytest.mark.parametrize(
    "name", ["../../.bashrc", "/etc/passwd", "..", ".", "", "a/b", "a\n", "-" * 300]
)
def test_the_name_of_a_node_cannot_lead_out_of_the_folder_it_is_copied_to(name: str) -> None:
    with pytest.raises(KdistError, match="names nodes that cannot be any"):
        choose("digits", {"generations": [{"generation": 1, "nodes": ["digits-0", name]}]}, None)
