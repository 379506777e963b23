"""Checks the dashboards of `kdist.dashboards` against real servers: `python -m tools.dashboards`.

`preview` draws a dashboard as one self-contained HTML page from the series of a Prometheus, without
a Grafana; `make pictures` takes the pictures in docs/ from such pages. `verify` imports each
dashboard into a Grafana, evaluates every panel there and deletes it again.

`prometheus` is the client that both tests and the preview use, and fills the variables of a query;
`page`, `panel` and `chart` draw; `curve` finds gaps and limits of a series; `values` formats
Grafana's units.
"""
