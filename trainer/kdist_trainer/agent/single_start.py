"""The rule for scripts that cannot continue: they are started once.

A script continues after a restart if its ranks open the job's checkpoints, by a `Checkpointer` or
an integration. Any other would start from its beginning and overwrite what it has written, so a
failure, a lost node or an eviction ends its job, unless the job file names `maxRestarts`. The
decision is kept where the generations are: an agent that replaces a lost one comes to the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from torch.distributed.elastic.rendezvous.api import RendezvousError

from kdist_trainer import log
from kdist_trainer.agent.coordination import (
    FAILURE,
    PLANNED,
    RESUME,
    AgentStore,
    Document,
    Generation,
    failures_of,
)
from kdist_trainer.agent.exit_record import root_cause
from kdist_trainer.config import Cause, Exit, TrainConfig
from kdist_trainer.failure import Failure
from kdist_trainer.liveness import RankSnapshot
from kdist_trainer.rendezvous.state import RendezvousStatus

RULE: Final = (
    "if a rank or a node is lost, the script is not started again, unless it has opened a "
    "Checkpointer: its files are its own; spec.maxRestarts: N starts it again all the same"
)
REFUSAL: Final = (
    "the script is not started again: no rank has opened a Checkpointer, and its files are its "
    "own; spec.maxRestarts: N starts it again"
)
ASKED_TO_END: Final = "a node was asked to end, like a pod that is evicted or deleted"
OTHERS_SECONDS: Final = 15.0
"""How long a node whose ranks have lost their peers waits to hear what has happened elsewhere."""
_RETRY_SECONDS, _POLL_SECONDS = 5.0, 0.1


def end_for_good(failure: Failure, refusal: str) -> Failure:
    """The failure that ends the job, with the reason why it is not started again."""
    message = f"{failure.message}; {refusal}"
    return replace(failure, code=Exit.BUDGET, primary=True, message=message)


def end_refused(generation: Generation, known: Failure) -> Failure:
    """The failure that ends the job at a generation that has not begun.

    Args:
        generation: The generation.
        known: What is known of the failure before it.
    """
    cause = Cause(generation.cause or Cause.UNKNOWN)
    failure = replace(known, cause=cause, message=generation.message)
    return end_for_good(failure, generation.refusal)


def judge(
    document: Document,
    number: int,
    *,
    rule: tuple[str | None, str],
    reason: str,
    failure: Failure | None,
    starting: bool = False,
) -> tuple[str, Failure | None, str]:
    """Why the next generation begins, the failure that ended the last one, and why there is none.
    A node that is asked to end as its ranks start counts as a failure: a run whose nodes are
    always taken so early would otherwise restart for ever.

    Args:
        document: The last generation's document.
        number: Its number.
        rule: What `examine` has found.
        reason: Why the next generation would begin.
        failure: The failure that ended the last one, if any has.
        starting: Whether that one had not come to a step.
    """
    asked_at, refusal = rule
    if asked_at is not None and document.get("requested_at", asked_at) != asked_at:
        return RESUME, None, ""
    is_lost = bool(refusal) or (starting and "rank_states" in document)
    if is_lost and failure is None and reason == RESUME:
        failure = Failure.of_node(Cause.PREEMPTED, Exit.STOPPED, ASKED_TO_END, generation=number)
        reason = reason if refusal else FAILURE
    return reason, failure, refusal if failure is not None and reason not in PLANNED else ""


def _has_lost_nodes(status: Callable[[], RendezvousStatus]) -> bool:
    try:
        found = status()
    except RendezvousError:
        return False
    return bool(found.left or found.silent)


class NoRule:
    """The rule of a job whose workers may always be started again."""

    is_script = applies = False

    def examine(self, document: Document, *, committed: int) -> tuple[str | None, str]:  # noqa: ARG002 - SingleStart's signature
        """None, and no reason against it."""
        return None, ""

    def find_end(self, cause: Failure, **_: Any) -> None:
        """None."""


class SingleStart:
    """Whether the workers may be started again.

    Args:
        config: The settings of the job.
        agent_store: The documents that agents share, whose calls fail soon.
    """

    def __init__(self, config: TrainConfig, agent_store: AgentStore) -> None:
        self._config = config
        self._agent_store = agent_store
        self._opened = False
        self._is_told = False
        self._next_try = -math.inf

    @property
    def is_script(self) -> bool:
        """Whether the workers run a script."""
        return self._config.script is not None

    @property
    def applies(self) -> bool:
        """Whether the job is one whose ranks must open checkpoints to be started again."""
        return self._config.starts_once

    def observe(self, snapshots: Iterable[RankSnapshot]) -> bool:
        """Look whether a rank of this node has opened the job's checkpoints, and tell the other
        agents; an error of the store is tried again later.

        Returns:
            Whether this is the first time that one has.
        """
        if self._config.script is None or self._is_told:
            return False
        is_first = not self._opened
        self._opened = self._opened or any(one.has_checkpoints for one in snapshots)
        if self._opened and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + _RETRY_SECONDS
            try:
                if self.applies:
                    self._agent_store.mark_checkpoints()
                self._is_told = True
            except RuntimeError as error:
                log.warn(
                    "rendezvous-unreachable",
                    message=f"the other nodes cannot be told that the script resumes: {error}",
                )
        return is_first and self._opened

    def examine(self, document: Document, *, committed: int) -> tuple[str | None, str]:
        """Examine whether a generation may follow the one with this document.

        Args:
            document: The document; empty if there is none in this store.
            committed: The step of the newest checkpoint, 0 without one.

        Returns:
            When a user last asked for the job to start again, None where that does not matter; and
            why it is not started by itself, empty if it is.

        Raises:
            RuntimeError: The store is unreachable.
        """
        if not self.applies:
            return None, ""
        asked_at = self._agent_store.requested_at()
        return asked_at, self.refuse(committed=committed) if document else ""

    def refuse(self, *, committed: int) -> str:
        """Why the workers are not started again; empty if they may be. Raises `RuntimeError` if
        the store is unreachable.

        Args:
            committed: The step of the newest checkpoint, 0 without one.
        """
        if not self.applies or self._opened or committed:
            return ""
        self._opened = self._agent_store.has_checkpoints()
        return "" if self._opened else REFUSAL

    def find_end(
        self,
        cause: Failure,
        *,
        others: Sequence[str],
        committed: int,
        read: Callable[[], Document],
        status: Callable[[], RendezvousStatus],
    ) -> Failure | None:
        """The failure that ends the job, if its script is not started again: that of whichever
        node it began on.

        Where nodes were asked to end there is none: the agent that replaces one decides, which
        knows whether a user has started the job again.

        Args:
            cause: The root cause as far as this node knows.
            others: The other nodes of the generation.
            committed: The step of the newest checkpoint, 0 without one.
            read: Reads the generation's document.
            status: Reads the state of the rendezvous.

        Raises:
            RuntimeError: The store is unreachable.
        """
        refusal = self.refuse(committed=committed)
        deadline = time.monotonic() + OTHERS_SECONDS
        while refusal and "planned_stop" not in (document := read()):
            first = root_cause([cause, *failures_of(document)]) or cause
            if not first.primary and _has_lost_nodes(status):
                lost = others[0] if len(others) == 1 else "a node of the group"
                return end_for_good(replace(first, message=f"lost {lost}", rank=None), refusal)
            if first.primary or time.monotonic() > deadline:
                return end_for_good(first, refusal)
            time.sleep(_POLL_SECONDS)
        return None
