"""The container's entrypoint: one replica of the controller."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kdist.agents.client import AgentTransport, PodTransport, ProxyTransport
from kdist.cluster import connect
from kdist.errors import KdistError
from kdist.status import documents
from kdist.status.documents import Document
from kdist.terminal import visible_json
from kdist.threads import OnError, start_thread
from kdist_controller.controller import Controller
from kdist_controller.election import REQUEST_SECONDS, Election
from kdist_controller.executor import FIELD_MANAGER
from kdist_controller.metrics import serve
from kdist_controller.node_recovery import AVOIDANCE, Avoidance
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.network.server import LOOPBACK, own_addresses, with_loopback
from kdist_trainer.processes import descriptors

LEASE: Final = "kdist-controller"
PORT: Final = 9402
_M_ARENA_MAX, _ARENAS = -8, 2
"""See mallopt(3)."""
_RETRY_SECONDS = 10.0
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a replica until it is told to end; returns its exit code."""
    given = _parser().parse_args(arguments)
    descriptors.raise_limit()
    # Otherwise each of some forty threads keeps, in an arena of its own, the memory of its largest
    # response of the API server: 12 MB after 10,000 reconciles.
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # only glibc has it
        mallopt(_M_ARENA_MAX, _ARENAS)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=given.log_level.upper(), handlers=[handler])
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    try:
        return _run(given)
    except KdistError as error:
        logging.getLogger(__name__).error("%s", error)
        return int(error.code)


def _run(given: argparse.Namespace) -> int:
    notify = logging.getLogger("kdist_controller.connection").warning
    cluster = connect(retry_seconds=_RETRY_SECONDS, notify=notify, field_manager=FIELD_MANAGER)
    candidate = connect(
        retry_seconds=0.0, request_timeout=REQUEST_SECONDS, field_manager=FIELD_MANAGER
    )
    election = Election(candidate, LEASE, namespace=given.lease_namespace, identity=given.identity)

    def route(namespace: str, pod: Document) -> AgentTransport:
        if given.agents == "pod":
            return PodTransport(documents.text(pod, "status", "podIP"))
        # through the API server, which needs a right that the chart does not grant
        return ProxyTransport(cluster, documents.name(pod), namespace)

    avoidance = Avoidance(given.avoid_after, 3600 * given.avoid_hours)
    controller = Controller(cluster, election, route, given.namespace, avoidance)
    server = serve(
        with_loopback(own_addresses(given.address)) if given.address else LOOPBACK,
        given.metrics_port,
        controller.metrics.registry,
        healthy=lambda: controller.healthy,
        ready=lambda: controller.ready,
    )
    controller.metrics.show_refused(lambda: server.refused)
    for number in (signal.SIGTERM, signal.SIGINT):
        # on a thread, because the main one may hold a lock that `stop` takes
        signal.signal(
            number, lambda *_: start_thread(controller.stop, name="stop", on_error=OnError.EXIT)
        )
    logging.getLogger(__name__).info("serving on port %d", server.port)
    controller.run()
    return 0


class _JsonLines(logging.Formatter):
    """One JSON object per line, as the agents write."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return visible_json(encode_json(line, ensure_ascii=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kdist_controller", description=__doc__)
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        help="look after the TrainingJobs of this namespace; may be repeated; all without it",
    )
    parser.add_argument(
        "--metrics-port", type=int, default=PORT, help="port of metrics and probes; 0 picks one"
    )
    parser.add_argument(
        "--address",
        help="addresses of this host that serve metrics and probes, separated by commas; loopback "
        "always does",
    )
    parser.add_argument(
        "--lease-namespace",
        default=_own_namespace(),
        help="namespace of the Lease by which one replica leads; by default the pod's own",
    )
    parser.add_argument(
        "--identity",
        default=f"{socket.gethostname()}_{os.getpid()}",
        help="name of this replica in the Lease; no other replica may have it",
    )
    parser.add_argument(
        "--agents",
        choices=("pod", "proxy"),
        default="pod",
        help="way to the agents: straight to their pods, or through the API server",
    )
    parser.add_argument(
        "--avoid-after",
        type=int,
        default=AVOIDANCE.faults,
        help="faults of a machine after which a job avoids it; 0 for never",
    )
    parser.add_argument(
        "--avoid-hours",
        type=float,
        default=AVOIDANCE.seconds / 3600,
        help="hours for which a job avoids a machine",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    return parser


def _own_namespace() -> str:
    try:
        return _NAMESPACE.read_text().strip()
    except OSError:
        return "default"


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # threads that wait for the API server are not waited for
