"""Whatever a Python prints when it is asked, the answer is a sentence and no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kdist_trainer.formats.requirements import OF_IMAGE, find_lacks

NO_ANSWER = "does not run as Python 3.11 or newer"


@pytest.mark.parametrize(
    ("printed", "sentence"),
    [
        ('{"python": [3, 12], "found": ["2.13", "2.0"]}', ""),
        ('a banner\n{"python": [3, 12], "found": ["2.13", "2.0"]}', ""),
        ('{"python": [3, 12], "found": ["", null]}', "lacks numpy"),
        ('{"python": [3, 10], "found": []}', "is Python 3.10, and 3.11 is needed"),
        ('{"found": ["2.13", "2.0"]}', NO_ANSWER),
        ('{"python": "3.12", "found": ["2.13", "2.0"]}', NO_ANSWER),
        ('{"python": 3, "found": ["2.13", "2.0"]}', NO_ANSWER),
        ('{"python": [3, 12], "found": ["2.13"]}', NO_ANSWER),
        ('{"python": [3, 12], "found": 7}', NO_ANSWER),
        ("[]", NO_ANSWER),
        ("", NO_ANSWER),
        ("\\377", NO_ANSWER),
    ],
)
def test_an_answer_is_read_only_if_it_is_one(tmp_path: Path, printed: str, sentence: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '{printed}\\n'\n")
    python.chmod(0o755)
    assert find_lacks(str(python), OF_IMAGE) == sentence


def test_a_package_without_readable_metadata_counts_as_there(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "__init__.py").touch()
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (tmp_path / "sitecustomize.py").write_text("print('welcome')\n")
    for metadata in (b"Name: odd\n", b"Name: odd\nVersion: \xff\n"):
        (info / "METADATA").write_bytes(metadata)
        variables = {"PYTHONPATH": str(tmp_path)}
        assert find_lacks(sys.executable, {"odd": "odd>=2"}, variables) == ""
    assert find_lacks(sys.executable, {"gone": "gone>=2"}, variables) == "lacks gone"
