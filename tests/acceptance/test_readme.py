"""The README's session, typed into a real shell by someone who has the wheels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.conftest import find_failure
from tests.house.readme import typed

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]


def test_every_command_of_the_readme_succeeds(clean_env: dict[str, str], tmp_path: Path) -> None:
    assert find_failure(typed(), tmp_path, clean_env) == ""
