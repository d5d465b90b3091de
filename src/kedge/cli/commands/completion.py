"""`kedge completion SHELL`: the script with which a shell completes commands, options, jobs and IDs."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kedge.cli.app import cli


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash  eval "$(kedge completion bash)"    in ~/.bashrc
    zsh   eval "$(kedge completion zsh)"     in ~/.zshrc, below compinit
    fish  kedge completion fish > ~/.config/fish/completions/kedge.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click knows these three  # nosec B101
    template = kind(cli, {}, "kedge", "_KEDGE_COMPLETE")
    click.echo(template.source_template % template.source_vars())
