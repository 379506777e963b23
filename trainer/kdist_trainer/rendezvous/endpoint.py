"""The rendezvous endpoint: the store through which the agents of a job rendezvous, as the command
line names it. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdist_trainer.errors import ConfigError

FILE, KUBERNETES, C10D = "file", "kubernetes", "c10d"
ENDPOINTS = (
    "file:/path/of/a/shared/folder, kubernetes:NAMESPACE/NAME of a ConfigMap, or "
    "c10d:HOST:PORT of the agent that hosts it"
)


@dataclass(frozen=True)
class RendezvousEndpoint:
    """A scheme, and by scheme the location of the store: `(folder, "")`, `(namespace, name)` or
    `(host, port)`.
    """

    scheme: str
    location: tuple[str, str]


def parse_endpoint(text: str) -> RendezvousEndpoint:
    """Parse `SCHEME:LOCATION`. Raises `ConfigError`."""
    scheme, _, rest = text.partition(":")
    if scheme == FILE and rest:
        return RendezvousEndpoint(scheme, (rest, ""))
    if scheme == KUBERNETES:
        namespace, _, name = rest.partition("/")
        if namespace and name and "/" not in name:
            return RendezvousEndpoint(scheme, (namespace, name))
    if scheme == C10D:
        host, _, port = rest.rpartition(":")
        if host and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
            return RendezvousEndpoint(scheme, (host.removeprefix("[").removesuffix("]"), port))
    raise ConfigError(f"{text!r} is no rendezvous endpoint: {ENDPOINTS}")
