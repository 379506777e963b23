"""How the agents of a job find each other: torch's dynamic rendezvous with kdist's timings, and the
stores that hold its state.

`handler` is the rendezvous; `state` is its shared state, with the timings of rounds and
keep-alives; `stores` has the three stores: a shared folder (`kdist run`), a ConfigMap (through
`configmap_client`), and torch's TCPStore in a process of one agent (`store_process`). With a
ConfigMap, `many_nodes` lets one agent add all that start together to a round, and send the requests
of all to the API server while workers run; `exchange` is the key-value exchange between the agents
of a round. Any agent may be lost at any time, since membership and generations are committed in the
ConfigMap alone. With `membership`, agents notice within a second or two that one is lost.
`torch_internals` has all private names of torch elastic, also those that the agent uses. Not here:
the rendezvous endpoint of the command line (`kdist_trainer.agent.settings`), and the documents that
agents share after the rendezvous (`kdist_trainer.agent.coordination`).

Read `handler` first.
"""
