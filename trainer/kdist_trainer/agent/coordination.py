"""The state that agents share through the rendezvous store: one document per generation, and the
final outcome of the run.

Both live in the rendezvous's store, so an agent that joins late or comes back can read them, and
they disappear with the store. Documents are changed by compare-and-set, so any number of agents may
write at once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kdist_trainer.agent.exit_record import root_cause
from kdist_trainer.errors import Failure

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Document = dict[str, Any]

_ATTEMPTS = 1000
_WRITER = "writer"
_MOST_PRIMARY, _ECHO_LINES = 3, 5


class AgentStore:
    """The keys of one run in `store`, as used by the agent of `node`."""

    def __init__(self, store: Store, *, run_id: str, node: str) -> None:
        self._store = store
        self._prefix = f"kdist/{run_id}/"
        self._node = node

    def read(self, key: str) -> Document:
        """The document at `key`; empty if nobody wrote it. Raises what the store raises."""
        return self._read(self._prefix + key)[0]

    def change(self, key: str, edit: Callable[[Document], Any]) -> Document:
        """Let `edit` change the document at `key` in place, atomically; returns what it then is."""
        full = self._prefix + key
        for _ in range(_ATTEMPTS):
            document, before = self._read(full)
            as_read = json.dumps(document)
            edit(document)
            if json.dumps(document) == as_read:
                return document
            # A store answers with what it holds, not with who wrote it: two equal writes must not
            # look like one.
            after = json.dumps(
                {**document, _WRITER: uuid.uuid4().hex}, separators=(",", ":")
            ).encode()
            if self._store.compare_set(full, before.decode(), after.decode()) == after:
                return document
        raise RuntimeError(f"{key} changes too fast to be written")

    def _read(self, full: str) -> tuple[Document, bytes]:
        """The document at a whole key, and the bytes it is kept as; both empty if nobody wrote
        it.
        """
        raw = bytes(self._store.get(full)) if self._store.check([full]) else b""
        document: Document = json.loads(raw) if raw else {}
        document.pop(_WRITER, None)
        return document, raw

    def generation(self, number: int) -> Document:
        """The document of a generation: `agents`, `failures`, `plan`, `finished`, `beats`, as far
        as they were written.
        """
        return self.read(f"generation/{number}")

    def open_generation(self, number: int, agents: dict[str, str]) -> None:
        """Record that a generation has begun, with its agents: by node, an identifier that differs
        from one agent to its successor.
        """
        self._change_generation(number, lambda document: document.update(agents=agents))
        self.change(
            "last",
            lambda document: document.update(generation=max(number, document.get("generation", 0))),
        )

    def last_generation(self) -> int:
        """The highest generation begun in this store; 0 if there was none."""
        return int(self.read("last").get("generation", 0))

    def post_failures(
        self, number: int, failures: list[Failure], *, notes: list[Document] | None = None
    ) -> list[Failure]:
        """Add the most relevant of this node's failures of a generation; returns those of all nodes
        so far.

        `notes` are the states of all ranks of this node.
        """
        telling = _choose(failures)

        def edit(document: Document) -> None:
            if notes:
                document.setdefault("beats", {})[self._node] = notes
            document.setdefault("failures", []).extend(
                json.loads(failure.to_json()) for failure in telling
            )

        return failures_of(self._change_generation(number, edit))

    def plan(self, number: int, reason: str) -> Document:
        """Record that a generation ends on purpose, so that losing peers in it is no failure. The
        first reason is kept.
        """
        return self._change_generation(number, lambda document: document.setdefault("plan", reason))

    def finish(self, number: int) -> Document:
        """Record that this node's workers have succeeded; returns the document."""

        def edit(document: Document) -> None:
            finished = document.setdefault("finished", [])
            if self._node not in finished:
                finished.append(self._node)

        return self._change_generation(number, edit)

    def post_beats(self, number: int, beats: list[Document]) -> Document:
        """Post the states of this node's ranks, when they make no progress; returns
        the document.
        """
        return self._change_generation(
            number, lambda document: document.setdefault("beats", {}).update({self._node: beats})
        )

    def verdict(self) -> Document:
        """The exit record of the run; empty while it has not ended."""
        return self.read("verdict")

    def settle(self, record: Document) -> Document:
        """End the run with `record` unless it has ended before; returns the record that it ended
        with.
        """

        def edit(document: Document) -> None:
            if not document:
                document.update(record)

        return self.change("verdict", edit)

    def _change_generation(self, number: int, edit: Callable[[Document], Any]) -> Document:
        return self.change(f"generation/{number}", edit)


def _choose(failures: list[Failure]) -> list[Failure]:
    """The first few primary failures, or else the relevant secondary one, shortened: the failures
    of hundreds of ranks must fit into one store.
    """
    primary = sorted(
        (failure for failure in failures if failure.primary), key=lambda failure: failure.time
    )
    echo = root_cause(failures)
    return primary[:_MOST_PRIMARY] or (
        [replace(echo, traceback=echo.traceback[-_ECHO_LINES:])] if echo else []
    )


def failures_of(document: Document) -> list[Failure]:
    """The failures in a generation's document."""
    return [Failure.from_json(json.dumps(failure)) for failure in document.get("failures", [])]
