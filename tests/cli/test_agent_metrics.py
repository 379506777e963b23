"""Reading and merging the text that agents serve to Prometheus."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kdist.agent_metrics import Sample, merge, parse, to_document
from kdist_trainer.metrics.exporter import Exporter

PAGE = """\
# HELP kdist_steps_total Optimizer steps completed
# TYPE kdist_steps_total counter
kdist_steps_total{kdist_job="d",rank="0"} 12.0
kdist_steps_total{kdist_job="d",rank="1"} 1e+03
# TYPE kdist_loss gauge
kdist_loss NaN
kdist_odd{text="a \\"quoted\\", \\\\ and\\nbroken"} 1
what is this
kdist_no_value{a="b"}
"""


def test_samples_are_read_with_their_labels_and_other_lines_passed_over() -> None:
    found = list(parse(PAGE))
    assert found[:2] == [
        Sample("kdist_steps_total", {"kdist_job": "d", "rank": "0"}, 12.0),
        Sample("kdist_steps_total", {"kdist_job": "d", "rank": "1"}, 1000.0),
    ]
    assert math.isnan(found[2].value)
    assert found[3].labels == {"text": 'a "quoted", \\ and\nbroken'}
    assert len(found) == 4


def test_what_the_real_exporter_serves_is_read_as_prometheus_reads_it(tmp_path: Path) -> None:
    exporter = Exporter(
        job="d",
        run_id="r",
        socket_path=tmp_path / "s",
        port=0,
        host="127.0.0.1",
        info={"framework": "ddp"},
    )
    exporter.set_group(generation=1, world_size=2, local_ranks=[0, 1])
    page = exporter.expose()
    theirs = [
        (one.name, one.labels, one.value)
        for family in text_string_to_metric_families(page)
        for one in family.samples
    ]
    ours = [(one.name, one.labels, one.value) for one in parse(page)]
    assert len(ours) > 50
    # Scrape times move between the readings of one page, not within it.
    assert sorted(map(repr, ours)) == sorted(map(repr, theirs))


def test_merged_pages_are_one_valid_page_in_which_every_series_says_whose_it_is() -> None:
    merged = "\n".join(merge({"pod-a": PAGE, "pod-b": PAGE})) + "\n"
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    expected = ["pod-a", "pod-a", "pod-b", "pod-b"]
    assert [sample.labels["pod"] for sample in families["kdist_steps"].samples] == expected
    assert merged.count("# TYPE kdist_steps_total") == 1
    assert "what is this" not in merged


def test_a_page_cannot_send_control_characters_to_a_terminal() -> None:
    hostile = 'kdist_loss{a="\x1b[31m"} 1\n# HELP kdist_loss \x1b]0;title\x07\n'
    assert list(parse(hostile)) == []
    assert list(merge({"p": hostile})) == []


def test_values_that_json_cannot_hold_become_words() -> None:
    assert to_document([Sample("a", {}, math.inf), Sample("b", {"x": "y"}, 1.5)]) == [
        {"name": "a", "labels": {}, "value": "inf"},
        {"name": "b", "labels": {"x": "y"}, "value": 1.5},
    ]


@given(st.text(max_size=400))
def test_no_text_makes_the_reader_raise(text: str) -> None:
    assert all(isinstance(sample.value, float) for sample in parse(text))
    assert isinstance(list(merge({"p": text})), list)
