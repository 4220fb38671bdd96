"""``kvferry receiver``: run the daemon that takes artifacts in and answers from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvferry.cli.daemon_options import config_options
from kvferry.core import config


@click.command(
    name="receiver",
    epilog="Options win over environment variables such as KVFERRY_RECEIVER_LISTEN, and these over the file.",
)
@click.option("--config", "path", type=click.Path(path_type=Path), help="TOML file with the keys of these options.")
@config_options(config.ReceiverConfig)
@click.option("--json", "as_json", is_flag=True, help="Say in JSON where it listens.")
def command(path: Path | None, *, as_json: bool, **options: Any) -> None:
    """Run the daemon that takes artifacts in and answers from them."""
    loaded = config.load(config.ReceiverConfig, path, options=options)

    from kvferry.receiver import daemon

    daemon.main(loaded, announce_json=as_json)
