"""Which keys of a rendezvous store are those of rounds and generations that are long over.

torch and the agents write some keys of each round, and remove none: without this a store would grow
with each recovery.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(torch\.rendezvous\..*\.|kdist/.*/generation/)(\d+)(?:/.*)?", re.DOTALL)


def split_number(key: str) -> tuple[str, int] | None:
    """What a key counts, and the number of its round or generation; None if it is of none."""
    match = _NUMBERED.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def find_old(keys: Iterable[str], *, kept: int) -> set[str]:
    """The keys of rounds and generations before the `kept` newest ones that there are keys of."""
    numbered = {key: found for key in keys if (found := split_number(key)) is not None}
    newest: dict[str, int] = {}
    for prefix, number in numbered.values():
        newest[prefix] = max(number, newest.get(prefix, 0))
    return {key for key, (prefix, number) in numbered.items() if number <= newest[prefix] - kept}
