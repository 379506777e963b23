"""How a run is started again after its failure: never unchanged where it must fail again."""

from __future__ import annotations

import re

from kdist.status.pods import ExitRecord

AGAIN, FIXED, BLOCKING = "again", "fixed", "blocking"
"""How the trainer's record says it: as it was, after a change, or with CUDA_LAUNCH_BLOCKING=1."""
_OF_THE_USER = ("user_code", "config", "data", "mismatch", "nan")
"""Causes that a run meets again as long as neither the job, the code nor the data has changed."""
_PLACE = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+)')


def choose_rerun(record: ExitRecord) -> str:
    """`again`, `fixed` or `blocking`. Records of trainers that do not tell, and of what fetches,
    go by the cause.
    """
    return record.rerun or (FIXED if record.cause in _OF_THE_USER else AGAIN)


def describe_change(record: ExitRecord, *, installs: bool, told: str) -> str:
    """What to do before a run is started again.

    Args:
        record: how the run has ended.
        installs: whether it goes on in the Python that lacked a package.
        told: what says what to do where neither a line nor a package is known.
    """
    if record.signature == "missing-package" and installs:
        return record.advice.rpartition(": ")[2]
    if record.signature == "missing-package":
        return "build an image that has the package"
    if found := _PLACE.match(record.place):
        return f"fix {found['file']}:{found['line']}"
    return f"do what the {told} says"
