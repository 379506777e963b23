"""Evaluates a dashboard on a Grafana: imports a copy, queries every panel as a browser would, and
deletes the copy.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

from kdist.errors import Code, KdistError
from tools.dashboards.grafana import to_document
from tools.dashboards.model import Dashboard

_TIMEOUT_SECONDS = 30.0


class PanelFinding(NamedTuple):
    """The result of one panel: the number of its series, or Grafana's error."""

    dashboard: str
    panel: str
    series: int
    error: str


class Grafana:
    """A Grafana at `url`, with a service account's `token` or none. Methods raise `KdistError` if
    it does not answer or rejects a request.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise KdistError(
                f"`{url}` is not an http address",
                hint="as in --grafana http://localhost:3000",
                code=Code.USAGE,
            )
        self.url = url.rstrip("/")
        self._headers = {
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }

    def request(self, method: str, path: str, document: Any = None) -> Any:
        """The JSON response to one request."""
        data = None if document is None else json.dumps(document).encode()
        message = urllib.request.Request(  # noqa: S310
            f"{self.url}{path}", data=data, headers=self._headers, method=method
        )
        try:
            with urllib.request.urlopen(message, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 - the scheme was checked
                return json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            body = error.read(2000).decode(errors="replace")
            raise KdistError(
                f"Grafana rejected {method} {path}: {error.code} {body}", code=Code.UNREACHABLE
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise KdistError(
                f"Grafana at {self.url} does not answer: {reason}", code=Code.UNREACHABLE
            ) from None

    def source(self) -> dict[str, Any]:
        """Its default Prometheus data source. Raises `KdistError` if it has none."""
        sources = [
            one for one in self.request("GET", "/api/datasources") if one["type"] == "prometheus"
        ]
        if not sources:
            raise KdistError(
                f"Grafana at {self.url} has no Prometheus data source",
                hint="add one, then verify again",
            )
        default: dict[str, Any] = next((one for one in sources if one.get("isDefault")), sources[0])
        return default


def verify(grafana: Grafana, dashboard: Dashboard) -> Iterator[PanelFinding]:
    """Import a copy of the dashboard, evaluate each panel through Grafana, and delete the copy."""
    grafana.request("GET", "/api/health")
    source = grafana.source()
    copy = {
        **to_document(dashboard),
        "uid": f"{dashboard.uid}-verify",
        "title": f"{dashboard.title} (verify)",
    }
    imported = grafana.request("POST", "/api/dashboards/db", {"dashboard": copy, "overwrite": True})
    try:
        for panel in copy["panels"]:
            for one in [panel, *panel.get("panels", [])]:
                if "targets" in one:
                    yield _evaluate(grafana, source, dashboard, one)
    finally:
        grafana.request("DELETE", f"/api/dashboards/uid/{imported['uid']}")


def _evaluate(
    grafana: Grafana, source: dict[str, Any], dashboard: Dashboard, panel: dict[str, Any]
) -> PanelFinding:
    queries = []
    for target in panel["targets"]:
        expr = target["expr"]
        for variable in sorted(dashboard.variables, key=lambda each: -len(each.name)):
            expr = expr.replace(f"${variable.name}", variable.all_value)
        expr = expr.replace("$__rate_interval", "5m").replace("$__range", "1h")
        queries.append(
            {
                **target,
                "expr": expr,
                "datasource": {"uid": source["uid"], "type": "prometheus"},
                "intervalMs": 15_000,
            }
        )
    try:
        results = grafana.request(
            "POST", "/api/ds/query", {"queries": queries, "from": "now-1h", "to": "now"}
        )["results"]
    except KdistError as error:
        return PanelFinding(dashboard.title, panel["title"], 0, error.message)
    series = sum(len(result.get("frames", [])) for result in results.values())
    errors = [result["error"] for result in results.values() if result.get("error")]
    return PanelFinding(dashboard.title, panel["title"], series, "; ".join(errors))
