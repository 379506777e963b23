"""`kdist completion`: shell completion scripts."""

from __future__ import annotations

import click

from kdist import console


@click.command
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    r"""Print the completion script of a shell.

    \b
    Examples:
      source <(kdist completion bash)
      kdist completion zsh > ~/.zfunc/_kdist
      kdist completion fish > ~/.config/fish/completions/kdist.fish
    """
    from click.shell_completion import get_completion_class

    completer = get_completion_class(shell)
    if completer is None:
        raise click.UsageError(f"click has no completion for {shell}", ctx=context)
    console.result(completer(context.find_root().command, {}, "kdist", "_KDIST_COMPLETE").source())
