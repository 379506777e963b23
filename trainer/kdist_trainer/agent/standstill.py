"""A standstill: what agents tell each other of ranks that do not get on, and the failures that follow from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kdist_trainer import log
from kdist_trainer.agent.budget import Generation
from kdist_trainer.agent.exchange import Document, Exchange
from kdist_trainer.agent.watchdog import Note
from kdist_trainer.config import Cause, Exit
from kdist_trainer.failure import TRACEBACK_LINES, Failure
from kdist_trainer.heartbeat import Beat

NOTES_SECONDS = 2.0
"""How long an agent waits for what the others know of a standstill."""
_POLL_SECONDS = 0.1


def ask(question: Callable[[], Document]) -> Document:
    """What the store says; nothing while it is away, for which no rank is to suffer."""
    try:
        return question()
    except RuntimeError as error:
        log.warn("rendezvous-mute", message=f"the store of the rendezvous does not answer: {error}")
        return {}


def compare_notes(exchange: Exchange, generation: Generation, node: str, mine: list[Note]) -> list[Note]:
    """What all agents know of their ranks, as far as they say so in time."""
    deadline = time.monotonic() + NOTES_SECONDS
    document = ask(lambda: exchange.post_beats(generation.number, mine)) or {"beats": {node: mine}}
    while time.monotonic() < deadline:
        if len(document.get("beats", {})) >= len(generation.nodes) or document.get("failures"):
            break
        time.sleep(_POLL_SECONDS)
        document = ask(lambda: exchange.generation(generation.number)) or document
    return [note for notes in document.get("beats", {}).values() for note in notes]


def accuse(beat: Beat, *, rank: int, blamed: int | None, node: str, generation: int, stacks: Sequence[str]) -> Failure:
    """The failure of a rank that stood still: the first cause if it is the one to blame, else an echo."""
    where = f"in {beat.collective}" if beat.collective else f"in phase {beat.phase.value}"
    failure = Failure(
        cause=Cause.HANG,
        code=Exit.HANG,
        primary=True,
        message=f"rank {rank} hangs {where}: no progress within hangTimeoutSeconds",
        rank=rank,
        node=node,
        generation=generation,
        step=beat.step if beat.step >= 0 else None,
        time=time.time(),
        traceback=tuple(stacks[:TRACEBACK_LINES]),
        collective=beat.collective,
    )
    if rank == blamed:
        return failure
    message = f"rank {rank} waited {where} for rank {blamed}"
    return replace(failure, cause=Cause.COLLECTIVE_TIMEOUT, primary=False, message=message)


def desert(beat: Beat, *, rank: int, node: str, generation: int, message: str) -> Failure:
    """The failure of a rank that another node has left alone: an echo of what happened there."""
    return Failure(
        cause=Cause.NODE_LOST,
        code=Exit.PEERS_LOST,
        primary=False,
        message=message,
        rank=rank,
        node=node,
        generation=generation,
        step=beat.step if beat.step >= 0 else None,
        time=time.time(),
        collective=beat.collective,
    )
