"""`kdist validate`: many files, three formats, one exit code."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Kdist


def test_a_valid_file_gets_one_line(kdist: Kdist, job_file: Path) -> None:
    result = kdist("validate", job_file.name)
    assert result.exit_code == 0
    assert result.stdout == "job.yaml: valid, digits trains digits on 1 node, a rank per GPU\n"
    assert result.stderr == ""


def test_all_files_are_checked_and_one_wrong_one_decides(kdist: Kdist, job_file: Path) -> None:
    job_file.with_name("wrong.yaml").write_text(job_file.read_text().replace("epochs", "epoch"))
    result = kdist("validate", "wrong.yaml", "job.yaml")
    assert result.exit_code == 2
    assert result.stdout.startswith("job.yaml: valid")
    assert result.stderr == (
        "wrong.yaml:8:5: spec.train.epoch: unknown field; did you mean `epochs`?\n"
        "     8 |     epoch: 5\n"
        "       |     ^^^^^\n"
        "Error: `wrong.yaml` has 1 problem\n"
        "Next: kdist explain spec.train\n"
    )


def test_json_reports_of_every_file_and_problem(kdist: Kdist, job_file: Path) -> None:
    job_file.with_name("wrong.yaml").write_text(
        job_file.read_text() + "  terminationGracePeriodSeconds: 1:30\n"
    )
    result = kdist("validate", "job.yaml", "wrong.yaml", "-o", "json")
    assert (result.exit_code, result.stderr) == (2, "")
    assert json.loads(result.stdout) == {
        "apiVersion": "cli.kdist.dev/v1",
        "kind": "Validation",
        "files": [
            {
                "file": "job.yaml",
                "valid": True,
                "problems": [],
                "warnings": [],
                "nextCommand": "",
            },
            {
                "file": "wrong.yaml",
                "valid": False,
                "problems": [
                    {
                        "file": "wrong.yaml",
                        "line": 9,
                        "column": 34,
                        "path": "spec.terminationGracePeriodSeconds",
                        "message": "must be a whole number from 1 to 31536000, "
                        "found the text `1:30`",
                        "suggestion": "",
                        "hint": (
                            "`1:30` is text in YAML 1.2; YAML 1.1 reads it as 90 in base 60: "
                            "write 90"
                        ),
                    }
                ],
                "warnings": [],
                "nextCommand": "kdist explain spec.terminationGracePeriodSeconds",
            },
        ],
    }


def test_github_gets_annotations_that_cannot_be_forged(kdist: Kdist, job_file: Path) -> None:
    name = "a,b:c%.yaml"
    job_file.with_name(name).write_text(job_file.read_text() + '  image: "x\\n::error::100%"\n')
    result = kdist("validate", name, "-o", "github")
    assert result.exit_code == 2
    (line,) = result.stdout.splitlines()
    assert line == (
        "::error file=a%2Cb%3Ac%25.yaml,line=9,col=10::spec.image: must be an image "
        "reference such as "
        "`registry.example.com/team/trainer:1.0`, found the text `x\\n::error::100%25`"
    )


def test_an_option_is_laid_over_every_file(kdist: Kdist, job_file: Path) -> None:
    assert (
        "on 2 to 4 nodes"
        in kdist("validate", "job.yaml", "--set", "spec.nodes={min: 2, max: 4}").stdout
    )
    assert kdist("validate", "job.yaml", "--set", "spec.nodes=none").exit_code == 2


def test_a_file_that_is_not_there_gets_a_near_name(kdist: Kdist, job_file: Path) -> None:
    result = kdist("validate", "jobs.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "Error: there is no file `jobs.yaml`\nHint: did you mean `job.yaml`?\n"


def test_a_folder_is_no_file(kdist: Kdist, job_file: Path) -> None:
    result = kdist("validate", ".")
    assert result.exit_code == 2
    assert (
        result.stderr == "Error: `.` is a folder, not a file\nHint: name the file in it: job.yaml\n"
    )


def test_without_a_file_the_usage_is_reported(kdist: Kdist) -> None:
    result = kdist("validate")
    assert result.exit_code == 2
    assert result.stderr == "Error: Missing argument 'FILE...'\nNext: kdist validate --help\n"


def test_what_is_valid_and_may_surprise_is_a_warning(kdist: Kdist, job_file: Path) -> None:
    data = """
  data:
    - {url: "hf://datasets/owner/set", path: ./none, mountPath: /a}
    - {url: "hf://datasets/owner/set@v1", mountPath: /b}
"""
    job_file.write_text(job_file.read_text().rstrip() + data)
    result = kdist("validate", job_file.name)
    assert result.exit_code == 0
    moving, absent = result.stderr.splitlines()
    assert moving.startswith("Warning: job.yaml: spec.data[0].url names no revision")
    assert absent.startswith("Warning: job.yaml: spec.data[0].path: there is no ")
