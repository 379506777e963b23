"""The command line: it turns a job.yaml into local processes or into Kubernetes objects.

`commands` only parse and print; `app` has their table. `load` and `spec` read a job file, `render`
and `backends` turn it into objects, `deploy` applies them, and `job` is what can be done with a
job afterwards, in a cluster (`job.cluster`) or on this machine (`job.local`): the modules to build
on for a client in Python.

What runs inside the pods is the other distribution, `kdist_trainer`; it is started as a process,
and only its `config` is imported, by `spec`.
"""

__version__ = "0.2.0.dev0"
