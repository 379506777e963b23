"""How the agents of a job find each other: torch's dynamic rendezvous with kdist's timings, and the
stores that hold its state.

`handler` is the rendezvous; `state` is its shared state, with the times of a round and of
keep-alives; `stores` has the three stores: a shared folder (`kdist run`), a ConfigMap, for which
`configmap_client` is the client, and torch's TCPStore in a process of one of the agents
(`store_process`). With a ConfigMap, `many_nodes` has one agent join all that start together, and
send the requests of all to the API server while workers run; `exchange` is the key-value exchange
between the agents of a round. Any agent may be lost at any time, since membership and generations
are committed in the ConfigMap alone. By `membership`, which has how long a silence counts, agents
notice the loss of another one. `torch_internals` has all private names of torch elastic, also the
agent's. Not here: the rendezvous endpoint of the command line (`kdist_trainer.agent.settings`), and
the documents that agents share after the rendezvous (`kdist_trainer.agent.coordination`).

Read `handler` first.
"""
