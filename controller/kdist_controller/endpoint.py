"""Serves `/metrics` for Prometheus, and `/healthz` and `/readyz` for the kubelet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kdist_trainer.serving.pages import HttpResponse, serve_pages, text_response
from kdist_trainer.serving.server import BoundedServer


def serve(
    addresses: Sequence[str],
    port: int,
    registry: CollectorRegistry,
    *,
    healthy: Callable[[], bool],
    ready: Callable[[], bool],
) -> BoundedServer:
    """Serve the pages of one controller, on a thread that ends with the process.

    Args:
        addresses: Where to listen.
        port: 0 for a free one.
        registry: The metrics.
        healthy: Whether its threads still work.
        ready: Whether it has what it needs.

    Raises:
        OSError: It cannot listen there.
    """
    routes = {
        "/metrics": lambda _: HttpResponse(
            HTTPStatus.OK, generate_latest(registry), CONTENT_TYPE_LATEST
        ),
        "/healthz": lambda _: _say(healthy()),
        "/readyz": lambda _: _say(ready()),
    }
    return serve_pages("metrics", routes, addresses, port)


def _say(good: bool) -> HttpResponse:
    if good:
        return text_response("ok", HTTPStatus.OK)
    return text_response("not yet", HTTPStatus.SERVICE_UNAVAILABLE)
