"""Opens the stores and the rendezvous handler that a rendezvous endpoint names."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

from kdist_trainer import log
from kdist_trainer.agent.settings import Settings
from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import KdistTrainerError
from kdist_trainer.rendezvous import endpoint
from kdist_trainer.rendezvous.configmap_client import ApiEndpoint, ConfigMap
from kdist_trainer.rendezvous.file_store import FileStore
from kdist_trainer.rendezvous.handler import Rendezvous, open_rendezvous
from kdist_trainer.rendezvous.key_holders import open_key
from kdist_trainer.rendezvous.kubernetes_store import KubernetesStore
from kdist_trainer.rendezvous.tcp_store import open_tcp_store, release_store
from kdist_trainer.rendezvous.timings import RendezvousTimings
from kdist_trainer.signals import StopSignals

_KEY_SECONDS = 10.0
"""How long an agent waits for a key that another one writes, plus a quarter second per node; then
the round fails and all rendezvous again.
"""
_FAIL_FAST_SECONDS = 3.0
"""How long requests to an API server are retried while workers run."""
_STOPPING_SECONDS = 1.0
"""The same once a stop was requested."""
_RETRY_SECONDS = 1.0
_RELEASE_SECONDS = 10.0


class StoreUnavailableError(KdistTrainerError):
    """The rendezvous store cannot be reached."""

    cause, code = Cause.RENDEZVOUS, Exit.PEERS_LOST


@dataclass(frozen=True)
class StoreClients:
    """Two clients of one store.

    Attributes:
        retrying: Retries while the store is unreachable, as long as a rendezvous may take.
        fail_fast: Raises soon if the store is unreachable.
        is_host: Whether this agent hosts the store; None if no agent does.
    """

    retrying: Store
    fail_fast: Store
    is_host: bool | None = None

    def release(self, *, agents: int) -> None:
        """Release the store at the end of the run: the agent that hosts it waits until all `agents`
        have read the result.
        """
        if self.is_host is not None:
            release_store(
                self.retrying, is_host=self.is_host, agents=agents, seconds=_RELEASE_SECONDS
            )


def open_stores(settings: Settings, stop: StopSignals) -> StoreClients:
    """Open the store that `settings.rendezvous` names, and wait for it.

    Raises:
        ConfigError: If the store can never be reached.
        StoreUnavailableError: If it could not be reached within `rendezvousTimeoutSeconds`.
    """
    where, nodes = settings.endpoint, settings.config.nodes.max
    seconds = settings.config.rendezvous_timeout_seconds
    key_seconds = _KEY_SECONDS + nodes / 4
    first, second = where.location
    if where.scheme == endpoint.FILE:
        store: Store = FileStore(Path(first), timeout_seconds=key_seconds)
        return StoreClients(store, store)
    if where.scheme == endpoint.C10D:
        try:
            store, is_host = open_tcp_store(
                first,
                int(second),
                node=settings.node,
                address=settings.address,
                timeout_seconds=key_seconds,
                retry_seconds=seconds,
            )
        except (OSError, DistError) as error:
            raise StoreUnavailableError(
                f"the rendezvous store at {first}:{second} is unreachable: {error}"
            ) from error
        return StoreClients(store, store, is_host=is_host)
    opened = threading.Event()
    server = ApiEndpoint.from_environment()
    poll = RendezvousTimings.for_nodes(nodes, remote=True).poll

    def client(running_seconds: float) -> KubernetesStore:
        def retry_seconds() -> float:
            if stop.requested:
                return _STOPPING_SECONDS
            return running_seconds if opened.is_set() else seconds

        config_map = ConfigMap(server, first, second, retry_seconds=retry_seconds)
        return KubernetesStore(
            config_map,
            run_id=settings.rendezvous_run_id,
            timeout_seconds=key_seconds,
            poll_seconds=poll,
        )

    stores = StoreClients(client(seconds), client(_FAIL_FAST_SECONDS))
    try:
        stores.retrying.check([])
        stores.fail_fast.check([])
    except DistError as error:
        raise StoreUnavailableError(str(error)) from error
    opened.set()
    return stores


def open_handler(settings: Settings, stores: StoreClients, *, predecessors: set[int]) -> Rendezvous:
    """Open the rendezvous in these stores.

    Args:
        settings: The settings of the agent.
        stores: The clients of the store.
        predecessors: The pids of earlier agents of this node, which the rendezvous still lists.

    Raises:
        StoreUnavailableError: If the store does not respond within `rendezvousTimeoutSeconds`.
    """
    config, scheme = settings.config, settings.endpoint.scheme
    deadline = time.monotonic() + config.rendezvous_timeout_seconds
    while True:
        try:
            handler = open_rendezvous(
                stores.retrying,
                state_store=stores.fail_fast,
                run_id=settings.rendezvous_run_id,
                min_nodes=config.nodes.min,
                max_nodes=config.nodes.max,
                address=settings.address or ("127.0.0.1" if scheme == endpoint.FILE else None),
                index=settings.index,
                timeout_seconds=config.rendezvous_timeout_seconds,
                remote=scheme == endpoint.KUBERNETES,
                exchange_seconds=_KEY_SECONDS + config.nodes.max / 4
                if scheme == endpoint.KUBERNETES
                else None,
                node_counts=lambda: ((nodes := settings.node_limits.current()).min, nodes.max),
            )
            break
        except RendezvousConnectionError as error:
            if scheme == endpoint.C10D or time.monotonic() > deadline:
                raise StoreUnavailableError(
                    f"the rendezvous store does not respond: {error}"
                ) from error
            log.warn(
                "rendezvous-retried",
                message=f"the rendezvous store does not respond: {error.__cause__ or error}",
            )
            time.sleep(_RETRY_SECONDS)
    if scheme == endpoint.KUBERNETES and open_key(stores.retrying).fingerprint() is None:
        log.warn(
            "exchange-without-key",
            message="the Secret with the key of this job's exchange is not mounted: its agents "
            "exchange through the ConfigMap alone, and notice later which of them are lost",
        )
    with suppress(RendezvousError):  # else their keep-alives are missed later
        if predecessors:
            handler.remove_predecessors(predecessors)
        settings.forget_predecessors()
    return handler
