"""`kdist bench` from outside: sizes, the job that it is, what it prints, and a bench on this
machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdist.bench import BenchSpec, make_job, read_events, read_size
from kdist.bench.result import COLUMNS, Result, duration
from kdist.errors import UsageError
from kdist.job_file import load_text
from tests.cli.conftest import Kdist
from tests.cli.running import PATIENCE

SIZES = {"min": 1024, "max": 4096, "factor": 4}
SPEC = BenchSpec(collective="all_reduce", **SIZES, rounds=20, warmup=5, seconds=5.0, slow=2.0)
SIZED = [("8", 8), ("1K", 1024), ("1KiB", 1024), ("2kb", 2048), ("64MiB", 64 << 20)]


@pytest.mark.parametrize(("text", "nbytes"), [*SIZED, ("1Gi", 1 << 30), ("128M", 128 << 20)])
def test_sizes_are_read_as_nccl_tests_and_people_write_them(text: str, nbytes: int) -> None:
    assert read_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5M", "MiB", "1TB", "1K1"])
def test_a_text_that_is_not_a_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        read_size(text)


def test_a_bench_of_a_job_takes_its_machines_and_nothing_of_its_training() -> None:
    text = json.dumps(
        {
            "apiVersion": "kdist.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "a" * 46, "namespace": "ml"},
            "spec": {
                "image": "registry/trainer:1",
                "nodes": {"min": 1, "max": 4},
                "replicas": 2,
                "suspend": True,
                "restartedAt": "2026-05-01T12:00:00Z",
                "procsPerNode": 2,
                "resources": {"gpu": 2},
                "nodeSelector": {"zone": "a"},
                "checkpoints": {"claim": "ckpt"},
                "data": [{"claim": "imagenet", "mountPath": "/data"}],
                "code": "./src",
                "train": {"workload": "digits", "epochs": 1, "globalBatch": 64},
            },
        }
    )
    job = make_job(SPEC, load_text(text, source="job.yaml"), overrides=["spec.nodes=3"])
    assert (job.metadata.namespace, job.spec.nodes.max, job.spec.procs_per_node) == ("ml", 3, 2)
    assert (job.spec.replicas, job.spec.suspend, job.spec.restarted_at) == (None, False, None)
    assert job.spec.resources.gpu == 2
    assert job.spec.node_selector == {"zone": "a"}
    assert job.spec.image == "registry/trainer:1"
    assert job.spec.train is None
    assert job.spec.checkpoints is None
    assert job.spec.data == []
    assert job.spec.code is None
    assert job.spec.script is not None
    assert job.spec.script.command[:3] == ("-m", "kdist_trainer.bench", "all_reduce")
    assert job.metadata.name.endswith("-bench-all-reduce")
    assert make_job(SPEC).metadata.name == "bench-all-reduce"


def test_a_smallest_size_above_the_largest_is_rejected() -> None:
    with pytest.raises(UsageError, match="larger than the largest"):
        make_job(BenchSpec(**{**vars(SPEC), "min": 8192}))


def event(name: str, **fields: object) -> str:
    return json.dumps({"time": "2026-01-31T12:00:00Z", "event": name, **fields})


def measured(rank: int) -> dict[str, object]:
    """What a rank logs of its pairs."""
    seconds = [None if other == rank else 1e-3 for other in range(3)]
    return {"row_node": f"node-{rank}", "size": 1 << 20, "seconds": seconds}


def logged(slow: bool) -> Result:
    pair = {"nodes": ["node-0", "<b>node-2"], "seconds": 9e-3, "ratio": 9.0}
    row = {"rounds": 20, "mean": 2e-4, "p50": 1.5e-4, "p90": 3e-4, "p99": 1.25e-3}
    lines = [
        "some rank prints <script>",
        event("bench-begun", collective="all_reduce", ranks=3, device="cpu", backend="gloo"),
        f"a print {event('bench-row', size=512, algbw=5.12e6, busbw=6.83e6, wrong=0, **row)}",
        event("bench-row", size=1024, algbw=5.12e6, busbw=6.83e6, wrong=0, **row),
        event("bench-row", size=4096, algbw=2.05e7, busbw=2.73e7, wrong=2, **row),
        event("bench-row", size="many"),
        '{"time": "broken", "event": "bench-row"',
        *(event("bench-pairs", row=rank, **measured(rank)) for rank in range(3)),
        *([event("bench-slow", ranks=[0, 2], **pair)] if slow else []),
        event("bench-done", wrong=2),
    ]
    return read_events(lines)


def test_what_ranks_have_logged_becomes_a_table_with_the_slow_pair_named() -> None:
    result = logged(slow=True)
    assert result.done
    assert result.wrong == 2
    assert [len(cells) for cells in result.table()] == [len(COLUMNS)] * 2
    assert next(result.table()) == (
        "1.0 KiB",
        "20",
        "200 µs",
        "150 µs",
        "300 µs",
        "1.25 ms",
        "5.12 MB/s",
        "6.83 MB/s",
        "0",
    )
    expected = "all_reduce among 3 ranks on 3 nodes (cpu, gloo): bus bandwidth up to 27.3 MB/s"
    assert result.headline() == expected
    assert "the pair rank 0 (node-0) and rank 2" in result.describe_pairs()
    assert "9.0 times the median of the others" in result.describe_pairs()
    assert "no pair of ranks is slower" in logged(slow=False).describe_pairs()
    document = json.loads(json.dumps(result.to_document()))
    assert document["pairs"]["seconds"][0] == [None, 1e-3, 1e-3]
    assert document["slow"]["ranks"] == [0, 2]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.14e-5, "81.4 µs"), (9.999e-4, "1 ms"), (1.25e-3, "1.25 ms"), (2.071, "2.07 s")],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_wrong_usage_is_rejected_before_anything_starts(kdist: Kdist) -> None:
    for words, message in (
        (["all_reduce", "-b", "12X"], "is not a size"),
        (["everything"], "all_reduce"),
        (["all_reduce", "-b", "1M", "-e", "1K"], "larger than the largest"),
        (["all_reduce", "--procs", "many"], "procsPerNode"),
        (["all_reduce", "-f", "nowhere.yaml"], "nowhere.yaml"),
    ):
        refused = kdist("bench", *words)
        assert refused.exit_code == 2, refused.stderr
        assert message in refused.stderr


@pytest.mark.sampled
@pytest.mark.processes
def test_a_bench_on_this_machine_checks_every_result_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    words = ["bench", "all_reduce", "--nodes", "2", "--procs", "1", "-b", "1K", "-e", "64K"]
    words += ["--rounds", "5", "-o", "json"]
    finished = subprocess.run(
        [sys.executable, "-m", "kdist", *words],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "KDIST_HOME": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert result["collective"] == "all_reduce"
    assert result["ranks"] == 2
    assert result["nodes"] == ["node-0", "node-1"]
    assert [row["sizeBytes"] for row in result["rows"]] == [1024, 4096, 16384, 65536]
    for row in result["rows"]:
        assert row["wrong"] == 0
        assert row["rounds"] == 5
        assert (
            row["busbwBytesPerSecond"]
            == row["algbwBytesPerSecond"]
            == pytest.approx(row["sizeBytes"] / row["seconds"]["mean"])
        )
    assert "64 KiB: bus bandwidth" in finished.stderr
    assert not list((tmp_path / "runs").iterdir())
