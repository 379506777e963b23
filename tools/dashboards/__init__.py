"""The dashboards as code, and what checks them against real servers: `python -m tools.dashboards`.

`model` defines what a dashboard consists of, and is what to read first; `training` and `fleet` are
the two dashboards, `goodput` has queries of both; `grafana` converts them to Grafana's JSON.
`export` writes that to the Helm chart, from which also the wheel of kdist takes it.

`preview` draws a dashboard as one self-contained HTML page from the series of a Prometheus, without
a Grafana; `make pictures` takes the pictures in docs/ from such pages. `verify` imports each
dashboard into a Grafana, evaluates every panel there and deletes it again. `prometheus` is the
client of both tests and the preview, and fills the variables of a query; `page`, `panel` and
`chart` draw; `curve` finds gaps and limits of a series; `values` formats Grafana's units.
"""

from tools.dashboards.fleet import FLEET
from tools.dashboards.model import Dashboard
from tools.dashboards.training import TRAINING

DASHBOARDS: dict[str, Dashboard] = {"training-job": TRAINING, "fleet": FLEET}
"""The dashboards by the name of their file."""
