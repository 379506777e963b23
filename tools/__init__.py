"""Tools for developers of kdist, run from a checkout and in no wheel.

They may import `kdist`; `kdist` and `kdist_trainer` never import them. A tool is a package with a
`__main__`, run as `python -m tools.NAME`: `dashboards` draws the dashboards without a Grafana, or
checks every panel on one.
"""
