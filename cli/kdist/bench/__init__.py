"""`kdist bench`: measures collectives among ranks.

A bench is a job like any other, whose program is the trainer's `kdist_trainer.bench`; its ranks log
what they measured as events. `job` makes that job, from a job file's machines or from this machine;
`remote` runs it on a cluster; `result` reads the events and formats them as a table or a document.
Read `result` first: it defines what a bench measures.

Running a bench on this machine is up to `kdist.job.local`, as for any job.
"""

from kdist.bench.job import BenchSpec, make_job, read_size
from kdist.bench.result import Result, read_events
