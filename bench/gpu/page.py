"""The page of all figures, as Markdown."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.parts import Part
from bench.gpu.records import Record

AIM = 3.0
"""How many times faster than in fp32 a training in bf16 should be."""
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*", re.MULTILINE)

Figures = dict[str, Any]


def write(
    path: Path,
    parts: Sequence[Part],
    done: Mapping[str, Record],
    machine: Mapping[str, str],
    command: str,
) -> None:
    """Replace the page at `path` by that of these results."""
    draft = path.with_suffix(".tmp")
    draft.write_text(draw(parts, done, machine, command))
    draft.replace(path)


def draw(
    parts: Sequence[Part], done: Mapping[str, Record], machine: Mapping[str, str], command: str
) -> str:
    """The page.

    Args:
        parts: All parts, in the order of the page.
        done: The newest record of each part that was tried, by its name.
        machine: Facts about the machine, by name.
        command: The command that measured.
    """
    figures: dict[str, list[tuple[Part, Figures]]] = {}
    for part in parts:
        if "figures" in done.get(part.name, {}):
            figures.setdefault(part.module, []).append((part, done[part.name]["figures"]))
    sections = [
        ("Precision", draw_precision, "precision"),
        ("Device timers next to the profiler", draw_timers, "timers"),
        ("Cost of measuring", draw_measuring, "measuring"),
        ("GPU panels", draw_panels, "panels"),
        ("Recovery by restart", draw_restart, "restart"),
    ]
    blocks = [f"# kdist on {machine['device']}", f"`{command}`", draw_machine(machine)]
    for heading, draw_section, module in sections:
        if module in figures:
            blocks += [f"## {heading}", *draw_section([each for _, each in figures[module]])]
    blocks += ["## Parts", draw_parts(parts, done)]
    return "\n\n".join(blocks) + "\n"


def draw_machine(machine: Mapping[str, str]) -> str:
    """What it was measured on."""
    return table(("", ""), machine.items())


def draw_precision(found: Sequence[Figures]) -> Iterator[str]:
    """Throughput, memory and utilization, and whether bf16 reached its aim."""
    rates = {each["precision"]: each["tokens_per_second"] for each in found}
    base = rates.get("fp32")
    yield describe_shape(found[0]) + f" Median of {found[0]['blocks']} blocks (least … most)."
    yield table(
        ("precision", "tokens/s", "to fp32", "a step", "peak memory", "TFLOP/s", "MFU"),
        (
            (
                each["precision"],
                f"{each['tokens_per_second']:,.0f} ({each['low']:,.0f} … {each['high']:,.0f})",
                f"{each['tokens_per_second'] / base:.2f}x" if base else "unknown",
                f"{each['step_seconds'] * 1e3:.1f} ms",
                f"{each['memory_mib']:,.0f} MiB",
                f"{each['flops_per_second'] / 1e12:.3g}",
                "unknown" if each["mfu"] is None else f"{each['mfu']:.1%}",
            )
            for each in found
        ),
    )
    if base and "bf16" in rates and found[0]["device"] == "cuda":
        ratio = rates["bf16"] / base
        reached = "reached" if ratio > AIM else "missed"
        yield f"From fp32 to bf16: {ratio:.2f}x; the aim of more than {AIM:g}x is {reached}."
    settings = ", ".join(f"{each['precision']} {each['matmul']}" for each in found)
    needed, counted = found[0]["flops_per_token"], found[0]["counted_flops_per_token"]
    yield (
        "MFU is tokens/s times 6N + 12LHQT FLOPs a token "
        "([PaLM, appendix B](https://arxiv.org/abs/2204.02311); N without the embeddings' tables), "
        "over the data sheet's dense peak of the device in that precision; unknown where kdist "
        "knows no peak (fp32 without tensor cores, other devices). "
        f"{needed:.4g} FLOPs a token; torch's counter, which the dashboard uses, has {counted:.4g}."
        f" torch's setting for fp32 products (highest is fp32, high is tf32): {settings}."
    )


def draw_timers(found: Sequence[Figures]) -> Iterator[str]:
    """The timer and the profiler side by side."""
    yield describe_shape(found[0]) + f" {found[0]['steps']} steps under both."
    yield table(
        ("all-reduces", "timed", "timer, a step", "profiled", "profiler, a step", "timer/profiler"),
        (
            (
                row["what"],
                str(row["timed"]),
                f"{row['timer_seconds'] / found[0]['steps'] * 1e6:,.1f} us",
                ", ".join([str(row["profiled"]), *row["names"]]),
                f"{row['profiler_seconds'] / found[0]['steps'] * 1e6:,.1f} us",
                f"{row['timer_seconds'] / row['profiler_seconds']:.2f}"
                if row["profiler_seconds"]
                else "no kernels to compare with",
            )
            for row in found[0]["rows"]
        ),
    )
    yield (
        "The timer's span begins where the all-reduce is launched and ends after it, so it holds "
        "the kernel and the streams' waits for each other. A group of one needs no kernel for a "
        "sum in place."
    )


def draw_measuring(found: Sequence[Figures]) -> Iterator[str]:
    """What each kind of measuring adds to a step."""
    for each in found:
        nothing = each["kinds"][0]["step_seconds"]
        yield describe_shape(each) + f" {each['groups']} blocks of each kind, in drawn order."
        yield table(
            ("measured", "a step", "more than nothing"),
            (
                (
                    row["kind"],
                    f"{row['step_seconds'] * 1e3:.3f} ms",
                    f"{row['more_seconds'] * 1e6:+.1f} ± {row['error_seconds'] * 1e6:.1f} us "
                    f"({row['more_seconds'] / nothing:+.2%})"
                    if index
                    else "",
                )
                for index, row in enumerate(each["kinds"])
            ),
        )


def draw_panels(found: Sequence[Figures]) -> Iterator[str]:
    """The state of every series."""
    rows = found[0]["rows"]
    fed = sum(row["state"] == "fed" for row in rows)
    yield (
        f"{fed} of {len(rows)} series were fed. {describe_shape(found[0])} Two scrapes, at least "
        f"{found[0]['seconds_apart']:g} s apart."
    )
    yield table(
        ("panel", "series", "state", "value", "increase"),
        (
            (
                row["panel"],
                f"`{row['series']}`",
                row["state"],
                "" if row["value"] is None else f"{row['value']:.6g}",
                f"{row['increase']:.6g}" if row["increase"] else "",
            )
            for row in rows
        ),
    )


def draw_restart(found: Sequence[Figures]) -> Iterator[str]:
    """Seconds from the kill to the next finished step."""
    seconds = found[0]["seconds"]
    steps = ", ".join(map(str, found[0]["resumed_at"]))
    yield (
        f"kill -9 of the only rank to its next finished step, {len(seconds)} times: median "
        f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} … {max(seconds):.2f}): "
        + ", ".join(f"{each:.2f} s" for each in seconds)
        + f". {describe_shape(found[0])} A checkpoint every {found[0]['every']} steps; the first "
        f"steps after the kills were {steps}."
    )


def draw_parts(parts: Sequence[Part], done: Mapping[str, Record]) -> str:
    """How each part ended."""
    rows = []
    for part in parts:
        record = done.get(part.name)
        if record is None:
            rows.append((part.name, "not run: the same command runs it", "", ""))
        else:
            failed = f"failed: {last_error(record['error'])}" if "error" in record else "done"
            rows.append((part.name, failed, f"{record['seconds']:.0f} s", record["commit"]))
    return table(("part", "outcome", "time", "commit"), rows)


def last_error(text: str) -> str:
    """The last line of an error that names one, else its last line."""
    named = _ERROR.findall(text)
    lines = named or text.strip().splitlines() or ["no message"]
    return str(lines[-1])[:300]


def describe_shape(figures: Figures) -> str:
    """Model and batch, as a sentence."""
    options, batch = figures["shape"]["options"], figures["shape"]["batch"]
    return (
        f"`gpt` of {options['layers']} layers, width {options['width']}, block "
        f"{options['block']}, {batch} samples a step."
    )


def table(head: Sequence[str], rows: Iterator[Sequence[str]] | Any) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
