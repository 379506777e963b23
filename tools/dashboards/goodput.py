"""Goodput and what it is made of, as queries over the time range that a dashboard shows."""

from __future__ import annotations


def _spent(labels: str = "") -> str:
    return f"increase(kdist_wall_seconds_total{{{labels}}}[$__range])"


WALL = _spent()
PRODUCTIVE = _spent('category="productive_step"')
UNPRODUCTIVE = _spent('category!~"productive_step|unobserved"')
UNOBSERVED = _spent('category="unobserved"')
OBSERVED = _spent('category!="unobserved"')
"""Seconds of all agents, by what they went into."""
_LOST = "increase(kdist_lost_progress_seconds_total{}[$__range])"
OF_TRAINING = (
    f"clamp_min((sum({PRODUCTIVE}) - sum({_LOST})) / sum({WALL}), 0)"
    f" unless (sum({UNOBSERVED}) > 0 unless sum({PRODUCTIVE}) > 0)"
)
"""Of one training: unknown while nothing that it does can be attributed."""
OF_ALL = f"sum({PRODUCTIVE}) / sum({OBSERVED})"
