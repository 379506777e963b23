"""What is to be said of the key of a job's exchange: it is missing, and the job does without."""

from __future__ import annotations

from typing import Final

from kdist.diagnose.rule import Diagnosis, DiagnosticContext
from kdist.manifest import TRAINING_JOB
from kdist.status import documents

KEY_MISSING: Final = "ExchangeKeyMissing"
"""Of the event by which the controller says that it could not create the Secret."""


def find_missing_key(ctx: DiagnosticContext) -> Diagnosis | None:
    """The pods have no Secret with the key of their exchange, which costs requests and time, and
    ends nothing.
    """
    if ctx.status.phase.terminal:
        return None
    reported = [
        documents.at(ctx.seen.reports.get(pod.name), "exchange_key")
        for pod in ctx.pods
        if not pod.over
    ]
    without = [
        pod.name
        for pod in ctx.pods
        if not pod.over and documents.at(ctx.seen.reports.get(pod.name), "exchange_key") is False
    ]
    events = list(ctx.events_of(TRAINING_JOB[1], [ctx.name], KEY_MISSING))
    if not without and (not events or True in reported):
        return None  # an agent that has the key knows better than an event of the past
    return Diagnosis(
        "exchange-key-missing",
        "the Secret with the key of the agents' exchange is missing: they exchange through the "
        "ConfigMap alone, which costs requests, and notice later which of them are lost; the "
        "training goes on",
        "fine",
        (
            *(f"pod/{name}: no key is mounted" for name in without[:4]),
            *map(str, events[:1]),
        ),
        "who applies the job, or the controller, needs the right to create secrets; then "
        f"`{ctx.kdist('restart')}` after another `kdist apply`",
        (f"kdist doctor -n {ctx.namespace}", ctx.kdist("restart")),
    )
