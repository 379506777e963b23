"""`kdist completion`: shell completion scripts, and the answers to what they ask."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import click
from click import shell_completion
from click.shell_completion import CompletionItem

from kdist import console
from kdist.commands.options import output_option

# As click's, but with the line up to the cursor: bash splits words at `=`, and a space that was
# typed after it would be lost. `compopt -o nospace` keeps the cursor at `spec.` and `PATH=`.
_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' response completion type value line word typed=''

    line=${COMP_LINE:0:COMP_POINT}
    response=$(env COMP_LINE="$line" COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \
        %(complete_var)s=bash_complete $1)
    word=${line##*[[:space:]]}
    [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] \\
        && typed=${word%%"${word##*=}"}

    for completion in $response; do
        IFS=',' read type value <<< "$completion"

        if [[ $type == 'file' ]]; then
            compopt -o default
        elif [[ $type == 'dir' ]]; then
            compopt -o dirnames
        elif [[ $type == 'plain' ]]; then
            [[ $value == *[.=] ]] && compopt -o nospace
            COMPREPLY+=("${value#"$typed"}")
        fi
    done

    return 0
}

%(complete_func)s_setup() {
    complete -o nosort -F %(complete_func)s %(prog_name)s
}

%(complete_func)s_setup;
"""
_ZSH_OFFER = "compadd -U -V unsorted -a completions"
_ZSH_OFFERS = """\
compadd -U -V unsorted -- ${completions:#*[.=]}
        compadd -U -V unsorted -S '' -- ${(M)completions:#*[.=]}"""


class _WholeWords(shell_completion.ShellComplete):
    """Offers `--for=running` for `--for=r`, as shells replace the whole word."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        """The completions of a word."""
        found = super().get_completions(args, incomplete)
        option, equals, _ = incomplete.partition("=")
        if option.startswith("-") and equals:
            for item in found:
                item.value = f"{option}={item.value}"
        return found


class Bash(_WholeWords, shell_completion.BashComplete):
    """Completion of bash."""

    source_template: ClassVar[str] = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the cursor, and the word at it."""
        line = os.environ.get("COMP_LINE")
        if line is None:
            return super().get_completion_args()
        words = shell_completion.split_arg_string(line)[1:]
        if line[-1:].isspace() or not words:
            return words, ""
        return words[:-1], words[-1]


class Zsh(_WholeWords, shell_completion.ZshComplete):
    """Completion of zsh."""

    source_template: ClassVar[str] = shell_completion.ZshComplete.source_template.replace(
        _ZSH_OFFER, _ZSH_OFFERS
    )


class Fish(_WholeWords, shell_completion.FishComplete):
    """Completion of fish, which adds no space after `.` and `=`."""


SHELLS = {"bash": Bash, "zsh": Zsh, "fish": Fish}


def register_shells() -> None:
    """Have click answer shells by the classes above."""
    for name, shell in SHELLS.items():
        shell_completion.add_completion_class(shell, name)


@click.command
@click.argument("shell", type=click.Choice(tuple(SHELLS)))
@output_option("script", "json")
@click.pass_context
def command(context: click.Context, shell: str, *, output: str) -> None:
    r"""Print the completion script for a shell.

    \b
    Examples:
      source <(kdist completion bash)
      kdist completion zsh > ~/.zfunc/_kdist
      kdist completion fish > ~/.config/fish/completions/kdist.fish
    """
    root = context.find_root().command
    script = SHELLS[shell](root, {}, "kdist", "_KDIST_COMPLETE").source()
    if output == "json":
        console.emit({"shell": shell, "script": script}, kind="CompletionScript", output=output)
    else:
        console.document(script)
