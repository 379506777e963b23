"""The command that starts the ranks: torchrun, accelerate, Python alone, or a shell's text with one
of them, as fields of the job.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from kdist.convert.draft import TRAINER, JobDraft
from kdist.convert.values import LEFT_OUT, NEEDLESS, InputValue, ValueOutcome, settle
from kdist.job_file.yaml_parser import Mark, YamlNode, shown
from kdist_trainer.formats.userinfo import hide_userinfo

_SHELL = re.compile("(a|ba|da|z)?sh")
_REDIRECTION = re.compile(r"&?[<>].*|\|")
_PYTHON = re.compile(r"python[0-9.]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_UNREAD = re.compile(r"\\\n|(?m:^\s*#.*$)")  # continued lines, comments
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")
_VARIABLE = re.compile(r"\$\((\w+)\)|\$\{(\w+)\}|\$(\w+)")
_HIDDEN = re.compile("([\ue000-\uf8fe])\uf8ff*")  # private characters, which no command has
_CREDENTIAL = re.compile(
    "(?is)(?:key|token|secret|pass(?:word|wd|phrase)?|pwd|credentials?|auth(?:orization)?)"
    r"[\"']?(?:\s*[=:]\s*(.+)|$)"
)
_TOKEN = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|sk-|AKIA|ASIA|AIza|eyJ)[\w.-]{12,}"
    r"|(?<=Bearer )\S+|(?<= -u )\S+:\S+|(?<= --user )\S+:\S+"  # of curl
)
_MOST_HIDDEN: Final = 6000
_OPERATORS: Final = ";&|<>()\n"
_NODES = re.compile("([1-9][0-9]*)(?::([1-9][0-9]*))?")
_LAUNCHERS: Final = ("torchrun", "accelerate", "python", "script")
"""What may start the ranks; of the commands of a shell's text, the first of these does."""
_MODULES: Final = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
}
_FLAGS: Final = re.compile(
    "module|no-python|run-path|standalone|cpu|debug|enable-cpu-affinity|ipex|multi-gpu|quiet|tpu|"
    "same-network|downcast-bf16|use-.*|dynamo-use-.*|[uBdEIOqsSv]"
)
"""Options of the launchers and of Python that take no value; all others take one."""
_NEEDLESS: Final = re.compile(
    "(rdzv|master|main-process|log|local-ranks)-.*|(node|machine)-rank|local-addr|role|redirects|u|"
    "tee|same-network|multi-gpu|standalone|start-method|use-env|quiet|monitor-interval"
)
_SHORT: Final = {"m": "module", "r": "redirects", "t": "tee", "use-cpu": "cpu"}
_RANK_PER_GPU: Final = ("gpu", "auto")
_NUMBERS: Final = {"max-restarts": "maxRestarts", "num-cpu-threads-per-process": "threadsPerRank"}
_VARIABLES: Final = {"cpu": "ACCELERATE_USE_CPU", "mixed-precision": "ACCELERATE_MIXED_PRECISION"}
_SIZES: Final = ("nnodes", "num-machines", "nproc-per-node", "num-processes")
_NO_SHELL: Final = "kdist starts the script without a shell"


class _Option(NamedTuple):
    name: str
    value: str
    words: list[InputValue]


def _show(*words: str) -> str:
    """Words for a message, without values that look like credentials."""
    parts, is_secret = list[str](), False
    for word in words:
        found = _CREDENTIAL.search(word)
        has_value = found is not None and found[1] is not None
        shorter = f"{word[: found.start(1)]}…" if found is not None and has_value else word
        parts.append("…" if is_secret else shorter)
        is_secret = found is not None and not has_value and (word[:1] == "-" or "_" in word)
    return f"`{shown(hide_userinfo(_TOKEN.sub('…', ' '.join(parts))))}`"


def _leave(words: Sequence[InputValue], why: str, *, needless: bool = False) -> None:
    """Leave out some words, with one reason."""
    text = f"{_show(*(each.text for each in words))}: {why}"
    settle(words, ValueOutcome(NEEDLESS if needless else LEFT_OUT, text))


