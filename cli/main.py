"""The kvferry command: a group that imports a command only when it runs, and one place where errors are shown."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import click

from kvferry.cli import output
from kvferry.core.errors import ConfigError, KvferryError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

# The summaries stand here so that --help imports no command at all.
COMMANDS = {
    "demo": "Carry a bundled document from one daemon to another and compare a few methods.",
    "sender": "Run the daemon that reads documents and ships what it read.",
    "receiver": "Run the daemon that takes artifacts in and answers from them.",
    "send": "Have the sender read a document and deliver it to the receiver.",
    "ask": "Ask the receiver a question about an artifact.",
    "inspect": "Show the manifest of a stored artifact.",
    "artifacts": "List, verify, export and import artifacts.",
    "methods": "List the methods that documents can be sent with.",
    "models": "List, add, find and remove the models of the catalogue.",
    "certs": "Make certificates and tokens, so that only your own machines can connect.",
    "bench": "Measure how fast artifacts move, how soon the first token comes, what choosing rows and look-ups cost.",
    "calibrate": "Measure what a method needs to know about a model, once.",
    "ablate": "Compare methods over a grid of models, documents and parameters.",
    "doctor": "Check this machine, a configuration and the way to a peer.",
}
_JSON = "kvferry.json"


class CommandGroup(click.Group):
    """Finds commands by name and turns their errors into one line and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (the signatures are click's)
        """Return the commands' names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"kvferry.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note whether a program is reading, which also a wrong command line must respect."""
        ctx.meta[_JSON] = _wants_json(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        as_json = ctx.meta[_JSON]
        try:
            return super().invoke(ctx)
        except KvferryError as error:
            output.report_error(error.code, error.message, error.fields, as_json=as_json)
            ctx.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE)
        except click.UsageError as error:
            if as_json:
                output.write_json(output.error_record("USAGE", error.format_message(), {}))
            raise
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)


def _wants_json(args: Sequence[str]) -> bool:
    options = args[: args.index("--")] if "--" in args else args
    return "--json" in options


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvferry", message="%(prog)s %(version)s")
def main() -> None:
    """Carry what one machine has read to another, so that the second need not read it again."""
