"""`verify` against an HTTP server that responds as Grafana's API does."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.tools.dashboards.conftest import Tool
from tools.dashboards import DASHBOARDS


class Grafana(ThreadingHTTPServer):
    """Stores the dashboards it is given; a query of `broken` fails, all others find one series
    each.
    """

    def __init__(self, *, broken: str = "", sources: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.broken = broken
        self.stored = dict[str, Any]()
        self.queries = list[str]()
        self.tokens = set[str | None]()
        self.sources = (
            [{"type": kind, "uid": kind} for kind in ("loki", "prometheus")] if sources else []
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Grafana

    def do_GET(self) -> None:
        self._answer(self.server.sources if self.path == "/api/datasources" else {"database": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.tokens.add(self.headers["Authorization"])
        if self.path == "/api/dashboards/db":
            self.server.stored[body["dashboard"]["uid"]] = body["dashboard"]
            self._answer({"uid": body["dashboard"]["uid"]})
            return
        results: dict[str, Any] = {}
        for query in body["queries"]:
            self.server.queries.append(query["expr"])
            failed = self.server.broken and self.server.broken in query["expr"]
            results[query["refId"]] = (
                {"error": "parse error", "frames": []} if failed else {"frames": [{}]}
            )
        self._answer({"results": results})

    def do_DELETE(self) -> None:
        del self.server.stored[self.path.rsplit("/", 1)[1]]
        self._answer({})

    def _answer(self, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""


@pytest.fixture
def grafana(request: pytest.FixtureRequest) -> Iterator[Grafana]:
    server = Grafana(**getattr(request, "param", {}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_every_panel_is_evaluated_and_nothing_is_left_behind(
    tool: Tool, grafana: Grafana, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", "glsa_x")
    done = tool("verify", "--grafana", grafana.url)
    assert done.exit_code == 0
    panels = [panel for dashboard in DASHBOARDS.values() for panel in dashboard.panels]
    assert len(done.stdout.splitlines()) == 1 + len(panels)
    assert len(grafana.queries) == sum(len(panel.queries) for panel in panels)
    assert not [query for query in grafana.queries if re.search(r"\$[^1]", query)], (
        "$1 is what label_replace has found"
    )
    assert grafana.stored == {}
    assert grafana.tokens == {"Bearer glsa_x"}


@pytest.mark.parametrize("grafana", [{"broken": "kdist_grad_norm"}], indirect=True)
def test_a_panel_that_fails_is_named_and_fails_the_command(tool: Tool, grafana: Grafana) -> None:
    done = tool("verify", "--grafana", grafana.url)
    assert done.exit_code == 1
    assert [
        line
        for line in done.stdout.splitlines()
        if "parse error" in line and "Gradient norm" in line
    ]
    assert grafana.stored == {}


@pytest.mark.parametrize("grafana", [{"sources": False}], indirect=True)
def test_a_grafana_without_a_prometheus_is_reported(tool: Tool, grafana: Grafana) -> None:
    done = tool("verify", "--grafana", grafana.url)
    assert done.exit_code == 1
    assert "no Prometheus data source" in done.stderr


def test_an_address_without_a_grafana_is_reported(tool: Tool) -> None:
    done = tool("verify", "--grafana", "http://127.0.0.1:9")
    assert done.exit_code == 5
    assert "does not answer" in done.stderr