@dataclass
class LaunchReader:
    """Reads a command into a draft. It is given the variables that the manifest has as text, the
    nodes of the workload, and the ranks that torchrun starts on each if it is not told.
    """

    draft: JobDraft
    variables: dict[str, str]
    nodes: int | None
    default_procs: int | str

    def read(self, words: list[InputValue], about: InputValue, *, entrypoint: bool) -> None:
        """Read the words of a container's command and args; `entrypoint` says that the program is
        that of the image. If there is no script to be found, a placeholder stands for it.
        """
        name = PurePosixPath(words[0].text).name if words else ""
        options = takewhile(lambda each: each.text.startswith("-"), words[1:])
        ends = [i for i, each in enumerate(options, 2) if re.fullmatch("-[a-z]*c", each.text)]
        if _SHELL.fullmatch(name) and ends and ends[0] < len(words):
            settle(words[: ends[0]], ValueOutcome(NEEDLESS, _NO_SHELL))
            settle(words[ends[0] + 1 :], ValueOutcome(LEFT_OUT, _NO_SHELL))
            done = self._read_text(words[ends[0]])
        else:
            done = self._read_words(words)
        if not done:
            self.draft.set("script.path", "train.py")
            self.draft.is_complete = False
            what = "is the image's ENTRYPOINT" if entrypoint else "is no Python script"
            about.change(f"the program {what}: name your script and its arguments in spec.script")

    def _read_text(self, value: InputValue) -> bool:
        """Read a shell's text: the statement that starts Python, and those around it."""
        value.keep("spec.script")
        statements, done = list(_statements(value)), False
        launchers = {_find_launcher(words)[0] for _, words in statements}
        best = next((each for each in _LAUNCHERS if each in launchers), "")
        for operator, words in statements:
            first = words[0].text
            if not done and first == "cd" and words[-1].text.startswith("/"):
                self.draft.set((*TRAINER, "workingDir"), words[-1].text, words[-1])
            elif not done and (first == "export" or all(map(_is_assignment, words))):
                self._set_variables(words[first == "export" :])
            elif _REDIRECTION.fullmatch(operator):
                _leave(words, "kdist keeps the log of each rank", needless=True)
            elif first in ("set", "exit", "wait"):
                _leave(words, _NO_SHELL, needless=True)
            elif done or _find_launcher(words)[0] != best or not self._read_words(words):
                _leave(words, "is not run: do it in the image, or in the script")
            else:
                done = True
        return done

    def _set_variables(self, words: Sequence[InputValue]) -> None:
        for each in words:
            found = _ASSIGNMENT.fullmatch(each.text)
            value = self._expand(found[2]) if found is not None else "$"
            if found is None or "$" in value or "`" in value:
                _leave([each], "its value is known to a shell only: set it in spec.env")
            else:
                self.variables[found[1]] = value
                self.draft.add("env", {"name": found[1], "value": value}, each)

    def _read_words(self, words: list[InputValue]) -> bool:
        """Read a command without a shell; whether it starts a Python script."""
        launcher, begin, rest = _find_launcher(words)
        options, script = self._read_options(rest)
        if not launcher or not script or any(each.name == "c" for each in options):
            return False
        self._set_variables([each for each in words[:begin] if _is_assignment(each)])
        if wrapper := [each for each in words[:begin] if not _is_assignment(each)]:
            _leave(wrapper, "kdist starts the script itself")
        _leave(words[begin : len(words) - len(rest)], "kdist is the launcher", needless=True)
        self._set_sizes(launcher, {each.name: each for each in options})
        for option in options:
            self._set_option(launcher, *option)
        target = "module" if any(each.name == "module" for each in options) else "path"
        self.draft.set(f"script.{target}", self._expand(script[0].text), script[0])
        for each in script[1:]:
            text = self._expand(each.text)
            self.draft.add("script.args", text, each)
            if "$" in text or "`" in text:
                each.change(f"{_show(text)} reaches the script as it is: read os.environ there")
        return True

    def _read_options(self, words: list[InputValue]) -> tuple[list[_Option], list[InputValue]]:
        """The options before the script, and the script with its arguments."""
        found, rest = list[_Option](), list(words)
        while rest and rest[0].text.startswith("-"):
            used = [rest.pop(0)]
            name, equals, value = used[0].text.lstrip("-").partition("=")
            name = _SHORT.get(name, name.replace("_", "-"))
            if not equals and name and not _FLAGS.fullmatch(name) and rest:
                used.append(rest.pop(0))
                value = used[-1].text
            found.append(_Option(name, self._expand(value), used))
        return found, rest

    def _set_sizes(self, launcher: str, options: dict[str, _Option]) -> None:
        """Nodes, and ranks on each."""
        size = options.get("nnodes") or options.get("num-machines")
        found = _NODES.fullmatch(size.value) if size is not None else None
        least, most = (int(found[1]), int(found[2] or found[1])) if found is not None else (1, 1)
        if size is not None and found is not None and (self.nodes is None or least < most):
            nodes = most if least == most else {"min": least, "max": most}
            self.draft.set("nodes", nodes, *size.words)
        elif size is not None:
            same = found is None or most == self.nodes
            _leave(size.words, f"the workload has {self.nodes or 1} nodes", needless=same)
        per_node, total = options.get("nproc-per-node"), options.get("num-processes")
        each, rest = 0, 1
        if total is not None and total.value.isdigit():
            each, rest = divmod(int(total.value), self.nodes or most)
        if per_node is not None and (
            per_node.value in _RANK_PER_GPU or re.fullmatch("[1-9][0-9]*", per_node.value)
        ):
            value = int(per_node.value) if per_node.value.isdigit() else "auto"
            self.draft.set("procsPerNode", value, *per_node.words)
        elif total is not None and each and not rest:
            self.draft.set("procsPerNode", each, *total.words)
        elif (option := per_node or total) is not None:
            _leave(option.words, "is no number of ranks for each node: set spec.procsPerNode")
        elif launcher in ("python", "torchrun"):
            self.draft.set("procsPerNode", 1 if launcher == "python" else self.default_procs)

    def _set_option(self, launcher: str, name: str, value: str, words: list[InputValue]) -> None:
        if name in _NUMBERS and value.isdigit():
            self.draft.set(_NUMBERS[name], int(value), *words)
        elif launcher == "accelerate" and name in _VARIABLES:
            self.draft.add("env", {"name": _VARIABLES[name], "value": value or "true"}, *words)
        elif name == "module":
            words[0].keep("spec.script.module")
        elif _NEEDLESS.fullmatch(name):
            _leave(words, "kdist's agents find each other, and keep each log", needless=True)
        elif launcher == "accelerate" and name not in _SIZES:
            _leave(words, "`accelerate launch` sets variables by it: put them into spec.env")
        elif name not in _SIZES:
            _leave(words, "kdist has no such option of its launcher")

    def _expand(self, text: str) -> str:
        """The text with the variables that the manifest gives a value."""
        return _VARIABLE.sub(
            lambda found: self.variables.get(next(filter(None, found.groups())), found[0]), text
        )


