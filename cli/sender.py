"""``kvferry sender``: run the daemon that reads documents and ships what it read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvferry.cli.daemon_options import config_options
from kvferry.core import config


@click.command(
    name="sender",
    epilog="Options win over environment variables such as KVFERRY_SENDER_LISTEN, and these over the file.",
)
@click.option("--config", "path", type=click.Path(path_type=Path), help="TOML file with the keys of these options.")
@config_options(config.SenderConfig)
@click.option("--json", "as_json", is_flag=True, help="Say in JSON where it listens.")
def command(path: Path | None, *, as_json: bool, **options: Any) -> None:
    """Run the daemon that reads documents and ships what it read."""
    loaded = config.load(config.SenderConfig, path, options=options)

    from kvferry.sender import daemon

    daemon.main(loaded, announce_json=as_json)
