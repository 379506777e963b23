"""The exposition has every declared metric, well named, within the series budget and exact."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.metrics.agent_metrics import RENDEZVOUS_DURATION, STATES
from kdist_trainer.metrics.exporter import CATALOGUE, label_names
from kdist_trainer.metrics.metric import Kind
from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.metrics.transport import MAX_RECORD, Reporter, pack
from tests.trainer.metrics.scrape import (
    BASE_SERIES,
    SERIES_OF_A_RANK,
    exporting,
    fetch,
    full_stats,
    make_exporter,
    read,
    record_everything,
    total,
    value,
)

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KDIST_METRICS_SOCKET", str(tmp_path / "metrics.sock"))
    return tmp_path


def scrape_everything(
    scratch: Path,
    local_ranks: int,
    *,
    accept: str = "",
    strategies: Collection[str] = ("ddp", "hsdp"),
) -> str:
    """A real scrape of an agent to which all has happened: a restart, a failed save, a fallback,
    every metric filled.
    """
    with exporting(scratch) as exporter:
        exporter.set_group(generation=1, world_size=local_ranks, local_ranks=range(local_ranks))
        exporter.set_state("running")
        record_everything(exporter)
        for rank in range(local_ranks):
            stats = full_stats(rank, strategies=strategies)
            stats.dropped = 1
            Reporter(stats).close()
        exporter.set_group(generation=2, world_size=local_ranks, local_ranks=range(local_ranks))
        for rank in range(local_ranks):
            Reporter(full_stats(rank, generation=2, strategies=strategies)).close()
        status, body, _ = fetch(exporter.port, "/metrics", accept=accept)
    assert status == 200
    return body


def check_metrics(text: str) -> subprocess.CompletedProcess[str]:
    """What promtool says of a page."""
    line = ["promtool", "check", "metrics"]
    return subprocess.run(line, input=text, capture_output=True, text=True, check=False, timeout=60)


def test_promtool_finds_nothing_wrong_with_a_real_scrape(scratch: Path) -> None:
    text = scrape_everything(scratch, 2)
    done = check_metrics(text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_promtool_does_find_a_badly_named_metric() -> None:
    text = "# HELP kdist_step_ms Step time\n# TYPE kdist_step_ms gauge\nkdist_step_ms 1\n"
    done = check_metrics(text)
    assert done.returncode != 0


def test_every_declared_metric_is_in_a_scrape_with_its_type_and_labels(scratch: Path) -> None:
    shown = text_string_to_metric_families(scrape_everything(scratch, 2))
    families = {family.name: family for family in shown}
    seen = {
        name + "_total" if family.type == "counter" else name for name, family in families.items()
    }
    # digits has no tokens, and this training no evaluation
    assert seen == {metric.name for metric in CATALOGUE} - {
        "kdist_tokens_total",
        "kdist_evaluation_loss",
    }
    for metric in CATALOGUE:
        if family := families.get(metric.name.removesuffix("_total")):
            assert (family.type, family.documentation) == (metric.kind, metric.help)
            assert {tuple(sorted(set(sample.labels) - {"le"})) for sample in family.samples} == {
                tuple(sorted(label_names(metric)))
            }


def test_openmetrics_is_served_on_request_without_created_series(scratch: Path) -> None:
    text = scrape_everything(scratch, 1, accept=OPENMETRICS)
    names = {sample.name for family in parse_openmetrics(text) for sample in family.samples}  # type: ignore[no-untyped-call]
    assert "kdist_steps_total" in names
    assert not [name for name in names if name.endswith("_created")]


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
@pytest.mark.parametrize("local_ranks", [1, 2, 8])
def test_the_series_of_an_agent_stay_in_their_budget(
    scratch: Path, local_ranks: int, strategy: str
) -> None:
    text = scrape_everything(scratch, local_ranks, strategies=[strategy])
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(series) <= BASE_SERIES + SERIES_OF_A_RANK * local_ranks
    reduces = "kdist_allreduce_duration_seconds" in text
    assert reduces == (strategy == "ddp"), "what never happened is not shown"
    assert ("all_gather" in text) == (strategy == "hsdp")


def test_label_values_are_few_and_fixed(scratch: Path) -> None:
    bounded = {"rank", "phase", "category", "op", "mode", "cause", "kind", "state", "outcome"}
    bounded |= {"signal", "server", "reason"}
    facts = {"version", "torch_version", "python_version", "framework", "workload_kind", "run_id"}
    facts |= {"world_size_min", "world_size_max"}
    assert {label for metric in CATALOGUE for label in metric.labels} <= bounded | facts
    counted = [metric for metric in CATALOGUE if not metric.name.endswith("_info")]
    assert not any(facts & set(metric.labels) for metric in counted)


def test_a_record_fits_its_datagram() -> None:
    assert len(pack(full_stats(0))) <= MAX_RECORD


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_shown_as_it_is(scratch: Path, loss: float) -> None:
    stats = StepStats(rank=0, generation=1)
    stats.loss = loss
    with exporting(scratch) as exporter:
        exporter.set_group(generation=1, world_size=1, local_ranks=[0])
        Reporter(stats).close()
        shown = value(read(fetch(exporter.port, "/metrics")[1]), "kdist_loss")
    assert math.isnan(shown) if math.isnan(loss) else shown == loss


def test_what_is_unknown_is_absent_not_zero(tmp_path: Path) -> None:
    exporter = make_exporter(tmp_path)
    exporter.set_group(generation=1, world_size=1, local_ranks=[0])
    samples = read(exporter.expose())
    names = {name for name, _ in samples}
    unknown = {"loss", "target_steps", "tokens_total", "last_step", "restarts_remaining"}
    assert not names & {f"kdist_{name}" for name in unknown}
    assert value(samples, "kdist_steps_total", rank="0") == 0


def test_metrics_of_the_job_are_shown_by_the_agent_that_has_rank_0_only(tmp_path: Path) -> None:
    exporter = make_exporter(tmp_path)
    exporter.set_group(generation=1, world_size=4, local_ranks=[2, 3])
    names = {name for name, _ in read(exporter.expose())}
    assert not names & {"kdist_checkpoint_attempts_total", "kdist_nonfinite_total", "kdist_loss"}
    assert "kdist_steps_total" in names


def test_exactly_one_state_is_on(tmp_path: Path) -> None:
    exporter = make_exporter(tmp_path)
    for state in STATES:
        exporter.set_state(state)
        samples = read(exporter.expose())
        assert total(samples, "kdist_job_state") == 1
        assert value(samples, "kdist_job_state", state=state) == 1


def test_an_unknown_state_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dreaming"):
        make_exporter(tmp_path).set_state("dreaming")


def test_labels_cannot_break_out_of_their_quotes(tmp_path: Path) -> None:
    exporter = make_exporter(tmp_path)
    exporter.add_restart('x"} 1\nkdist_evil 1 #\\')
    samples = read(exporter.expose())
    assert not [name for name, _ in samples if name == "kdist_evil"]
    assert total(samples, "kdist_worker_group_restarts_total") == 1


def test_histograms_are_cumulative_and_agree_with_their_counts(scratch: Path) -> None:
    samples = read(scrape_everything(scratch, 2))
    for metric in CATALOGUE:
        if metric.kind is not Kind.HISTOGRAM:
            continue
        buckets = sorted(
            (float(dict(labels)["le"]), number, labels - {("le", dict(labels)["le"])})
            for (name, labels), number in samples.items()
            if name == f"{metric.name}_bucket"
        )
        for others in {labels for _, _, labels in buckets}:
            counts = [number for _, number, labels in buckets if labels == others]
            assert counts == sorted(counts)
            assert counts[-1] == samples[f"{metric.name}_count", others]


def test_usual_durations_fall_into_finite_buckets(scratch: Path) -> None:
    stats = StepStats(rank=0, generation=1)
    stats.add_checkpoint("save", visible=20.0, total=400.0, nbytes=1, step=1)
    with exporting(scratch) as exporter:
        exporter.set_group(generation=1, world_size=1, local_ranks=[0])
        for seconds in (0.5, 20.0, 200.0):
            exporter.observe_rendezvous(seconds, "formed")
        Reporter(stats).close()
        samples = read(fetch(exporter.port, "/metrics")[1])
    meeting, save = (
        f"kdist_{name}_duration_seconds_bucket" for name in ("rendezvous", "checkpoint")
    )
    bounds = [f"{bound:.1f}" for bound in RENDEZVOUS_DURATION.buckets]
    assert [value(samples, meeting, outcome="formed", le=bound) for bound in bounds] == [1, 2, 3]
    assert value(samples, save, op="save", mode="blocking", le="30.0") == 1
    assert value(samples, save, op="save", mode="total", le="600.0") == 1


def test_a_state_that_cannot_be_loaded_is_counted_under_its_own_name(scratch: Path) -> None:
    stats = StepStats(rank=0, generation=1)
    SaveResult(step=1, ok=False, cause="unloadable").add_to(stats)
    with exporting(scratch) as exporter:
        exporter.set_group(generation=1, world_size=1, local_ranks=[0])
        Reporter(stats).close()
        samples = read(fetch(exporter.port, "/metrics")[1])
    assert value(samples, "kdist_checkpoint_failures_total", op="save", cause="unloadable") == 1
