"""A standstill: what agents tell each other of ranks that do not get on, and the failures that follow from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kdist_trainer import log
from kdist_trainer.agent.budget import Generation
from kdist_trainer.agent.disagreement import Note, Odd, find_missing, find_odd
from kdist_trainer.agent.exchange import Document, Exchange
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


def compare_notes(
    exchange: Exchange, generation: Generation, node: str, mine: list[Note], *, after_failures: bool = False
) -> list[Note]:
    """What all agents know of their ranks, as far as they say so in time; before they are failures, or after."""
    deadline = time.monotonic() + NOTES_SECONDS
    document = ask(lambda: exchange.post_beats(generation.number, mine)) or {"beats": {node: mine}}
    while time.monotonic() < deadline:
        if len(document.get("beats", {})) >= len(generation.nodes) or (document.get("failures") and not after_failures):
            break
        time.sleep(_POLL_SECONDS)
        document = ask(lambda: exchange.generation(generation.number)) or document
    return [note for notes in document.get("beats", {}).values() for note in notes]


def accuse(
    stood: Mapping[int, tuple[int, Beat]], *, blamed: int | None, node: str, generation: int, stacks: Mapping[int, Sequence[str]]
) -> dict[int, Failure]:
    """The failures of ranks that stood still, by local rank: the first cause of the one to blame, echoes of the others."""
    return {
        local_rank: _accuse(beat, rank, blamed=blamed, node=node, generation=generation, stacks=stacks.get(local_rank, []))
        for local_rank, (rank, beat) in stood.items()
    }


def _accuse(beat: Beat, rank: int, *, blamed: int | None, node: str, generation: int, stacks: Sequence[str]) -> Failure:
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


def convict(odd: Odd, *, node: str, generation: int, step: int | None, when: float | None = None) -> Failure:
    """The failure of ranks that entered another collective than their peers: another try would do the same."""
    return Failure(
        cause=Cause.COLLECTIVE_MISMATCH,
        code=Exit.USER,
        primary=True,
        message=odd.message,
        rank=odd.ranks[0] if odd.ranks else None,
        node=node,
        generation=generation,
        step=step,
        time=time.time() if when is None else when,
        collective=odd.collective,
    )


def judge(failure: Failure, notes: Sequence[Note]) -> Failure:
    """What decides in the light of what all ranks were in.

    A rank that entered another collective is the cause of whatever followed but an exception of its own; a rank that did not
    come is that of its peers' time-outs.
    """
    if failure.permanent and failure.cause is not Cause.COLLECTIVE_MISMATCH:
        return failure
    nodes = {int(note["rank"]): str(note.get("node", "")) for note in notes}
    odd = find_odd(notes)
    if odd is not None:
        where = nodes.get(odd.ranks[0], "") if odd.ranks else failure.node
        return convict(odd, node=where, generation=failure.generation, step=failure.step, when=failure.time)
    if failure.primary or failure.code is not Exit.HANG:
        return failure
    missing = find_missing(notes)
    if missing is None:
        return failure
    rank = missing.ranks[0]
    return replace(
        failure, cause=Cause.HANG, primary=True, message=missing.message, rank=rank, node=nodes.get(rank, ""), collective=None
    )


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
