"""Dashboards as code: what they show is data here, drawn for Grafana or as a page of our own.

`panels` says what a dashboard is made of; `training` and `fleet` are the two there are; `grafana`
writes them as Grafana's JSON; `preview` draws them from Prometheus' own numbers; `verify` tries
them on a Grafana. Committed copies of the JSON are in the Helm chart, and a test compares.
"""

from kdist.dashboards.fleet import FLEET
from kdist.dashboards.model import Dashboard
from kdist.dashboards.training import TRAINING

DASHBOARDS: dict[str, Dashboard] = {"training-job": TRAINING, "fleet": FLEET}
"""All of them by the name of their file."""
