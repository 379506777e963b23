"""Opens the stores and the rendezvous handler that a rendezvous endpoint names."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

from kdist_trainer import log
from kdist_trainer.agent.settings import Settings
from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import KdistTrainerError
from kdist_trainer.rendezvous import endpoint
from kdist_trainer.rendezvous.configmap_client import ApiEndpoint, ConfigMap
from kdist_trainer.rendezvous.file_store import FileStore
from kdist_trainer.rendezvous.handler import Rendezvous, RendezvousTimings, open_rendezvous
from kdist_trainer.rendezvous.kubernetes_store import KubernetesStore
from kdist_trainer.rendezvous.tcp_store import open_tcp_store, release_store
from kdist_trainer.signals import StopSignals

_WORD_SECONDS = 10.0
"""How long an agent waits for a word that another one owes it; then the other one is taken for lost
and they meet anew.
"""
_HASTY, _STOPPING = 3.0, 1.0
"""How long an API server may be away while ranks are at work, and when somebody asked the agent to
stop; between groups as long as a group may take to form.
"""
_PAUSE_SECONDS = 1.0
_LEAVE_SECONDS = 10.0


class StoreUnavailableError(KdistTrainerError):
    """The rendezvous store cannot be reached."""

    cause, code = Cause.RENDEZVOUS, Exit.PEERS_LOST


@dataclass(frozen=True)
class StoreClients:
    """Two clients of one store: `patient` retries while it is unreachable, `hasty` soon raises."""

    patient: Store
    hasty: Store
    keeps: bool | None = None
    """Whether the store is lost with this agent, or with another; None if with none."""

    def take_leave(self, *, agents: int) -> None:
        """Close the store at the end of the run: the agent that hosts it waits until the other
        `agents` have read the outcome.
        """
        if self.keeps is not None:
            release_store(self.patient, keeps=self.keeps, agents=agents, seconds=_LEAVE_SECONDS)


def open_stores(settings: Settings, stop: StopSignals) -> StoreClients:
    """Open the store that `settings.rendezvous` names, and wait for it. Raises `ConfigError`,
    `StoreUnavailableError`.
    """
    where, nodes = settings.place, settings.config.nodes.max
    seconds = settings.config.rendezvous_timeout_seconds
    word = _WORD_SECONDS + nodes / 4
    first, second = where.where
    if where.scheme == endpoint.FILE:
        store: Store = FileStore(Path(first), timeout_seconds=word)
        return StoreClients(store, store)
    if where.scheme == endpoint.C10D:
        try:
            store, keeps = open_tcp_store(
                first,
                int(second),
                node=settings.node,
                address=settings.address,
                timeout_seconds=word,
                patience_seconds=seconds,
            )
        except (OSError, DistError) as error:
            raise StoreUnavailableError(
                f"the store of the rendezvous at {first}:{second} is not there: {error}"
            ) from error
        return StoreClients(store, store, keeps=keeps)
    opened = threading.Event()
    server, poll = (
        ApiEndpoint.from_environment(),
        RendezvousTimings.for_nodes(nodes, remote=True).poll,
    )

    def view(calm: float) -> KubernetesStore:
        def patience() -> float:
            return _STOPPING if stop.requested else calm if opened.is_set() else seconds

        config_map = ConfigMap(server, first, second, patience=patience)
        return KubernetesStore(
            config_map, run_id=settings.meeting, timeout_seconds=word, poll_seconds=poll
        )

    stores = StoreClients(view(seconds), view(_HASTY))
    try:
        stores.patient.check([])
        stores.hasty.check([])
    except DistError as error:
        raise StoreUnavailableError(str(error)) from error
    opened.set()
    return stores


def open_handler(settings: Settings, stores: StoreClients, *, predecessors: set[int]) -> Rendezvous:
    """Open the rendezvous in these stores, without the earlier agents of this node (their pids)."""
    config, scheme = settings.config, settings.place.scheme
    deadline = time.monotonic() + config.rendezvous_timeout_seconds
    while True:
        try:
            handler = open_rendezvous(
                stores.patient,
                state_store=stores.hasty,
                run_id=settings.meeting,
                min_nodes=config.nodes.min,
                max_nodes=config.nodes.max,
                address=settings.address or ("127.0.0.1" if scheme == endpoint.FILE else None),
                index=settings.index,
                timeout_seconds=config.rendezvous_timeout_seconds,
                remote=scheme == endpoint.KUBERNETES,
                bounds=lambda: ((nodes := settings.bounds.now()).min, nodes.max),
            )
            break
        except RendezvousConnectionError as error:
            if scheme == endpoint.C10D or time.monotonic() > deadline:
                raise StoreUnavailableError(
                    f"the store of the rendezvous does not answer: {error}"
                ) from error
            log.warn(
                "rendezvous-retried",
                message=f"the store of the rendezvous does not answer: {error.__cause__ or error}",
            )
            time.sleep(_PAUSE_SECONDS)
    with suppress(RendezvousError):  # their keep-alives will be missed
        if predecessors:
            handler.evict(predecessors)
        settings.forget_predecessors()
    return handler
