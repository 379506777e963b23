"""Writes the generated pages of docs/reference from the code: `python -m tools.reference`.

`pages` names each page and the function that renders it; tests/docs compares the committed pages
with what they would be now. `commands` renders click's commands, `events` the sentences of the
trainer's events, `exit_codes` both tables of exit codes, `script_api` what scripts import, read
from the source without importing torch, `json_output` the kinds of documents that `-o json` prints,
`index` the list of all pages for programs. `chart` takes its table from the chart's own page,
`icon` the site's icon from the chart.

The tables of job.yaml and of the metrics are parts of written pages, which their own tests keep
fresh: tests/cli/test_docs.py and tests/trainer/metrics.
"""
