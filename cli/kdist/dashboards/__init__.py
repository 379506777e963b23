"""`kdist dashboards`: the dashboards as files for Grafana.

The folder `json` contains them, as Grafana's import, its provisioning and the sidecar of its chart
accept them; in a checkout it is a link to the files of the Helm chart. They are made by
`tools.dashboards`, where their panels and queries are data.
"""
