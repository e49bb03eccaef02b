# SPDX-License-Identifier: Apache-2.0
"""The command `tandem`. Its subcommands are entry points of the group "tandem.commands", loaded when they are used."""

from importlib.metadata import EntryPoint, entry_points

import click

COMMAND_GROUP = "tandem.commands"


class PluginGroup(click.Group):
    """A group whose commands come from installed distributions; one that can't be loaded harms no other."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({entry.name for entry in entry_points(group=COMMAND_GROUP)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for entry in entry_points(group=COMMAND_GROUP, name=cmd_name):
            return _load(entry)
        return None


def _load(entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
    except Exception as error:
        return _unavailable(entry, f"{type(error).__name__}: {error}")
    if not isinstance(command, click.Command):
        return _unavailable(entry, f"{entry.value} is not a click command")
    return command


def _unavailable(entry: EntryPoint, reason: str) -> click.Command:
    def fail() -> None:
        raise click.ClickException(f"the command {entry.name} ({entry.value}) can't be loaded: {reason}")

    return click.Command(
        entry.name,
        callback=fail,
        short_help=f"(can't be loaded: {reason})",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


@click.group(cls=PluginGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tandem-client")
def main() -> None:
    """Tandem: exact and fast text generation on NVIDIA Triton Inference Server."""
