"""Reading and merging the text that agents serve to Prometheus."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kdist.agents.metrics import (
    AgentSample,
    merge,
    merge_samples,
    parse,
    select,
)
from kdist_trainer.metrics.exporter import Exporter

PAGE = """\
# HELP kdist_steps_total Optimizer steps completed
# TYPE kdist_steps_total counter
kdist_steps_total{kdist_job="d",rank="0"} 12.0
kdist_steps_total{kdist_job="d",rank="1"} 1e+03
# TYPE kdist_loss gauge
kdist_loss NaN
kdist_odd{text="a \\"quoted\\", \\\\ and\\nbroken"} 1
"""


def test_samples_are_read_with_their_labels() -> None:
    found = list(parse(PAGE))
    assert found[:2] == [
        Sample("kdist_steps_total", {"kdist_job": "d", "rank": "0"}, 12.0),
        Sample("kdist_steps_total", {"kdist_job": "d", "rank": "1"}, 1000.0),
    ]
    assert math.isnan(found[2].value)
    assert found[3].labels == {"text": 'a "quoted", \\ and\nbroken'}
    assert len(found) == 4


@pytest.mark.parametrize("line", ["what is this", 'kdist_no_value{a="b"}', "kdist_x " + "9" * 400])
def test_of_a_broken_page_the_samples_before_the_break_are_read(line: str) -> None:
    assert len(list(parse(f"{PAGE}{line}\n{PAGE}"))) == 4


def test_the_real_exporter_is_read_the_same_after_a_merge(tmp_path: Path) -> None:
    exporter = Exporter(
        job="d",
        run_id="r",
        socket_path=tmp_path / "s",
        port=0,
        addresses=["127.0.0.1"],
        info={"framework": "ddp"},
    )
    exporter.set_group(generation=1, world_size=2, local_ranks=[0, 1])
    page = exporter.expose()
    samples = list(parse(page))
    assert len(samples) > 50
    merged = list(parse("\n".join(merge({"pod-a": page}))))
    assert merged == [
        sample._replace(labels={**sample.labels, "pod": "pod-a"}) for sample in samples
    ]
    helps = [line for line in page.splitlines() if line.startswith("# HELP")]
    assert [line for line in merge({"pod-a": page}) if line.startswith("# HELP")] == helps


def test_merged_pages_are_one_valid_page_in_which_every_series_says_whose_it_is() -> None:
    merged = "\n".join(merge({"pod-a": PAGE, "pod-b": PAGE})) + "\n"
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    expected = ["pod-a", "pod-a", "pod-b", "pod-b"]
    assert [sample.labels["pod"] for sample in families["kdist_steps"].samples] == expected
    assert merged.count("# TYPE kdist_steps_total") == 1


def test_a_page_cannot_send_control_characters_to_a_terminal() -> None:
    hostile = 'kdist_loss{a="\x1b[31m"} 1\n# HELP kdist_loss \x1b]0;title\x07\n'
    assert list(parse(hostile)) == []
    assert list(merge({"p": hostile})) == []


def test_the_samples_of_one_rank_are_those_of_its_agent() -> None:
    now = {
        f"pod-{rank}": AgentSample({"ranks": [{"rank": rank}]}, f"kdist_loss {rank}")
        for rank in (0, 1)
    }
    assert list(select(now, None)) == ["pod-0", "pod-1"]
    assert list(select(now, 1)) == ["pod-1"]
    assert select(now, 2) == {}
    assert list(merge_samples(select(now, 1)))[-1].split() == ['kdist_loss{pod="pod-1"}', "1.0"]


@given(st.text(max_size=400))
@pytest.mark.sampled
def test_no_text_makes_the_reader_raise(text: str) -> None:
    assert all(isinstance(sample.value, float) for sample in parse(text))
    assert isinstance(list(merge({"p": text})), list)
