"""`kdist explain -o crd`: the CustomResourceDefinition of `TrainingJob`, by which a cluster with
the controller stores the same job.yaml that `kdist apply` takes.

`definition` makes it from the model in `kdist.spec`, with the types and limits that the API server
checks, and has the model of what the controller writes. The chart contains a copy, which a test
compares.
"""
