"""Events as lines for people and for grep: time, node, the event's name, and a sentence.

    2026-01-31T12:00:01Z node-0 first-step            step 1 done, the first of this generation

The columns and the names of events are stable, the sentence may change. Output of a rank has the
prefix `[rank3]: `, output that belongs to no rank has the prefix `[node-0] `.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kdist.events.log import Entry
from kdist.units import is_number, number, rate, seconds, size

Event = Mapping[str, Any]

# others are said by rank 0 for all
_EVERY_RANK_SPEAKS = {"worker-failed", "hang", "failed", "checkpoint-failed"}
_SILENT = {
    "worker-started",
    "rendezvous-started",
    "agent-done",
    "bench-pairs",
}  # seen in the view's state, of no interest once past
_ENVELOPE = {"time", "event", "level", "job", "node", "rank", "generation", "message"}


def _count(number: object, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _group_formed(e: Event) -> str:
    nodes = f" on {_count(e['nodes'], 'node')}" if "nodes" in e else ""
    return (
        f"{_count(e['world_size'], 'rank')}{nodes}, generation {e['generation']} "
        f"({e.get('reason', 'start')})"
    )


def _progress(e: Event) -> str:
    of = f"/{e['target']}" if e.get("target") else ""
    fast = (
        f", {number(round(e['samples_per_second']))} samples/s"
        if is_number(e.get("samples_per_second"))
        else ""
    )
    fast += (
        f", learning rate {number(e['learning_rate'], 3)}"
        if is_number(e.get("learning_rate"))
        else ""
    )
    return f"step {e['step']}{of}, loss {number(e['loss'])}{fast}"


def _committed(e: Event) -> str:
    waited = (
        f", the training waited {seconds(e['visible_seconds'])}" if "visible_seconds" in e else ""
    )
    much = f" ({size(e['bytes'])})" if "bytes" in e else ""
    return f"step {e['step']} committed in {seconds(e['seconds'])}{waited}{much}"


def _worker_failed(e: Event) -> str:
    if e.get("primary") is False:
        return f"rank {e.get('rank')} lost its peers ({e['cause']})"
    if e.get("signal"):
        return f"rank {e.get('rank')} ended by {e['signal']} ({e['cause']})"
    how = f" with code {e['code']}" if e.get("code") is not None else ""
    return f"rank {e.get('rank')} ended{how} ({e['cause']}){_said(e)}"


def _said(e: Event) -> str:
    """The first line of the event's message, which may be a whole page of C++."""
    words = str(e.get("message") or "").partition("\n")[0]
    return f": {words[:200]}" if words else ""


def _metrics(e: Event) -> str:
    found = (
        e["metrics"]
        if isinstance(e.get("metrics"), Mapping)
        else {k: v for k, v in e.items() if k not in _ENVELOPE | {"step"}}
    )
    return ", ".join(f"{name} {number(value)}" for name, value in found.items()) or "evaluated"


def _bench_row(e: Event) -> str:
    much = f"{size(e['size'])}: bus bandwidth {rate(e['busbw'])}, " if e["size"] else ""
    wrong = f", {e['wrong']} WRONG" if e["wrong"] else ""
    return f"{much}mean {seconds(e['mean'])}, p99 {seconds(e['p99'])}, {e['rounds']} rounds{wrong}"


def _bench_slow(e: Event) -> str:
    who = (
        f"rank {e['ranks'][0]}"
        if len(e["ranks"]) == 1
        else f"ranks {e['ranks'][0]} and {e['ranks'][1]}"
    )
    return (
        f"slow: {who} ({', '.join(e['nodes'])}), {seconds(e['seconds'])} for a message, "
        f"{e['ratio']:.1f} times the others"
    )


