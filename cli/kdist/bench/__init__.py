"""The bench of collectives from outside: the job that it is, what its ranks have logged, and how
that is shown.

It is a job like any other, whose program is the trainer's `kdist_trainer.bench`; ranks say what
they measured as events.
"""

from kdist.bench.job import BenchSpec, make_job, read_size
from kdist.bench.result import Result, read_events

__all__ = ["BenchSpec", "Result", "make_job", "read_events", "read_size"]
