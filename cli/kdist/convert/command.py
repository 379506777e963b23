"""`kdist convert`: a job.yaml from another workload or a launch command."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options
from kdist.errors import Code

if TYPE_CHECKING:
    from kdist.convert.manifests import Conversion


@click.command
@click.argument("inputs", nargs=-1, required=True, metavar="FILE... | -- COMMAND...")
@options.output_option("yaml", "json")
def command(inputs: tuple[str, ...], *, output: str) -> int:
    r"""Convert a PyTorchJob or a launch command to a job.yaml.

    FILEs have manifests: PyTorchJob, TrainJob with its runtime, Job, JobSet, StatefulSet, Volcano's
    Job; `-` is stdin. COMMAND is a command line of torchrun, accelerate launch or Python. The
    job.yaml goes to stdout. What is left out and what means something else goes to stderr with its
    position, and is in the comments of the job.yaml.

    \b
    Examples:
      kdist convert pytorchjob.yaml > job.yaml
      kdist convert -- torchrun --nnodes 2 --nproc-per-node 8 train.py --lr 0.1
      kdist convert trainjob.yaml -o json | jq '.jobs[].values[] | select(.outcome == "leftOut")'
      kdist init --from pytorchjob.yaml                         write job.yaml

    \b
    Exit codes:
      0 all jobs can run   1 a job must be completed by hand   2 invalid file, or no workload
    """
    conversions, others = _convert(inputs)
    if output == "yaml":
        console.document(_text(conversions).rstrip("\n"))
        return _describe(conversions, others)
    jobs = [
        {
            "from": each.title,
            "complete": each.draft.is_complete,
            "text": each.write(),
            "values": [
                {**_place(value.problem(outcome.text)), "outcome": outcome.kind}
                for value, outcome in each.values
            ],
            "changes": [_place(problem) for problem in each.changes],
        }
        for each in conversions
    ]
    console.emit({"jobs": jobs, "others": others}, kind="Conversion", output="json")
    return _code(conversions)


def _convert(words: tuple[str, ...]) -> tuple[list[Conversion], list[str]]:
    from kdist.convert import manifests

    is_file = [each == "-" or each.endswith((".yaml", ".yml", ".json")) for each in words]
    if all(is_file) or (len(words) == 1 and not words[0].endswith(".py")):
        return manifests.convert_files(*words)
    return [manifests.convert_command(words)], []


def convert(source: str) -> tuple[str, int]:
    """The jobs of a file as a text, and the exit code; prints what is left out."""
    conversions, others = _convert((source,))
    return _text(conversions), _describe(conversions, others)


def _describe(conversions: list[Conversion], others: list[str]) -> int:
    """Print what is left out and what means something else, and return the exit code."""
    for each in conversions:
        for problem, outcome in each.left_out:
            if outcome.kind == "leftOut":
                console.message(f"{problem.where}: left out: {problem.sentence}")
        for problem in each.changes:
            console.message(f"{problem.where}: means something else: {problem.sentence}")
        count = Counter(outcome.kind for _, outcome in each.values)
        console.message(
            f"Converted {each.title}: {count['kept']} values have fields, {count['podTemplate']} "
            f"are in podTemplate, {count['leftOut']} left out, {count['needless']} not needed."
        )
    for title in others:
        console.message(f"{title} is no workload")
    return _code(conversions)


def _code(conversions: list[Conversion]) -> int:
    return Code.OK if all(each.draft.is_complete for each in conversions) else Code.ERROR


def _text(conversions: list[Conversion]) -> str:
    return "---\n".join(each.write() for each in conversions)


def _place(problem: Any) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in ("path", "line", "column", "message")}
