"""The agents of a job, as the command line and the controller see them: `client` is the HTTP client
of one agent, `metrics` computes the step time breakdown of each rank from what agents serve.
"""
