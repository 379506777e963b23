"""The faults of machines that a run has met, from the events of its ledger: agents show them in
`/status`, and the command line reads them of a run whose agents are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

_MOST: Final = 32
_MESSAGE: Final = 300


def list_machine_faults(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each machine, the one whose GPU or node has failed last at the end: `machine`,
    `faults`, their number, and `cause`, `message` and `time` (Unix seconds) of the last one.
    """
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        machine = event.get("machine")
        if event.get("event") == "failure" and event.get("fault") and isinstance(machine, str):
            faults = found.pop(machine)["faults"] if machine in found else 0
            told = {name: event.get(name) for name in ("cause", "message", "time")}
            told["message"] = str(told["message"] or "")[:_MESSAGE]
            found[machine] = {"machine": machine, "faults": faults + 1, **told}
    return list(found.values())[-_MOST:]
