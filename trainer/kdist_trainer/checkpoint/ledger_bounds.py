"""Keeps the events of a run's ledger few: a run that saves every minute for a year would write
hundreds of megabytes, which every restart reads.

Rank 0 does it after a commit, when nobody else writes but an agent that begins a generation; in an
object store each process does it with the object that it writes anyway. Commits that are not among
the newest become one line for each run of them, with their sums, and the oldest of the other lines
go. Free of torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.ledger_files import parse_lines
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.json_text import encode_json
from kdist_trainer.untrusted_text import finite_number

Event = Mapping[str, Any]

MOST_BYTES: Final = 1 << 20
_COMMITS: Final = 100
"""Newest commits that keep a line each."""
_OTHERS: Final = 2000
"""Newest lines of other kinds that stay."""
_OTHERS_OF_SEGMENT: Final = 500
"""The same in one object of a process."""
_SUMS: Final = ("seconds", "visible_seconds")


def bound_events(path: StoragePath) -> bool:
    """Write the events of a run again, shorter, if they are too long; returns whether they were.
    In an object store, no process writes those of another.

    Args:
        path: of the events.

    Raises:
        OSError: the storage failed. The events are the old or the new ones.
    """
    if not isinstance(path, Path) or path.stat().st_size <= MOST_BYTES:
        return False
    with path.open("rb") as former:
        storage.replace(path, _write(shorten(parse_lines(former.read()))))
        late = former.read()  # what another process has appended to the former file meanwhile
    if late:
        with path.open("ab") as file:
            file.write(late)
    return True


def shorten_segment(data: bytes) -> bytes:
    """The lines of one object of a process, without details of what is long past."""
    return _write(shorten(parse_lines(data), others=_OTHERS_OF_SEGMENT))


def shorten(events: Sequence[Event], *, others: int = _OTHERS) -> list[Event]:
    """The events without details of what is long past.

    Args:
        events: oldest first.
        others: how many that are no commits stay.
    """
    commits = [index for index, each in enumerate(events) if each.get("event") == "commit"]
    single = set(commits[-_COMMITS:])
    found: deque[Event] = deque()
    for index, each in enumerate(events):
        last = found[-1] if found else {}
        is_old = each.get("event") == "commit" and index not in single
        if is_old and last.get("event") == "commit":
            found[-1] = merge((last, each))
        else:
            found.append(each)
    surplus = len(found) - len(single) - others
    return list(found)[max(0, surplus) :]


def merge(commits: Iterable[Event]) -> dict[str, Any]:
    """One line of several commits: the last one's, with the sums of all; `commits` says how many
    they were, and `written` how many bytes.
    """
    commits = list(commits)
    merged = dict(commits[-1])
    for name in _SUMS:
        merged[name] = round(sum(_number(each.get(name)) for each in commits), 4)
    merged["commits"] = sum(count_commits(each) for each in commits)
    merged["written"] = sum(count_bytes_written(each) for each in commits)
    return merged


def count_commits(event: Event) -> int:
    """How many commits a line stands for."""
    number = event.get("commits")
    return number if type(number) is int and number > 0 else 1


def count_bytes_written(event: Event) -> int:
    """How many bytes the commits of a line have written."""
    written = event.get("written")
    return int(_number(event.get("bytes") if written is None else written))


def _write(events: Iterable[Event]) -> bytes:
    return "".join(encode_json(each, separators=(",", ":")) + "\n" for each in events).encode()


def _number(value: object) -> float:
    return finite_number(value) or 0.0
