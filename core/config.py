"""Daemon configuration: a TOML file, environment variables over it, options over both. Unknown keys are errors."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from platformdirs import user_data_path

from kvferry.core import allowed, limits
from kvferry.core.addresses import RECEIVER_PORT, SENDER_PORT, parse
from kvferry.core.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both daemons are told.

    Attributes:
        model: directory, catalogue name or hub id.
        adapter: directory of a LoRA adapter, or "".
        revision: of a hub id, or "".
        listen: host:port; port 0 takes a free one.
        insecure: allow an address that other machines reach without TLS or without tokens.
        certificate: PEM file of this daemon's certificate; with its key it serves TLS.
        key: PEM file of the certificate's key.
        authority: PEM file of the authority whose certificates are trusted; with it peers are called over TLS.
        client_certificates: ask callers for a certificate of the authority (mutual TLS).
        tokens: file of the tokens that are accepted; "" asks for none.
        token_file: file of the token that this daemon shows to its peer.
        max_calls: calls that may run at the same time.
        store: directory of artifacts, and of the sender's documents; "" is the user's data directory.
        max_store_bytes: disk budget of the store; what was not used for longest goes first. 0 is no limit.
        ttl_seconds: how long an artifact or a document stays without being used. 0 is for ever.
        durable: whether an artifact is on disk, not only in the system's memory, before it counts as there.
        prefill_chunk: tokens a forward pass; both ends should agree.
        cache_bytes: memory for caches that are kept at hand.
        grace_seconds: how long calls may finish after SIGTERM.
        metrics: host:port of the Prometheus page; "" is none, port 0 takes a free one.
    """

    model: str = "smollm2-135m-instruct"
    adapter: str = ""
    revision: str = ""
    listen: str
    insecure: bool = False
    certificate: str = ""
    key: str = ""
    authority: str = ""
    client_certificates: bool = False
    tokens: str = ""
    token_file: str = ""
    max_calls: Positive = 64
    store: str = ""
    max_store_bytes: Annotated[int, Meta(ge=0)] = 64 * limits.GIB
    ttl_seconds: Annotated[float, Meta(ge=0)] = 0.0
    durable: bool = True
    prefill_chunk: Positive = 512
    cache_bytes: Annotated[int, Meta(ge=0)] = 4 * limits.GIB
    grace_seconds: Annotated[float, Meta(ge=0)] = 5.0
    metrics: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"


class SenderConfig(NodeConfig, frozen=True, kw_only=True):
    """What the sender is told.

    Attributes:
        receiver: where artifacts go when a request names no receiver: host:port, or tcp://host:port for its TCP worker.
        chunk_bytes: payload bytes a chunk.
        max_document_bytes: largest document taken in.
        rpc_seconds: how long a receiver may take for one call without payload.
    """

    listen: str = f"127.0.0.1:{SENDER_PORT}"
    receiver: str = f"127.0.0.1:{RECEIVER_PORT}"
    chunk_bytes: Annotated[int, Meta(ge=limits.MIN_CHUNK_BYTES, le=limits.MAX_CHUNK_BYTES)] = limits.DEFAULT_CHUNK_BYTES
    max_document_bytes: Annotated[int, Meta(ge=1, le=limits.MAX_DOCUMENT_BYTES)] = limits.MAX_DOCUMENT_BYTES
    rpc_seconds: Annotated[float, Meta(gt=0)] = 30.0


class ReceiverConfig(NodeConfig, frozen=True, kw_only=True):
    """What the receiver is told.

    Attributes:
        max_payload_bytes: largest payload taken in.
        tcp: host:port of a plain TCP worker that takes artifacts in beside gRPC; "" is none, port 0 takes a free one.
        max_answer_tokens: most tokens that one answer may ask for.
        parity: when the manifest's probe is repeated on a rebuilt cache: the first time on this node, always or never.
        ledger: file that gets one JSON line an answer; "" is ledger.jsonl in the store.
        sender: where passages are looked up when a question names no sender: host:port.
        lookup_seconds: how long a look-up may take.
    """

    listen: str = f"127.0.0.1:{RECEIVER_PORT}"
    max_payload_bytes: Annotated[int, Meta(ge=1, le=limits.MAX_PAYLOAD_BYTES)] = limits.MAX_PAYLOAD_BYTES
    tcp: str = ""
    max_answer_tokens: Positive = 4096
    parity: Literal["first", "always", "never"] = "first"
    ledger: str = ""
    sender: str = f"127.0.0.1:{SENDER_PORT}"
    lookup_seconds: Annotated[float, Meta(gt=0)] = 10.0


