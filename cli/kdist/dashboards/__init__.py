"""Dashboards as code: their panels and queries are data, exported as Grafana's JSON.

`model` defines what a dashboard consists of, and is what to read first; `training` and `fleet` are
the two dashboards; `grafana` converts them to Grafana's JSON. The Helm chart contains committed
copies of that JSON, which a test compares. `tools.dashboards`, in a checkout, draws them without a
Grafana and evaluates them on one.
"""

from kdist.dashboards.fleet import FLEET
from kdist.dashboards.model import Dashboard
from kdist.dashboards.training import TRAINING

DASHBOARDS: dict[str, Dashboard] = {"training-job": TRAINING, "fleet": FLEET}
"""The dashboards by the name of their file."""
