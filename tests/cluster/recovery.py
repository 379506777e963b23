"""A rank of a job in pods is killed while a Prometheus watches: all that it must have seen of it
then.
"""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

from tests.charts.monitored import firing, unanswered
from tests.cluster.monitoring import SCRAPE_SECONDS, signal_rank
from tests.cluster.namespace import Namespace
from tools.dashboards.prometheus import Prometheus, Window

_ITS_OWN = ("__name__", "pod", "instance")


def see_a_recovery(
    namespace: Namespace, prometheus: Prometheus, *, since: float
) -> dict[str, dict[str, str]]:
    """Kill a rank of `digits`, which was sent at the Unix time `since`; panels, rules and targets
    answer before and after.

    Returns the targets that were up by their pod's name: what labels each had next to `pod` and
    `instance`.
    """

    def seen(query: str) -> bool:
        return bool(prometheus.instant(query, at=time.time()))

    namespace.until("a second checkpoint", lambda: seen("kdist_checkpoint_last_success_step >= 40"))
    namespace.until("both pods to be scraped", lambda: seen("count(up == 1) == 2"))
    before = time.time()
    targets = prometheus.instant("up == 1", at=before)
    signal_rank(namespace, "digits")
    namespace.until(
        "two agents in a second generation", lambda: seen("count(kdist_generation == 2) == 2")
    )
    namespace.until("the time it took", lambda: seen("kdist_time_to_recover_seconds > 0"))
    again = time.time()
    namespace.until(
        "a checkpoint after that",
        lambda: seen(f"kdist_checkpoint_last_success_timestamp_seconds > {again}"),
    )
    after = time.time()
    window = Window(since, after, SCRAPE_SECONDS)
    assert (
        unanswered(prometheus, window, job="digits", at=(before, after - SCRAPE_SECONDS, after))
        == []
    )
    assert rules_without_an_answer(prometheus) == []
    assert firing(prometheus) == set()
    assert seen('kdist_worker_group_restarts_total{cause="signal"} == 1')
    assert seen('kdist_worker_exits_total{signal="SIGKILL"} == 1')
    assert not seen('{exported_kdist_job!=""}')
    return {
        one.labels["pod"]: {
            name: value for name, value in one.labels.items() if name not in _ITS_OWN
        }
        for one in targets
    }


def rules_without_an_answer(prometheus: Prometheus) -> list[str]:
    """Rules that Prometheus could not evaluate, or has not yet."""
    return [rule["name"] for rule in loaded_rules(prometheus) if rule["health"] != "ok"]


def loaded_rules(prometheus: Prometheus) -> list[dict[str, Any]]:
    """Every rule that Prometheus knows, as it tells of it: `name`, `type`, `health` and more."""
    with urllib.request.urlopen(f"{prometheus.url}/api/v1/rules", timeout=30) as answer:  # noqa: S310 - our own
        groups = json.load(answer)["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]
