"""Configuration: files, environment, options, and errors that name the key and where it came from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.core import config
from kvferry.core.config import NodeConfig, ReceiverConfig, SenderConfig
from kvferry.core.errors import ConfigError

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.mark.parametrize(("kind", "name"), [(SenderConfig, "sender.toml"), (ReceiverConfig, "receiver.toml")])
def test_the_example_file_lists_every_key_with_its_default(kind: type[NodeConfig], name: str) -> None:
    loaded = config.load(kind, DEPLOY / name, {})
    assert loaded == kind()
    assert set(tomllib.loads((DEPLOY / name).read_text())) == set(kind.__struct_fields__)


def test_environment_goes_over_the_file_and_options_over_both(tmp_path: Path) -> None:
    file = tmp_path / "sender.toml"
    file.write_text('model = "from-file"\nchunk_bytes = 2048\nlog_level = "debug"\n')
    environment = {"KVFERRY_SENDER_MODEL": "from-environment", "KVFERRY_SENDER_CHUNK_BYTES": "4096", "OTHER": "x"}
    loaded = config.load(SenderConfig, file, environment, {"model": "from-option", "store": None})
    assert (loaded.model, loaded.chunk_bytes, loaded.log_level) == ("from-option", 4096, "debug")
    assert loaded.store == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('modell = "x"', ["modell", "unknown"]),
        ("chunk_bytes = 1", ["chunk_bytes", "1", "from 1024 to"]),
        ('chunk_bytes = "4096"', ["chunk_bytes", "4096"]),
        ('log_level = "loud"', ["log_level", "loud"]),
        ("model = 3", ["model", "3"]),
        ("insecure = 1", ["insecure", "1"]),
        ("[model]\nx = 1", ["model"]),
        ("model = ", ["Invalid value"]),
    ],
)
def test_a_mistake_in_a_file_names_the_file_the_key_and_the_value(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "receiver-or-sender.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(SenderConfig, file, {})
    assert all(word in caught.value.message for word in [str(file), *words])


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"KVFERRY_RECEIVER_MODELL": "x"}, ["modell", "KVFERRY_RECEIVER_"]),
        ({"KVFERRY_RECEIVER_CACHE_BYTES": "much"}, ["cache_bytes", "much"]),
        ({"KVFERRY_RECEIVER_CACHE_BYTES": "-1"}, ["cache_bytes", "-1"]),
        ({"KVFERRY_RECEIVER_INSECURE": "perhaps"}, ["insecure", "perhaps"]),
    ],
)
def test_a_mistake_in_the_environment_is_named(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(ReceiverConfig, None, environment)
    assert all(word in caught.value.message for word in words)


def test_a_missing_or_unreadable_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        config.load(SenderConfig, tmp_path / "nowhere.toml", {})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        config.load(SenderConfig, binary, {})


@pytest.mark.parametrize("listen", ["0.0.0.0:7411", "192.168.1.5:7411", "[::]:7411", "mac.local:7411"])
def test_an_address_that_others_reach_needs_the_word_insecure(listen: str) -> None:
    with pytest.raises(ConfigError, match="insecure"):
        config.load(SenderConfig, None, {}, {"listen": listen})
    assert config.load(SenderConfig, None, {}, {"listen": listen, "insecure": True}).listen == listen


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:7411", "[::1]:7411", "127.9.9.9:1"])
def test_loopback_needs_nothing(listen: str) -> None:
    assert config.load(SenderConfig, None, {}, {"listen": listen}).listen == listen


@pytest.mark.parametrize(
    "listen", ["", "7411", ":7411", "host:", "host:port", "host:70000", "::1:7411", "host:-1", "h:١"]
)
def test_an_address_that_is_none_is_refused_with_its_text(listen: str) -> None:
    with pytest.raises(ConfigError, match="listen") as caught:
        config.load(SenderConfig, None, {}, {"listen": listen})
    assert repr(listen) in caught.value.message


def test_configuration_cannot_be_changed() -> None:
    loaded: Any = SenderConfig()
    with pytest.raises(AttributeError):
        loaded.model = "other"
    assert msgspec.structs.replace(loaded, model="other").model == "other"
