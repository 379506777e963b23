"""What agents and ranks import, the packages that have it, and what a Python lacks of it.

A Python is asked by a process of its own, of some hundredths of a second, that imports none of it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from typing import Final

from kdist_trainer.formats.untrusted_text import parse_object

OLDEST_PYTHON: Final = (3, 11)
REQUIREMENTS: Final[Mapping[str, str]] = {
    "msgspec": "msgspec>=0.20",
    "prometheus_client": "prometheus-client>=0.21",
    "pydantic": "pydantic>=2.12",
    "regex": "regex>=2024.4.28",
    "xxhash": "xxhash>=3.5",
}
"""By module, what is needed besides torch and numpy."""
OF_IMAGE: Final[Mapping[str, str]] = {"torch": "torch>=2.13", "numpy": "numpy>=1.26"}
"""What no job is given: its image has it."""
_SECONDS: Final = 60.0
_PROBE: Final = """\
import sys
sys.path[:] = [each for each in sys.path if each]
import importlib.util, json
def find(name, package):
    if importlib.util.find_spec(name) is None:
        return None
    from importlib import metadata
    try:
        return metadata.version(package) or ""
    except Exception:
        return ""
found = [find(*each.split("=")) for each in sys.argv[1:]] if sys.version_info >= (3, 11) else []
print(json.dumps({"python": sys.version_info[:2], "found": found}))
"""


def find_lacks(
    python: str, needed: Mapping[str, str], variables: Mapping[str, str] | None = None
) -> str:
    """What a Python lacks of requirements such as `torch>=2.13`, by the module that each is
    imported as, in the caller's environment or this one: the end of a sentence; empty if nothing.
    """
    oldest = ".".join(map(str, OLDEST_PYTHON))
    asked = [f"{name}={each.partition('>=')[0]}" for name, each in needed.items()]
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *asked],
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
        )
        # lines before the last one are of what that Python loads when it starts
        found = parse_object(done.stdout.rstrip().rpartition("\n")[2])
        version = tuple(map(int, found["python"]))
        answers = zip(needed, found["found"], strict=version >= OLDEST_PYTHON)
        versions = {name: None if each is None else str(each) for name, each in answers}
    except (OSError, subprocess.TimeoutExpired, LookupError, TypeError, ValueError):
        return f"does not run as Python {oldest} or newer"
    if version < OLDEST_PYTHON:
        return f"is Python {'.'.join(map(str, version))}, and {oldest} is needed"
    absent = [name for name, version in versions.items() if version is None]
    older = [
        f"has {name} {version}, where {needed[name]} is needed"
        for name, version in versions.items()
        if version is not None and is_older(version, needed[name])
    ]
    return " and ".join([f"lacks {', '.join(absent)}", *older] if absent else older)


def is_older(version: str, requirement: str) -> bool:
    """Whether a version is below the one that `NAME>=VERSION` asks for; one that cannot be read is
    not, and builds between releases, such as 2.13.0a0, count as the release.
    """
    return [] < _read(version) < _read(requirement.partition(">=")[2])


def _read(version: str) -> list[int]:
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return [int(each) for each in found[0].split(".")] if found else []
