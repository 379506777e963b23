"""The whole state of a script: what all ranks have in common, and each rank's own part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kdist_trainer import log
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.group import CheckpointGroup
from kdist_trainer.checkpoint.rank_parts import (
    Part,
    RankPart,
    StatefulObject,
    choose_part,
    report_change,
)
from kdist_trainer.checkpoint.reader import LoadedCheckpoint, SavedIndex
from kdist_trainer.checkpoint.script_objects import ScriptObjects
from kdist_trainer.checkpoint.script_settings import (
    check_classes,
    find_edits,
    name_classes,
    read_settings,
)
from kdist_trainer.checkpoint.state_json import encode
from kdist_trainer.checkpoint.target import describe_index
from kdist_trainer.state import ValueKind, describe

_PARTS: Final = "ranks"
"""Name of the value that has what is no JSON of the parts of all ranks."""


class ScriptState:
    """Reads, shows and loads it."""

    def __init__(self, objects: ScriptObjects, stateful: Mapping[str, StatefulObject]) -> None:
        """Note the settings that the script begins with."""
        self.part = RankPart(stateful)
        self.shared_state: dict[Any, Any] = {}
        self.saved_states: list[dict[Any, Any]] = []
        self.resumed_step = 0
        self._objects = objects
        self._settings = read_settings(objects)

    def read(self, step: int, group: CheckpointGroup) -> tuple[dict[str, Any], dict[str, Any]]:
        """The nested tensors and values, and what `state.json` has. Collective.

        Raises:
            UnloadableStateError: a checkpoint cannot hold a value of a rank's; on every rank.
        """

        def read() -> tuple[Part, dict[Any, Any]]:
            encode(self.shared_state, "Checkpointer.shared_state")
            return self.part.read(), self.shared_state if group.is_rank_zero else {}

        parts = group.on_all_ranks(read)
        tensors = self._objects.read()
        # in a tuple, because a list would be taken apart
        tensors[_PARTS] = (tuple(part.own for part, _ in parts),)
        state = {
            "step": step,
            "states": [part.state for part, _ in parts],
            "shared_state": parts[0][1],
            "script": {
                **self._objects.describe(),
                "classes": name_classes(self._objects),
                "settings": self._settings,
            },
        }
        return tensors, state

    def show(self, found: LoadedCheckpoint | None, group: CheckpointGroup) -> int:
        """Let `state`, `shared_state` and `saved_states` be those of a checkpoint.

        Returns:
            Its step; 0 without one.
        """
        if found is None:
            return 0
        parts = _read_parts(found.state, None, group.size)
        part = choose_part(parts, group.rank)
        self.part.state = dict(part.state) if part is not None else {}
        self._show_all(found.state, parts)
        return int(found.state.get("step", 0))

    def load(self, store: CheckpointManager, group: CheckpointGroup) -> int | None:
        """Load the newest checkpoint that verifies. Collective.

        Returns:
            Its step; None if there is none.

        Raises:
            CheckpointMismatchError: it is of another model, or none can be read.
        """
        filled: dict[str, Any] = {}

        def make(found: LoadedCheckpoint, index: SavedIndex) -> dict[str, Any]:
            notes = found.state.get("script", {})
            check_classes(notes.get("classes", {}), name_classes(self._objects))
            self._objects.prepare(notes)
            filled.clear()
            filled.update(self._objects.template(notes, describe_index(index)))
            if _PARTS in index:
                filled[_PARTS] = None
            return filled

        state = store.load(make, fingerprint="")
        if state is None:
            return None
        notes = state.get("script", {})
        self._objects.load(notes, filled)
        parts = _read_parts(state, filled.get(_PARTS), group.size)
        self._show_all(state, parts)
        self.part.load(choose_part(parts, group.rank))
        self.resumed_step = int(state["step"])
        if group.is_rank_zero:
            report_change(parts, group.size)
            self._report_edits(notes)
        log.event(
            "resumed",
            step=self.resumed_step,
            checkpoint=store.resumed.name if store.resumed else None,
        )
        return self.resumed_step

    def find_problems(self, state: Mapping[str, Any], kinds: Mapping[str, ValueKind]) -> list[str]:
        """Why `load` could not load a state that `read` gave, by what it asks for; empty if it can.

        Args:
            state: the nested state.
            kinds: what is in it.
        """
        notes = self._objects.describe()
        asked = describe({**self._objects.template(notes, kinds), _PARTS: None})
        missing = [f"{name} is missing" for name in asked if name not in kinds]
        unasked = [f"{name} would not be asked for" for name in kinds if name not in asked]
        return [*missing, *unasked, *self._objects.find_problems(notes, state)]

    def _show_all(self, saved: Mapping[str, Any], parts: list[Part]) -> None:
        self.saved_states = [dict(part.state) for part in parts]
        self.shared_state = dict(saved.get("shared_state", {}))

    def _report_edits(self, notes: Mapping[str, Any]) -> None:
        edits = find_edits(notes.get("settings", {}), self._settings)
        if edits:
            log.warn(
                "settings-edited",
                message=(
                    f"the script was edited since it began this training: {'; '.join(edits)}. The "
                    "saved values win: to use the new ones, set them after Checkpointer.resume()"
                ),
            )


def _read_parts(saved: Mapping[str, Any], own: Any, size: int) -> list[Part]:
    """The parts of all ranks; an earlier version has saved the state of rank 0 for all."""
    states = saved.get("states")
    if states is None:
        return [Part(saved.get("state", {}), {}) for _ in range(size)]
    owns = own[0] if own is not None else ({},) * len(states)
    return [Part(state, one) for state, one in zip(states, owns, strict=True)]
