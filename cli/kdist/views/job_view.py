"""What a live view shows of a job, wherever the job runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kdist.events import Entry
from kdist.status import Phase
from kdist.views.rank_table import RankTable


@dataclass(frozen=True)
class JobView:
    """What a live view shows of a job. Values that are unknown are None and not shown.

    Attributes:
        name: name of the job.
        ranks: the table of ranks.
        phase: phase of a job on a cluster.
        step: last completed step.
        target: step at which the training ends.
        seconds_left: estimated seconds until then.
        elapsed: seconds since the start.
        losses: recent losses, the newest last.
        throughput: samples per second.
        all_reduce_seconds: seconds per step.
        nodes: nodes at work and wanted, such as `2/4`.
        restarts_left: restarts until the job fails.
        checkpoint_age: seconds since the last checkpoint.
        at_risk: seconds of training that a loss of all ranks now would cost.
        gap: what is missing from the view, in a sentence.
        progress_bars: newest states of the ranks' own progress bars.
        notice: what the job waits for or why it fails, in a sentence.
        notice_style: style of the notice.
        hint: shown where there is no notice.
    """

    name: str
    ranks: RankTable
    phase: Phase | None = None
    step: int | None = None
    target: int | None = None
    seconds_left: float | None = None
    elapsed: float | None = None
    loss: float | None = None
    losses: Sequence[float] = ()
    throughput: float | None = None
    learning_rate: float | None = None
    all_reduce_seconds: float | None = None
    nodes: str = ""
    world_size: int = 0
    generation: int = 0
    restarts: int = 0
    restarts_left: int | None = None
    checkpoint_step: int | None = None
    checkpoint_age: float | None = None
    at_risk: float | None = None
    gap: str = ""
    progress_bars: Sequence[Entry] = ()
    notice: str = ""
    notice_style: str = "yellow"
    hint: str = ""