def _is_assignment(word: InputValue) -> bool:
    return _ASSIGNMENT.fullmatch(word.text) is not None


def _find_launcher(words: list[InputValue]) -> tuple[str, int, list[InputValue]]:
    """The launcher, where it begins, and the words after it. Empty if there is none."""
    names = [PurePosixPath(each.text).name for each in words]
    for index, name in enumerate(names):
        if name == "torchrun":
            return name, index, words[index + 1 :]
        if name == "accelerate" and names[index + 1 : index + 2] == ["launch"]:
            return name, index, words[index + 2 :]
        if _PYTHON.fullmatch(name):
            options = list(takewhile(lambda each: each.startswith("-"), names[index + 1 :]))
            end = index + 1 + len(options)
            module = names[end] if options[-1:] == ["-m"] and end < len(names) else ""
            is_launcher = module in _MODULES
            return (
                _MODULES.get(module, "python"),
                index,
                words[end + 1 if is_launcher else index + 1 :],
            )
        if name.endswith(".py"):
            return "script", index, words[index:]
    return "", 0, []


def _statements(value: InputValue) -> Iterator[tuple[str, list[InputValue]]]:
    """The simple commands of a shell's text, each with the operator before it."""
    hidden: list[str] = []

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return chr(0xE000 + len(hidden) - 1).ljust(len(found[0]), "\uf8ff")

    # all of it as long as it was, so that positions stay
    text = _UNREAD.sub(lambda found: " " * len(found[0]), value.text)
    text = _SUBSTITUTION.sub(hide, text, count=_MOST_HIDDEN)
    stream = io.StringIO(text)
    words = shlex.shlex(stream, posix=True, punctuation_chars=_OPERATORS)
    words.whitespace, words.whitespace_split, words.commenters = " \t\r", True, ""
    begins, tokens = [0], list[str]()
    try:
        for token in words:
            tokens.append(token)
            at = stream.tell()  # behind the character that has ended the token
            begins.append(at - (text[at - 1] not in f"{words.whitespace}{_OPERATORS}"))
    except ValueError:  # a quotation mark without its pair
        return
    tokens.append("\n")
    statement, operator, in_comment = list[InputValue](), "", False
    for index, token in enumerate(tokens):
        in_comment = (in_comment or token.startswith("#")) and "\n" not in token
        if (not token or token.strip(_OPERATORS)) and not in_comment:
            whole = _HIDDEN.sub(lambda found: hidden[ord(found[1]) - 0xE000], token)
            mark = statement[0].mark if statement else _find_mark(value, begins[index])
            statement.append(value.item(index, YamlNode("scalar", mark, whole, whole)))
        elif not in_comment:
            if token[0] in "<>" and statement and statement[-1].text in ("1", "2"):
                del statement[-1]  # of 2>&1
            if [each.text for each in statement] not in ([], ["1"], ["2"]):  # of >&2
                yield operator, statement
            statement, operator = [], token.strip("\n;") or ";"


def _find_mark(value: InputValue, offset: int) -> Mark:
    """Where in the file a statement begins, by its offset in the text: in a block `|`, or on one
    line. Of texts that YAML folds or unescapes, the position of the whole.
    """
    offset += len(value.text[offset:]) - len(value.text[offset:].lstrip())
    before = value.text[:offset].split("\n")
    rest, indent = value.text[offset:].partition("\n")[0], before[-1].lstrip()
    rows = [value.mark.line] if len(before) == 1 else []
    for row in (*rows, value.mark.line + len(before)):
        line = value.outcomes.lines[row - 1] if 0 < row <= len(value.outcomes.lines) else ""
        if (found := line.find(f"{indent}{rest}".rstrip())) >= 0:
            return value.mark._replace(line=row, column=found + len(indent) + 1, width=1)
    return value.mark
