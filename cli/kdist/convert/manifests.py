"""Reads what is to be converted, a file of manifests or a command line, and lists what became of
its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath

from kdist.convert.draft import JobDraft, complete
from kdist.convert.launch import LaunchReader
from kdist.convert.values import LEFT_OUT, NEEDLESS, InputValue, Outcomes, ValueOutcome
from kdist.convert.workloads import KINDS, convert_workload, job_name, kind_of, settle_rest
from kdist.errors import InvalidJobError, Problem, UsageError
from kdist.job_file import read_file
from kdist.job_file.yaml_parser import Mark, YamlNode, decode, read, split_lines
from kdist.terminal import visible


@dataclass(frozen=True)
class Conversion:
    """A job, and what became of the values of its workload: of each one, of what is left out, each
    part once, and of what means something else.
    """

    title: str
    draft: JobDraft
    values: list[tuple[InputValue, ValueOutcome]]
    left_out: list[tuple[Problem, ValueOutcome]]
    changes: list[Problem]

    def write(self) -> str:
        """The job.yaml, below comments with all that is left out or means something else."""
        lines = [f"Converted by kdist from {self.title}."]
        for title, found in (
            ("Left out:", [each for each, outcome in self.left_out if outcome.kind == LEFT_OUT]),
            ("Means something else:", self.changes),
            ("Not needed:", [each for each, outcome in self.left_out if outcome.kind == NEEDLESS]),
        ):
            lines += [title] if found else []
            for each in found:
                shown = f"line {each.line}: {each.sentence}" if each.line else each.message
                lines.append(f"- {shown}")
        return "".join(f"# {visible(each)}\n" for each in lines) + self.draft.write()


def _read_file(path: str) -> list[InputValue]:
    data, source, _ = read_file(path)
    text, problems = decode(data, source=source)
    trees, more = read(text, source=source) if not problems else ([], [])
    if problems := problems + more:
        raise InvalidJobError(source, problems)
    nodes, lines = [node for tree in trees for node in _list_objects(tree)], split_lines(text)
    return [InputValue(node, node.mark, Outcomes(lines=lines)) for node in nodes]


def convert_files(*paths: str) -> tuple[list[Conversion], list[str]]:
    """The jobs of the workloads of some files, and their other objects; the runtime of a TrainJob
    may be in another file. Raises `InvalidJobError` for what is not YAML, and `UsageError` if
    nothing can be converted.
    """
    roots = [root for path in paths for root in _read_file(path)]
    used = {each.get("spec.runtimeRef.name").text for each in roots}
    runtimes = {
        name: each
        for each in roots
        if (name := each.get("metadata.name").text) in used and "Runtime" in each.get("kind").text
    }
    others, conversions = [], []
    for root in roots:
        title = f"{root.get('kind').text} {root.get('metadata.name').text}".rstrip()
        runtime = runtimes.get(root.get("spec.runtimeRef.name").text)
        if kind_of(root) in KINDS:
            if runtime is not None and root.node is not None and runtime.node is not None:
                entries = {**root.node.entries, "runtime": (runtime.mark, runtime.node)}
                root = replace(root, node=replace(root.node, entries=entries))
            conversions.append(_convert(title, partial(convert_workload, root), root))
        elif root not in runtimes.values():
            others.append(title)
    if not conversions:
        found = ", ".join(sorted({each.get("kind").text or "no kind" for each in roots}))
        known = ", ".join(dict.fromkeys(kind for _, kind in KINDS))
        raise UsageError(
            f"`{', '.join(paths)}` has nothing to convert, found {found}",
            hint=f"kdist converts {known}",
        )
    return conversions, others


def _list_objects(tree: YamlNode) -> list[YamlNode]:
    """The objects of a List, or the only one."""
    kind, items = (tree.entries.get(each) for each in ("kind", "items"))
    if kind is None or items is None or not kind[1].text.endswith("List"):
        return [tree]
    return [each for each in items[1].items if each.kind == "mapping"]


def convert_command(words: Sequence[str]) -> Conversion:
    """The job of a command line such as `torchrun train.py`."""
    mark = Mark("the command line", 0, 0)
    nodes = [YamlNode("scalar", mark, each, each) for each in words]
    root = InputValue(YamlNode("list", mark, items=nodes), mark, Outcomes())

    def build() -> JobDraft:
        draft = JobDraft()
        LaunchReader(draft, {}, None, 1).read(root.below(), root, entrypoint=False)
        script = draft.get("script")
        name = PurePosixPath(script["path"]).stem if "path" in script else script["module"]
        draft.document["metadata"]["name"] = job_name(name.rpartition(".")[2])
        return draft

    return _convert("a command line", build, root)


def _convert(title: str, build: Callable[[], JobDraft], root: InputValue) -> Conversion:
    draft = complete(build, root)
    settle_rest(root)
    values = [(leaf, leaf.outcome) for leaf in root.leaves()]
    left: dict[int, tuple[Problem, ValueOutcome]] = {}
    for value, outcome in root.outcomes.found.values():
        if outcome.kind in (LEFT_OUT, NEEDLESS):  # once for all values that share it
            left.setdefault(id(outcome), (value.problem(outcome.text), outcome))
    return Conversion(
        title,
        draft,
        [(leaf, outcome) for leaf, outcome in values if outcome is not None],
        sorted(left.values(), key=lambda each: (each[0].line, each[0].column)),
        root.outcomes.changes,
    )