ConfigType = TypeVar("ConfigType", bound=NodeConfig)


def load(
    kind: type[ConfigType],
    path: Path | None,
    environment: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> ConfigType:
    """Read a daemon's configuration.

    Args:
        kind: SenderConfig or ReceiverConfig.
        path: the TOML file, or None.
        environment: variables such as KVFERRY_SENDER_LISTEN; the process's own by default.
        options: values from the command line; None entries are ignored.

    Raises:
        ConfigError: naming the key, the value and where it came from.
    """
    role = kind.__name__.removesuffix("Config").lower()
    merged: dict[str, Any] = _read_file(path, kind) if path else {}
    merged |= _read_environment(kind, role, os.environ if environment is None else environment)
    given = {key: value for key, value in (options or {}).items() if value is not None}
    merged |= _converted(kind, given, "option")
    config = _converted_whole(kind, merged, str(path) if path else "configuration")
    _check_security(config)
    _check_metrics(config)
    return config


def store_path(config: NodeConfig) -> Path:
    """Return the directory of the daemon's store."""
    role = type(config).__name__.removesuffix("Config").lower()
    return Path(config.store).expanduser() if config.store else user_data_path("kvferry") / role


def ledger_path(config: ReceiverConfig) -> Path:
    """Return the file that takes one JSON line an answer."""
    return Path(config.ledger).expanduser() if config.ledger else store_path(config) / "ledger.jsonl"


def _read_file(path: Path, kind: type[NodeConfig]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: {reason}", path=str(path)) from error
    return _converted(kind, content, str(path))


def _read_environment(kind: type[NodeConfig], role: str, environment: Mapping[str, str]) -> dict[str, Any]:
    prefix = f"KVFERRY_{role.upper()}_"
    given = {name.removeprefix(prefix).lower(): value for name, value in environment.items() if name.startswith(prefix)}
    return _converted(kind, given, f"environment {prefix}*", strict=False)


def _converted(kind: type[NodeConfig], given: Mapping[str, Any], source: str, *, strict: bool = True) -> dict[str, Any]:
    """Check given keys one by one, so that an error names the key and its source."""
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"{source}: unknown key {key!r}; known are {', '.join(sorted(known))}",
                field=key,
                source=source,
            )
        try:
            checked[key] = msgspec.convert(value, known[key], strict=strict)
        except msgspec.ValidationError as error:
            wanted = allowed.in_words(known[key])
            reason = f", must be {wanted}" if wanted else f": {error}"
            raise ConfigError(f"{source}: {key} = {value!r}{reason}", field=key, source=source) from error
    return checked


def _converted_whole(kind: type[ConfigType], merged: Mapping[str, Any], source: str) -> ConfigType:
    try:
        return msgspec.convert(dict(merged), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}", source=source) from error


def _check_security(config: NodeConfig) -> None:
    """Refuse an address that strangers reach unprotected, and settings that only make sense together."""
    if bool(config.certificate) != bool(config.key):
        missing = "key" if config.certificate else "certificate"
        raise ConfigError(f"{missing}: certificate and key are given together or not at all", field=missing)
    lacking = [name for name in ("certificate", "authority") if not getattr(config, name)]
    if config.client_certificates and lacking:
        raise ConfigError(f"client_certificates: needs {' and '.join(lacking)} as well", field="client_certificates")
    lacking = [name for name in ("certificate", "key", "tokens") if not getattr(config, name)]
    addresses = {"listen": config.listen}
    if isinstance(config, ReceiverConfig) and config.tcp:
        addresses["tcp"] = config.tcp
    for field, given in addresses.items():
        if lacking and not config.insecure and not parse(given, field).is_loopback:
            raise ConfigError(
                f"{field}: {given} can be reached from other machines; give {', '.join(lacking)} "
                "(`kvferry certs` makes them), or set insecure = true (--insecure) if that is what you want",
                field=field,
                value=given,
            )


def _check_metrics(config: NodeConfig) -> None:
    if config.metrics and not parse(config.metrics, "metrics").is_loopback and not config.insecure:
        raise ConfigError(
            f"metrics: {config.metrics} can be reached from other machines and the page is not encrypted; "
            "set insecure = true (--insecure) if that is what you want",
            field="metrics",
            value=config.metrics,
        )
