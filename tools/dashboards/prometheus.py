"""A client of Prometheus' HTTP API, and the variables of a dashboard's queries."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kdist.errors import Code, KdistError, NotFoundError, UsageError
from tools.dashboards.model import Dashboard

_TIMEOUT_SECONDS = 30.0
_MOST_BYTES = 64 * 2**20

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Series:
    """One time series: its labels, and pairs of Unix time and value."""

    labels: Labels
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        """The newest value; NaN where there is none."""
        return self.points[-1][1] if self.points else math.nan


@dataclass(frozen=True)
class Window:
    """A range of Unix times, and the seconds between two points."""

    start: float
    end: float
    step: float


class Prometheus:
    """A Prometheus at `url`. Every method raises `KdistError` if it does not answer or rejects a
    query.
    """

    def __init__(self, url: str) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise KdistError(
                f"`{url}` is not an http address",
                hint="as in --prometheus http://localhost:9090",
                code=Code.USAGE,
            )
        self.url = url.rstrip("/")

    def instant(self, query: str, *, at: float) -> list[Series]:
        """The query's series at one Unix time."""
        found = self._ask("query", {"query": query, "time": f"{at:.3f}"})["result"]
        if isinstance(found, list) and found and not isinstance(found[0], dict):
            return [Series({}, (_point(found),))]  # a scalar
        return [Series(one["metric"], (_point(one["value"]),)) for one in found]

    def range(self, query: str, window: Window) -> list[Series]:
        """The query's series over a window of time."""
        times = {
            "start": f"{window.start:.3f}",
            "end": f"{window.end:.3f}",
            "step": f"{window.step:g}",
        }
        found = self._ask("query_range", {"query": query, **times})["result"]
        return [
            Series(one["metric"], tuple(_point(point) for point in one["values"])) for one in found
        ]

    def label_values(self, label: str, metric: str, window: Window) -> list[str]:
        """Values of a label on a metric's series within the window."""
        times = {"start": f"{window.start:.3f}", "end": f"{window.end:.3f}"}
        found: list[str] = self._ask(
            f"label/{label}/values", {"match[]": metric, **times}, get=True
        )
        return found

    def scrape_seconds(self) -> float:
        """Seconds between two scrapes of the agents; 15 if it does not report them."""
        active = self._ask("targets", {"state": "active"}, get=True).get("activeTargets", [])
        known = [
            _seconds(str(one.get("scrapeInterval", "")))
            for one in active
            if "kdist" in str(one.get("scrapePool", ""))
        ]
        return max((seconds for seconds in known if seconds), default=15.0)

    def _ask(self, path: str, fields: Mapping[str, str], *, get: bool = False) -> Any:
        encoded = urllib.parse.urlencode(fields)
        url = f"{self.url}/api/v1/{path}"
        request = urllib.request.Request(  # noqa: S310
            f"{url}?{encoded}" if get else url, data=None if get else encoded.encode()
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310 - the scheme was checked
                document = json.loads(answer.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            raise KdistError(
                f"Prometheus rejected a query: {_reason(error)}", hint=fields.get("query", "")
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            hint = "is it running, and is the address right?"
            raise KdistError(
                f"Prometheus at {self.url} does not answer: {reason}",
                hint=hint,
                code=Code.UNREACHABLE,
            ) from None
        if not isinstance(document, dict) or document.get("status") != "success":
            raise KdistError(
                f"{self.url} does not answer as a Prometheus does", code=Code.UNREACHABLE
            )
        return document["data"]


def choose_job(prometheus: Prometheus, window: Window, name: str | None) -> str:
    """The training of this name, or the only one if `name` is None.

    Raises:
        NotFoundError: there was no training within the window.
        UsageError: none has this name, or there are several to choose from.
    """
    known = sorted(prometheus.label_values("kdist_job", "kdist_job_info", window))
    if name is not None and name in known:
        return name
    if name is None and len(known) == 1:
        return known[0]
    if not known:
        raise NotFoundError(
            "this Prometheus knows no training in that time",
            hint="does it scrape the agents' port 9401?",
        )
    reason = f"it knows no training `{name}`" if name else f"there are {len(known)} trainings"
    raise UsageError(reason, hint=f"name one of {', '.join(known[:20])}")


def fill(
    dashboard: Dashboard,
    text: str,
    window: Window,
    *,
    chosen: Mapping[str, str],
    scrape_seconds: float,
) -> str:
    """A panel's query as Prometheus takes it, with the windows that Grafana would choose.

    Args:
        dashboard: whose variables the query may have.
        text: the query as the panel has it.
        window: that the panel shows.
        chosen: values of variables; the others take all values.
        scrape_seconds: between two scrapes; a rate needs four of them.
    """
    query = dashboard.query(text)
    query = query.replace("$__rate_interval", f"{math.ceil(max(4 * scrape_seconds, window.step))}s")
    query = query.replace("$__range", f"{max(1, math.ceil(window.end - window.start))}s")
    for variable in sorted(dashboard.variables, key=lambda each: -len(each.name)):
        query = query.replace(f"${variable.name}", chosen.get(variable.name, variable.all_value))
    return query


def _seconds(duration: str) -> float:
    """Seconds of a duration as Prometheus writes it, such as `1m30s`; 0 for anything else."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(
        int(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|s|m|h)", duration)
    )


def _point(pair: Any) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(65_536))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
