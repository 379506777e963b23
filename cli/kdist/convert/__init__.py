"""`kdist convert`: a job.yaml from the workload or the launch command that a team has today.

Start with `manifests`, which reads a file and finds its workloads; `workloads` reads what belongs
to a kind, `pod` the pod template and its container, `launch` the command line of torchrun,
accelerate or a shell, and `draft` collects the job, checks it with kdist's own rules and writes it.

No value is lost silently: `values` records of each one that it became a field, that it is kept in
`podTemplate`, or why it is left out.
"""
