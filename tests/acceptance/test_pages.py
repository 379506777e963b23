"""The sessions of the documentation's pages, typed into a real shell by someone who has the wheels:
each page from its first command to its last. tests/cluster types what needs a cluster.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.conftest import find_failure
from tests.docs.blocks import PAGES, shown, typed

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if typed(page, on_a_cluster=False)],
    ids=lambda page: f"{page.parent.name}/{page.stem}",
)
def test_every_command_of_a_page_succeeds_and_prints_what_the_page_shows(
    page: Path, clean_env: dict[str, str], tmp_path: Path
) -> None:
    commands, words = zip(*shown(page, on_a_cluster=False), strict=True)
    assert find_failure(commands, tmp_path, clean_env, shown=words) == ""
