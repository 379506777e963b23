"""The controller of TrainingJob resources, which runs in the cluster.

`reconcile` makes all of its decisions: it is a pure function from what is observed to what has to
be done. Read it first, then `observation` (its input), `actions` (its output) and `status` (what
people read). Around it: `cache` keeps copies of the objects, `work_queue` says which job is next,
`executor` executes the decision, `agent_poller` polls the agents, `node_recovery` replaces the pods
of lost nodes, `election` makes one of several replicas the leader, and `controller` connects these.
Planning, rendering and reading objects is left to `kdist`.

It is built on the watches of `kdist` and not on kopf, which writes annotations and finalizers into
every resource, needs twice the memory, and stops when two of its replicas run at once; nor on the
informer and the leader election of the Python client (37.0), which keep whole objects (290 MiB for
the pods of a thousand jobs), watch no custom resources, request no bookmarks, set no timeouts, and
end the election without notice while the API server is unavailable.
"""

__version__ = "0.2.0.dev0"
