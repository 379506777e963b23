"""`kdist explain -o crd`: the CustomResourceDefinition of `TrainingJob`, by which a cluster with
the controller stores the same job.yaml that `kdist apply` takes.

`definition` makes it from the model in `kdist.spec`, with the rules that the API server checks;
`structural` converts a JSON Schema to the form that Kubernetes accepts; `status` is the model of
what the controller writes. The chart contains a copy, which a test compares.
"""
