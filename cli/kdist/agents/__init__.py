"""The agents of a job, as the command line and the controller see them.

An agent serves `/status`, `/metrics` and `/healthz` in its pod. `client` asks one agent, over the
API server, a forwarded port, or loopback, and trusts nothing that it answers. `metrics` reads the
text format of Prometheus and computes the step time breakdown of each rank.

Which agents a job has is known to `kdist.job`: pods of a cluster, or processes of this machine.
"""
