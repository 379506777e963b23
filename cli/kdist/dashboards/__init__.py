"""Dashboards as code: their panels and queries are data, written as Grafana's JSON or drawn as an
HTML page.

`model` defines what a dashboard consists of; `training` and `fleet` are the two dashboards;
`grafana` writes them as Grafana's JSON; `preview` draws them from a Prometheus; `verify` tests them
on a Grafana. The Helm chart contains committed copies of the JSON, which a test compares.
"""

from kdist.dashboards.fleet import FLEET
from kdist.dashboards.model import Dashboard
from kdist.dashboards.training import TRAINING

DASHBOARDS: dict[str, Dashboard] = {"training-job": TRAINING, "fleet": FLEET}
"""All of them by the name of their file."""
