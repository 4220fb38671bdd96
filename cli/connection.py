"""Options that say where the daemons are, for the commands that talk to them."""

from __future__ import annotations

import click

from kvferry.core.addresses import RECEIVER_PORT, SENDER_PORT

sender_option = click.option(
    "--sender", default=f"127.0.0.1:{SENDER_PORT}", show_default=True, help="host:port of the sender."
)
receiver_option = click.option(
    "--receiver", default=f"127.0.0.1:{RECEIVER_PORT}", show_default=True, help="host:port of the receiver."
)
timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Most seconds to wait for a sign of life.",
)
