"""How the agents of a job find each other: torch's dynamic rendezvous with kdist's timings, and the
stores that hold its state.

There is one file per store: `file_store` is a shared folder (`kdist run`), `kubernetes_store` is a
ConfigMap, and `tcp_store` is torch's TCPStore in one of the agents. `handler` is the rendezvous
over any of them, `state` its shared state. With a ConfigMap, `many_nodes` is how one agent joins
all that start together, and asks the API server for all while workers run, and `exchange` what the
agents of one round tell each other through one of them: each may be lost at any time, since
membership and generations are committed in the ConfigMap alone. `membership` and
`round_membership` are how agents notice the loss of another one. `torch_internals` contains all
private names of torch elastic, those that the agent uses too. Not here: the documents that agents
share after the rendezvous (`kdist_trainer.agent.coordination`).

Read `endpoint` first, then `handler`.
"""
