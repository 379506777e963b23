"""Names that pages and messages repeat are those of the code: causes, fields, commands, options."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from typing import Final, get_args

from kdist.diagnose.rule import DiagnosisCause, name_cause
from kdist_trainer.config.exit_codes import Cause
from tests.docs.blocks import DOCS

_NAME: Final = re.compile(r"`([a-z*-]+)`")


def list_causes() -> list[str]:
    """The first column of the table of causes."""
    page = (DOCS / "how-to/running-jobs.md").read_text()
    rows = page.partition("| causes | evidence |\n|---|---|\n")[2].partition("\n\n")[0]
    return [name for row in rows.splitlines() for name in _NAME.findall(row.split("|")[1])]


def test_the_page_lists_every_cause_that_why_names() -> None:
    listed, known = list_causes(), set(get_args(DiagnosisCause))
    assert len(listed) == len(set(listed))
    alone = {name for name in known if not any(fnmatch(name, each) for each in listed)}
    assert alone == set()
    assert [each for each in listed if not any(fnmatch(name, each) for name in known)] == []


def test_every_cause_of_the_trainer_has_a_name_for_why() -> None:
    unnamed = [cause for cause in Cause if name_cause(cause) == "unknown"]
    assert unnamed == [Cause.UNKNOWN]
    assert name_cause("cosmic_rays") == "unknown"
    assert name_cause("NotSaved") == "not-saved"
