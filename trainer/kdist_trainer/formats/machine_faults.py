"""The faults of machines that a run has met, from the events of its ledger: agents show them in
`/status`, and the command line reads them of a run whose agents are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

EXCLUDED: Final = "node-excluded"
"""The event of a node that has failed its health check."""
FAULT: Final = "machine-fault"
"""The event of a fault that an agent writes before it checks its node: the group that writes the
failure may never form.
"""
_MOST: Final = 32
_MESSAGE: Final = 200  # characters of a line


def list_machine_faults(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each machine, the one whose GPU or node has failed last at the end: `machine`,
    `faults`, their number, and `cause`, `message` and `time` (Unix seconds) of the last one. A
    fault that was written more than once counts once.
    """
    found: dict[str, dict[str, Any]] = {}
    known: set[tuple[Any, ...]] = set()
    for event in events:
        machine, name = event.get("machine"), event.get("event")
        is_fault = name in ("failure", EXCLUDED, FAULT) and event.get("fault")
        key = (str(event.get("generation")), machine, str(event.get("time")))
        if is_fault and isinstance(machine, str) and machine and key not in known:
            known.add(key)
            faults = found.pop(machine)["faults"] if machine in found else 0
            line = str(event.get("message") or "").partition("\n")[0][:_MESSAGE]
            told = {"cause": event.get("cause"), "message": line, "time": event.get("time")}
            found[machine] = {"machine": machine, "faults": faults + 1, **told}
    return list(found.values())[-_MOST:]
