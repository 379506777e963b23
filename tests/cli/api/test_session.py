"""The sessions of docs/how-to/python.md, real runs that Python starts, and what may go wrong."""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

import kdist
from kdist.errors import Code, InvalidJobError, NotFoundError, UsageError
from tests.cli.api.conftest import Cells
from tests.docs.blocks import DOCS, blocks

SESSION, TYPED = (
    block.text
    for block in blocks((DOCS / "how-to" / "python.md").read_text())
    if block.language == "python"
)
SCRIPT = """\
import os, time
from pathlib import Path
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
while not Path("go").exists():
    time.sleep(0.05)
"""


def write_job(home: Path, **spec: object) -> Path:
    document = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "digits"},
        "spec": {"procsPerNode": 1, **spec},
    }
    (home / "job.yaml").write_text(yaml.safe_dump(document))
    return home / "job.yaml"


def python(program: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", program],
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.processes
def test_the_session_of_the_page_trains_in_at_most_twelve_lines(home: Path) -> None:
    assert len(SESSION.strip().splitlines()) <= 12
    write_job(home, train={"workload": "digits", "steps": 30, "globalBatch": 64})
    done = python(SESSION, home)
    assert done.returncode == 0, done.stderr
    first, *lines, last = done.stdout.splitlines()
    assert re.fullmatch(r"\d+ .+", first)
    assert lines
    assert all("node-1" in line for line in lines)
    loss, goodput, weights = last.split()
    assert 0 < float(loss) < 3
    assert 0 < float(goodput) <= 1
    assert int(weights) > 1000
    assert done.stderr == ""


@pytest.mark.sampled
def test_a_job_from_typed_fields_is_a_job(home: Path) -> None:
    done = python(TYPED, home)
    assert (done.stdout, done.stderr) == ("ServiceAccount\n", "")


def test_every_name_is_found_and_in_the_listing() -> None:
    names = {name for each in kdist._MODULES.values() for name in each.split()}
    assert all(getattr(kdist, name) is not None for name in names)
    assert names <= set(dir(kdist))
    assert not hasattr(kdist, "nothing")


def test_the_function_stays_the_function_when_modules_are_imported(home: Path) -> None:
    file = write_job(home, train={"workload": "digits", "steps": 30})
    program = (
        "import kdist\n"
        "from kdist.job_file import load_file\n"
        "import kdist.api.definition\n"
        f"print(kdist.load({str(file)!r}).job == load_file({str(file)!r}), type(kdist.load))"
    )
    assert python(program, home).stdout == "True <class 'function'>\n"


@pytest.mark.sampled
@pytest.mark.processes
def test_a_run_is_started_from_threads_and_its_handle_does_what_commands_do(
    home: Path, cell: Cells, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "kdist")
    (home / "train.py").write_text(SCRIPT)
    runs: dict[str, kdist.JobHandle] = {}

    def begin(name: str) -> None:
        runs[name] = kdist.load(file, f"metadata.name={name}").run()

    file = write_job(home, script={"path": "train.py"}, nodes=2)
    threads = [threading.Thread(target=begin, args=(name,)) for name in ("one", "two")]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    one, two = runs["one"], kdist.get("two", local=True)
    for run in (one, two):
        running = run.wait("running", timeout=180)
        assert running is not None
        assert running.phase == "Running"
        followed = run.logs(rank=1, follow=True, timeout=180)
        assert any(line.endswith("rank 1 of 2") for line in followed)
    assert {each.name for each in kdist.list_jobs()} == {"one", "two"}
    with pytest.raises(kdist.KdistError, match="another kdist run") as caught:
        kdist.load("job.yaml", "metadata.name=one").run()
    assert "stop it first" in caught.value.hint
    assert "Hint: stop it first" in "".join(caught.value.__notes__)
    with pytest.raises(kdist.KdistError) as late:
        one.wait("done", timeout=0.1)
    assert late.value.code == Code.TIMEOUT
    with pytest.raises(kdist.KdistError, match="for jobs on a cluster"):
        one.scale(3)
    one.suspend()
    assert one.status().phase == "Stopped" or one.status().phase == "Suspended"
    one.delete(purge=True)
    with pytest.raises(NotFoundError):
        kdist.get("one")
    (home / "go").touch()
    done = two.wait(timeout=180)
    assert done is not None
    assert done.phase == "Succeeded"
    assert list(two.logs(follow=True, tail=1))
    assert two.events()
    assert two.metrics() == []
    assert two.why().severity == "fine"
    two.delete(purge=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.sampled
@pytest.mark.processes
def test_a_function_of_a_notebook_runs_on_all_ranks_in_its_folder(home: Path, cell: Cells) -> None:
    names = cell(
        "import os\nfrom pathlib import Path\ndef train(word):\n"
        "    rank = os.environ['RANK']\n    Path(f'{word}-{rank}').write_text(os.getcwd())\n"
    )
    run = kdist.train(names["train"], nodes=2, procs_per_node=2, args={"word": "rank"})
    run.wait(timeout=180)
    assert {path.name for path in home.glob("rank-*")} == {f"rank-{rank}" for rank in range(4)}
    assert (home / "rank-0").read_text() == str(home)


CHECKPOINTED = """
import torch
from kdist_trainer import Checkpointer
def ck(steps, bug):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model=model, optimizer=optimizer, every_steps=2) as saves:
        first = saves.resume()
        print("resumed after", first)
        for step in range(first + 1, steps + 1):
            saves.maybe_save(step)
            if step == 7 and bug:
                raise ValueError("a bug")
        saves.finish(steps)
"""


@pytest.mark.sampled
@pytest.mark.processes
def test_a_function_that_was_mended_continues_from_its_checkpoints(home: Path, cell: Cells) -> None:
    names = cell(CHECKPOINTED)
    with pytest.raises(kdist.KdistError, match="a bug"):
        kdist.train(names["ck"], args={"steps": 9, "bug": True}).wait(timeout=180)
    run = kdist.train(names["ck"], args={"steps": 9, "bug": False}, fresh=False)
    run.wait(timeout=180)
    resumed = [line.split()[-1] for line in run.logs() if "resumed after" in line]
    assert resumed[0] == "0"
    assert int(resumed[-1]) >= 2
    mended = cell(CHECKPOINTED.replace("a bug", "another"))
    with pytest.raises(kdist.KdistError, match="were edited since") as caught:
        kdist.train(mended["ck"], args={"steps": 9, "bug": False}, fresh=False)
    assert "fresh=True archives" in caught.value.hint


@pytest.mark.sampled
@pytest.mark.processes
def test_a_handle_stays_with_its_run_when_another_one_takes_the_name(home: Path) -> None:
    file = write_job(home, train={"workload": "digits", "globalBatch": 64, "steps": 3})
    first = kdist.load(file).run(fresh=True)
    first.wait(timeout=180)
    saved = first.checkpoints()[-1]
    weights = saved.state_dict()
    second = kdist.load(file, "spec.train.steps=5", "spec.train.seed=7").run(fresh=True)
    second.wait(timeout=180)
    assert second.checkpoints()[-1].step == 5
    (archive,) = {each.name for each in kdist.list_jobs()} - {"digits"}
    for old in (first, kdist.get(archive)):
        assert old.status().name == archive
        assert old.wait().name == archive
        assert old.report()["steps"]["reached"] == len(old.metrics()) == 3
        assert old.checkpoints()[-1].step == 3
        assert old.why().severity == "fine"
        with pytest.raises(kdist.KdistError, match=f"{archive} is archived") as caught:
            old.resume()
        assert str(home / ".kdist" / archive) in caught.value.hint
    again = saved.state_dict()
    assert all((again[name] == weights[name]).all() for name in weights)
    assert not all(
        (second.checkpoints()[-1].state_dict()[name] == weights[name]).all() for name in weights
    )
    first.delete(purge=True)
    assert {each.name for each in kdist.list_jobs()} == {"digits"}
    with pytest.raises(NotFoundError, match="a later one has its name"):
        first.status()
    assert first.wait("deleted") is None
    second.delete()
    third = kdist.load(file).run(fresh=True)
    third.wait(timeout=180)
    assert third.report()["steps"]["reached"] == len(third.metrics()) == 3


def test_problems_of_a_job_are_listed_with_their_places(home: Path) -> None:
    file = write_job(home, train={"workload": "digits", "steps": "many"}, nodes=0)
    with pytest.raises(InvalidJobError) as caught:
        kdist.load(file)
    assert {each.path for each in caught.value.problems} == {"spec.nodes", "spec.train.steps"}
    with pytest.raises(UsageError, match="there is no file") as missing:
        kdist.load(home / "jop.yaml")
    assert "job.yaml" in missing.value.hint


@pytest.mark.processes
def test_a_run_that_cannot_start_raises_the_error_of_its_process(home: Path) -> None:
    secret = {"name": "TOKEN", "secret": {"name": "hub", "key": "token"}}
    file = write_job(home, train={"workload": "digits", "steps": 9}, env=[secret])
    with pytest.raises(kdist.KdistError, match="TOKEN is a secret") as caught:
        kdist.load(file).run()
    assert caught.value.code == Code.USAGE


def test_warnings_and_objects_of_a_job_need_no_cluster(home: Path) -> None:
    file = write_job(
        home, train={"workload": "digits", "steps": 9}, env=[{"name": "API_KEY", "value": "x"}]
    )
    job = kdist.load(file).set("spec.nodes=3", "spec.image=r/i:1")
    assert job.job.spec.nodes.max == 3
    assert any("API_KEY" in warning for warning in job.validate())
    assert "Job" in [each["kind"] for each in job.render()]


def test_a_goal_that_there_is_none_of_is_refused(home: Path) -> None:
    from kdist.job.local.job import LocalJob

    handle = kdist.JobHandle(LocalJob(home))
    with pytest.raises(UsageError) as caught:
        handle.wait("finished")  # type: ignore[call-overload]
    assert "first-step" in caught.value.hint


def test_the_card_of_a_job_escapes_what_others_have_written(home: Path) -> None:
    from kdist.job.local.job import LocalJob

    root = home / ".kdist" / "<b>x"
    root.mkdir(parents=True)
    (root / "run.json").write_text('{"run_id": "<script>", "invocations": []}')
    card = kdist.JobHandle(LocalJob(root))._repr_html_()
    assert "<caption>&lt;b&gt;x</caption>" in card
    assert "<script>" not in card
    assert "<b>" not in card


def test_blocks_of_the_page_import_nothing_but_kdist() -> None:
    for text in (SESSION, TYPED):
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)]
        assert [each.names[0].name for each in imports] == ["kdist"]