_SENTENCES: dict[str, Callable[[Event], str]] = {
    "bench-begun": lambda e: (
        f"{e['collective']} among {_count(e['ranks'], 'rank')} ({e['device']}, {e['backend']})"
    ),
    "bench-row": _bench_row,
    "preflight": lambda e: (
        f"bus bandwidth {rate(e['busbw'])} among {e['ranks']} ranks, {rate(e['demanded'])} demanded"
    ),
    "bench-slow": _bench_slow,
    "bench-done": lambda e: (
        f"{e['wrong']} elements wrong" if e["wrong"] else "every result was right"
    ),
    "agent-started": lambda e: f"agent started, pid {e['pid']}",
    "agent-ended": lambda e: f"agent ended {_how(e['code'])}",
    "agent-restarting": lambda e: (
        f"agent ended {_how(e['code'])}; starts again in {seconds(e['seconds'])}"
    ),
    "agent-killed": lambda e: f"agent and ranks killed: {e['reason']}",
    "rendezvous-completed": _group_formed,
    "training-started": lambda _: "no checkpoint: starts from the beginning",
    "resumed": lambda e: (
        f"resumed after step {e['step']}"
        + (f", {number(e['samples_seen'])} samples seen" if "samples_seen" in e else "")
    ),
    "first-step": lambda e: f"step {e['step']} done, the first of this generation",
    "progress": _progress,
    "checkpoint-committed": _committed,
    "checkpoint-failed": lambda e: (
        f"a checkpoint could not be saved ({e['cause']}): {e.get('error', '')}; the "
        "training goes on"
    ),
    "checkpoint-fallback": lambda e: (
        f"a checkpoint is damaged, took the one before: step {e['step']} ({e['reason']})"
    ),
    "worker-failed": _worker_failed,
    "restarting": lambda e: (
        f"starts again, restart {e['restarts']} of {e['budget']} ({e['cause']}){_said(e)}"
    ),
    "joining": lambda e: (
        f"{_count(e['waiting'], 'node')} waiting to join: saves, then forms the larger group"
    ),
    "stopping": lambda e: f"saves and stops ({e['reason']})",
    "stopped": lambda e: f"stopped after step {e['step']}, state saved",
    "evaluated": _metrics,
    "done": lambda e: f"done after step {e['step']}",
    "hang": lambda e: (
        f"rank {e['rank']} hangs in {e['phase']}"
        + (f", inside {e['collective']}" if e.get("collective") else "")
    ),
    "failed": lambda e: f"failed: {e['cause']}{_said(e)}",
    "job-edited": lambda e: f"the job was edited since its checkpoint: {e['message']}",
    "past-end": lambda e: str(e["message"]),
    "not-reproducible": lambda e: f"the resume is correct but not equal to the bit: {e['why']}",
}


def _how(code: object) -> str:
    return f"by signal {-code}" if isinstance(code, int) and code < 0 else f"with code {code}"


def describe_event(event: Event) -> str:
    """The event's sentence; events without one, or with fields missing, are shown by their
    fields.
    """
    sentence = _SENTENCES.get(event["event"])
    if sentence:
        try:
            return sentence(event)
        except (KeyError, TypeError, ValueError):
            pass
    fields = [
        f"{name}={json.dumps(value, ensure_ascii=False)}"
        for name, value in event.items()
        if name not in _ENVELOPE
    ]
    return " ".join([*([str(event["message"])] if event.get("message") else []), *fields])


class EventFilter:
    """Decides which events become lines: what several agents or ranks say in the same words is said
    once.

    `lines_only` is true where no live view shows the progress.
    """

    def __init__(self, *, lines_only: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines_only = lines_only
        self._clock = clock
        self._began = clock()
        self._next_progress = 0.0
        self._said: dict[str, str] = {}

    def is_news(self, event: Event) -> bool:
        """Whether to show it."""
        name = event["event"]
        if name in _SILENT or (
            event.get("rank") not in (None, 0) and name not in _EVERY_RANK_SPEAKS
        ):
            return False
        if name in ("progress", "waiting"):  # the live view shows these by itself
            return self._lines_only and (name == "waiting" or self._is_due())
        if name.startswith("agent-"):
            return True
        words = f"{event.get('generation')} {describe_event(event)}"
        if self._said.get(name) == words:
            return False
        self._said[name] = words
        return True

    def _is_due(self) -> bool:
        """Progress is told every 2 s in the first minute, then every 10 s, after ten minutes every
        60 s.
        """
        now = self._clock()
        if now < self._next_progress:
            return False
        age = now - self._began
        self._next_progress = now + (2 if age < 60 else 10 if age < 600 else 60)
        return True


def format_line(entry: Entry) -> str:
    """The stable line of an entry, without colour."""
    if entry.event is None:
        return " ".join(entry.speaker)
    return (
        f"{_second(entry.event.get('time'))} {entry.node} {entry.event['event']:<21} "
        f"{describe_event(entry.event)}"
    ).rstrip()


def _second(stamp: object) -> str:
    """An event's time, cut to the second."""
    return (
        f"{stamp[:19]}Z"
        if isinstance(stamp, str) and len(stamp) >= 19
        else f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    )
