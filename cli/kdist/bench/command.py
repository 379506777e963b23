"""`kdist bench`: measures collectives between ranks, on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, KdistError, UsageError
from kdist_trainer.formats import MAX_NODES
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.bench import Result
    from kdist.spec import TrainingJob


_COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "barrier",
]


def _size(value: str) -> int:
    from kdist.bench import read_size

    try:
        return read_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _number(
    flag: str, kind: click.ParamType[Any], default: float, text: str
) -> Callable[[options.Command], options.Command]:
    return click.option(flag, type=kind, default=default, show_default=True, help=text)


@click.command()
@click.argument("collective", type=click.Choice(_COLLECTIVES), metavar="COLLECTIVE")
@click.option(
    "-b",
    "--min",
    "least",
    type=_size,
    metavar="SIZE",
    default="1KiB",
    show_default=True,
    help="Smallest size; K, M, G are powers of 1024.",
)
@click.option(
    "-e",
    "--max",
    "most",
    type=_size,
    metavar="SIZE",
    default="64MiB",
    show_default=True,
    help="Largest size.",
)
@_number("--factor", click.IntRange(2, 1024), 4, "Factor from one size to the next.")
@_number("--rounds", click.IntRange(3, 100_000), 20, "Rounds of each size.")
@_number(
    "--warmup",
    click.IntRange(1, 10_000),
    5,
    "Warm-up rounds of each size, which are not measured.",
)
@_number("--seconds", click.FloatRange(0.01, 3600), 5.0, "Time limit of each size, in seconds.")
@_number(
    "--slow",
    click.FloatRange(1.01),
    2.0,
    "A pair is slow if it takes this many times the median of the others.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, MAX_NODES),
    metavar="N",
    help="Number of nodes (default: the job's, else 1).",
)
@click.option(
    "--procs-per-node",
    "--procs",
    metavar="N|auto",
    help="Ranks on each node (default: the job's, else 2).",
)
@options.filename_option("Measure on the nodes that this job requests.")
@click.option(
    "--cluster", "on_cluster", is_flag=True, help="Run on the cluster; -n and --context imply it."
)
@click.option("--image", metavar="IMAGE", help="Image of the trainer, if there is no job file.")
@click.option("--keep", is_flag=True, help="Keep the benchmark's job on the cluster.")
@options.out_option("Write the result to this file instead of stdout.")
@options.cluster_options
@options.output_option("table", "json")
def command(
    collective: str,
    *,
    output: str,
    out: Path | None,
    file: str | None,
    on_cluster: bool,
    image: str | None,
    **given: Any,
) -> int:
    r"""Measure collectives between ranks, locally or on a cluster.

    Reports bandwidth and latency, checks every result, and names a slow rank or pair of ranks. The
    benchmark is a job of its own, with the same agent and rendezvous as a training job; on a
    cluster it is applied, waited for and deleted. Bandwidths are defined as in nccl-tests: algbw is
    size / time; busbw, which is comparable across numbers of ranks, is algbw times 2(n-1)/n for
    all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all, and 1 for the others.
    Percentiles are those of single rounds; a round takes as long as its slowest rank.

    \b
    Collectives:
      all_reduce all_gather reduce_scatter broadcast all_to_all barrier

    \b
    Examples:
      kdist bench all_reduce
      kdist bench all_reduce --min 1KiB --max 64MiB --factor 4 --nodes 2 --procs 2
      kdist bench all_gather -f job.yaml -n ml           (on the nodes that the job would get)
      kdist bench all_to_all -o json --out bench.json

    \b
    Exit codes:
      0 measured   2 wrong usage   6 timeout   10 a result was wrong, or the job failed
    """
    from kdist import bench
    from kdist.job_file import load_file

    numbers = {name: given.pop(name) for name in ("factor", "rounds", "warmup", "seconds", "slow")}
    spec = bench.BenchSpec(
        collective=collective, min=given.pop("least"), max=given.pop("most"), **numbers
    )
    place = options.find_place(click.get_current_context(), given["namespace"], given["context"])
    remote = on_cluster or place.is_chosen
    nodes, procs, keep = (given.pop(name) for name in ("nodes", "procs_per_node", "keep"))
    changes = [f"spec.image={image}"] if image is not None else []
    if nodes is not None:
        changes.append(f"spec.nodes={encode_json({'min': nodes, 'max': nodes})}")
    changes += [f"spec.procsPerNode={procs}"] if procs is not None else []
    machines = load_file(file) if file is not None else None
    job = bench.make_job(spec, machines, overrides=changes)
    base = Path.cwd() if file in (None, "-") else Path(str(file)).absolute().parent
    if remote:
        from kdist.bench.remote import measure

        cluster = targets.connect(
            namespace=given["namespace"], context=given["context"], job=job.metadata.namespace
        )
        timeout, notify = given["timeout"], console.message
        result = measure(cluster, job, base=base, keep=keep, timeout=timeout, notify=notify)
    else:
        result = _measure_locally(job, base)
    _show(result, output=output, out=out)
    if result.wrong:
        raise KdistError(
            f"{result.wrong} elements of the results of {collective} are wrong",
            code=Code.JOB_FAILED,
        )
    return Code.OK


def _measure_locally(job: TrainingJob, base: Path) -> Result:
    """Run the bench as processes on this machine. Its folder is deleted unless something failed."""
    import shutil

    from kdist import bench, render
    from kdist.commands.run import Lines
    from kdist.job import local

    local.check_torch()

    train_json = render.read_train_json(render.render(job))
    with console.nonblocking_messages():
        ended = local.run_job(
            job, train_json, base=base, fresh=True, display=Lines(), lines_only=True
        )
    folder = Path(str(ended.report["folder"]))
    logs = [log.read_text(errors="replace") for log in sorted(folder.glob("node-*/log"))]
    result = bench.read_events(line for text in logs for line in text.split("\n"))
    if ended.stopped_by is not None:
        raise KdistError("the benchmark was stopped", code=Code.INTERRUPTED)
    if not result.done:
        failure = ended.report["failure"] or {}
        raise KdistError(
            f"the benchmark failed: {failure.get('message') or 'see its log'}",
            hint=f"its logs are in {folder}",
            code=Code.JOB_FAILED,
        )
    if not result.wrong:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _show(result: Result, *, output: str, out: Path | None) -> None:
    if output == "table" and out is None:
        from kdist.bench.result import COLUMNS

        console.table(result.table(), header=COLUMNS)
        console.message(result.headline())
        if result.describe_pairs():
            console.message(result.describe_pairs())
        return
    if output != "json":
        raise UsageError("--out takes -o json")
    if out is None:
        console.emit(result.to_document(), output=output)
    else:
        out.write_text(encode_json(result.to_document(), indent=2) + "\n", encoding="utf-8")
        console.list_files(out, output=output)
