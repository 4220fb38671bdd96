"""``kvferry doctor``: every finding's bad case made real, or pretended where it takes a Mac, and none that hangs."""

from __future__ import annotations

import datetime as dt
import errno
import json
import os
import shutil
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import kvferry.core
from kvferry.cli.checks import certificates, daemons, disk, memory, model, peers, plan, ports, runtime, system, tokens
from kvferry.cli.checks.findings import Check, Finding, run
from kvferry.cli.checks.memory import Memory
from kvferry.cli.checks.runtime import Probe
from kvferry.cli.checks.system import System
from kvferry.cli.main import main
from kvferry.core.addresses import Address
from kvferry.core.config import ReceiverConfig, SenderConfig
from kvferry.core.errors import ModelError
from kvferry.core.metrics import NodeMetrics
from kvferry.core.metrics_server import MetricsServer
from kvferry.core.tls import PeerSecurity
from kvferry.core.tokens import new_secret
from kvferry.proto.v1 import common_pb2
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as pb_grpc

LINUX = System("linux", "x86_64", (3, 12, 1), lambda _: "")
MAC = System("darwin", "arm64", (3, 12, 1), lambda _: "")
GOOD_PROBE = Probe("", "0.32.4", "0.32.2", "cpu", "libopenblas.so.0", 50.0, 2.0)
PLAIN = PeerSecurity()
SETTINGS = "System Settings → Privacy & Security → Local Network"


def bad(finding: Finding | None, status: str = "problem", *words: str) -> Finding:
    """Return a finding that must be bad, speak of ``words``, and say what to do."""
    assert finding is not None
    assert finding.status == status, finding
    assert finding.remedy
    for word in words:
        assert word in finding.message + finding.remedy, (word, finding)
    assert "\n" not in finding.message + finding.remedy
    return finding


# Findings and how they are run


@pytest.mark.parametrize("status", ["warning", "problem"])
def test_whoever_finds_fault_says_what_to_do(status: Any) -> None:
    with pytest.raises(ValueError, match="without a remedy"):
        Finding("x", status, "broken")


def test_a_check_that_hangs_becomes_a_problem_in_time() -> None:
    release = threading.Event()

    def hang() -> list[Finding]:
        release.wait(20)
        return []

    started = time.monotonic()
    found = run(Check("disk", hang, seconds=0.2))
    assert time.monotonic() - started < 5
    bad(found[0], "problem", "0.2 s")
    release.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_check_that_fails_itself_is_no_finding() -> None:
    def broken() -> list[Finding]:
        raise ZeroDivisionError

    with pytest.raises(RuntimeError, match="^model: the check failed"):
        run(Check("model", broken))


# Python, MLX, BLAS, compiler


def test_an_old_python_and_one_that_is_not_native() -> None:
    assert runtime.python(LINUX).status == runtime.python(MAC).status == "ok"
    bad(runtime.python(System("linux", "x86_64", (3, 10, 9))), "problem", "3.10.9", "3.11")
    bad(runtime.python(System("darwin", "x86_64", (3, 12, 1))), "problem", "x86_64", "arm64")


@pytest.fixture
def shadow_mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts another mlx before the installed one, for processes that start."""

    def place(source: str) -> None:
        (tmp_path / "mlx").mkdir()
        (tmp_path / "mlx/__init__.py").write_text("")
        (tmp_path / "mlx/core.py").write_text(source)
        root = Path(kvferry.core.__file__).parents[2]
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{root}")

    return place


def test_an_mlx_that_does_not_import_is_told_with_its_own_words(shadow_mlx: Callable[[str], None]) -> None:
    shadow_mlx("raise ImportError('libmlx.so: cannot open shared object file')")
    bad(runtime.mlx(LINUX, runtime.probe_mlx()), "problem", "cannot open shared object file", "mlx[cpu]")


def test_an_mlx_that_kills_its_process_or_hangs_is_survived(shadow_mlx: Callable[[str], None], tmp_path: Path) -> None:
    shadow_mlx("import os; os._exit(132)")
    bad(runtime.mlx(MAC, runtime.probe_mlx()), "problem", "status 132")
    (tmp_path / "mlx/core.py").write_text("import time; time.sleep(60)")
    bad(runtime.mlx(MAC, runtime.probe_mlx(seconds=1.0)), "problem", "no result after 1 s")


def test_the_real_mlx_of_this_machine_is_in_order() -> None:
    pytest.importorskip("mlx.core")
    probe = runtime.probe_mlx()
    assert runtime.mlx(System(), probe).status == "ok", probe
    assert probe.ms > 0


def test_a_mac_without_metal_is_a_problem_and_linux_without_is_none() -> None:
    assert runtime.mlx(LINUX, GOOD_PROBE).status == "ok"
    bad(runtime.mlx(MAC, GOOD_PROBE), "problem", "Metal")
    assert runtime.mlx(MAC, Probe("", "1", "1", "gpu")).message.endswith("(Metal)")


def test_a_blas_that_is_missing_or_slow_shows_by_its_rate() -> None:
    assert runtime.blas(LINUX, GOOD_PROBE) == Finding(
        "blas", "ok", "libopenblas.so.0, 50.0 GFLOP/s in a product of 2.0 ms"
    )
    bad(runtime.blas(LINUX, Probe("", "1", "1", "cpu", "", 1.8, 60.0)), "warning", "1.8 GFLOP/s", "openblas")
    slow = bad(runtime.blas(LINUX, Probe("", "1", "1", "cpu", "libopenblas.so.0", 1.8, 60.0)), "warning", "1.8")
    assert "as slow as without" in slow.message
    assert runtime.blas(MAC, GOOD_PROBE) is None
    assert runtime.blas(LINUX, Probe("broken")) is None


def program(folder: Path, name: str, source: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{source}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_compiler_that_is_missing_misnamed_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bad(runtime.compiler(LINUX), "problem", "g++ is not here", "apt-get install g++")
    program(tmp_path, "clang++", "exit 0")
    bad(runtime.compiler(LINUX), "problem", "clang++ is, but MLX calls g++", "apt-get install g++")
    program(tmp_path, "g++", "echo 'fatal error: cmath: No such file' >&2; exit 1")
    bad(runtime.compiler(LINUX), "problem", "cmath", "headers")
    program(tmp_path, "g++", "exit 0")
    assert runtime.compiler(LINUX) == Finding("compiler", "ok", f"{tmp_path}/g++ compiles")
    assert runtime.compiler(MAC) is None


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_program_that_is_tried_is_one_that_compiles() -> None:
    found = runtime.compiler(LINUX)
    assert found is not None
    assert found.status == "ok"


# The model


def weights(path: Path, tensors: dict[str, tuple[str, int]], *, cut: int = 0) -> None:
    header, at = {}, 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    encoded = json.dumps({"__metadata__": {"format": "mlx"}, **header}).encode()
    path.write_bytes((struct.pack("<Q", len(encoded)) + encoded + bytes(at))[: -cut or None])


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    weights(path / "model.safetensors", {"a": ("BF16", 400), "b": ("U32", 100)})
    return path


def test_a_whole_model_is_found_and_fits(model_dir: Path) -> None:
    path, located = model.locate(SenderConfig(model=str(model_dir)), lambda _: model_dir)
    assert (path, located.status) == (model_dir, "ok")
    assert model.files(model_dir).status == "ok"
    assert "1 weight file(s)" in model.files(model_dir).message
    assert model.fits(model_dir, Memory(10_000, 1_000), LINUX).status == "ok"


def test_16_bit_weights_double_on_linux_where_they_become_float32(model_dir: Path) -> None:
    room = Memory(total=950, available=850)
    assert model.fits(model_dir, room, MAC).status == "ok"
    bad(model.fits(model_dir, room, LINUX), "warning", "900 B as float32", "850 B of 950 B")
    bad(model.fits(model_dir, Memory(800, 800), LINUX), "problem", "quantised")
    bad(model.fits(model_dir, None, LINUX), "warning", "does not tell")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "config.json").unlink(), ["config.json", "No such file"]),
        (lambda path: (path / "config.json").write_text("{"), ["config.json", "no JSON"]),
        (lambda path: (path / "config.json").write_text("[]"), ["config.json", "no JSON object"]),
        (lambda path: (path / "tokenizer.json").unlink(), ["tokenizer.json"]),
        (lambda path: (path / "model.safetensors").unlink(), ["no model*.safetensors"]),
        (lambda path: weights(path / "model.safetensors", {"a": ("F32", 400)}, cut=7), ["cut short"]),
        (lambda path: (path / "model.safetensors").write_bytes(b"version https://git-lfs"), ["model.safetensors"]),
        (lambda path: (path / "model.safetensors").write_bytes(b""), ["no safetensors file"]),
        (lambda path: (path / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"[12]"), ["header"]),
        (
            lambda path: (path / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}})
            ),
            ["1 of 2 weight files are missing", "00002-of-00002"],
        ),
    ],
)
def test_a_model_that_is_not_whole_names_what_is_wrong(
    model_dir: Path, damage: Callable[[Path], Any], words: list[str]
) -> None:
    damage(model_dir)
    bad(model.files(model_dir), "problem", *words)


def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    def missing(_: str) -> Path:
        raise ModelError("model x is not installed. Run: kvferry models add x")

    path, finding = model.locate(SenderConfig(model="x"), missing)
    assert path is None
    bad(finding, "problem", "kvferry models add x")
    bad(model.locate(SenderConfig(model="typo"), str)[1], "problem", "'typo' is neither")
    path, finding = model.locate(SenderConfig(model="nobody/not-cached-anywhere"), str)
    assert path is None
    bad(finding, "warning", "not on this disk", "hf download nobody/not-cached-anywhere")
    bad(model.adapter(SenderConfig(adapter=str(tmp_path))), "problem", "adapters.safetensors")
    assert model.adapter(SenderConfig()) is None


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10.
Pages active:                          50000.
Pages inactive:                           20.
Pages speculative:                         3.
Pages wired down:                       7000.
Pages purgeable:                           4.
"""


def test_memory_as_macos_and_linux_and_a_container_tell_it(tmp_path: Path) -> None:
    told = {"sysctl": "17179869184\n", "vm_stat": VM_STAT}

    def command(arguments: Sequence[str]) -> str:
        return told[Path(arguments[0]).name]

    assert memory.read(System("darwin", "arm64", run=command)) == Memory(17179869184, 37 * 16384)
    assert memory.read(MAC) is None
    linux = System("linux", "x86_64", root=tmp_path)
    assert memory.read(linux) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000 kB\nMemFree: 5 kB\nMemAvailable:  600 kB\n")
    assert memory.read(linux) == Memory(1_024_000, 614_400)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("500000\n")
    assert memory.read(linux) == Memory(500_000, 500_000)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert memory.read(linux) == Memory(1_024_000, 614_400)


# Ports and who answers there


class FakeReceiver(pb_grpc.ReceiverServiceServicer):
    """Describes itself, with a clock that may be wrong."""

    def __init__(self, role: str, skew: float | None, version: str) -> None:
        self.role, self.skew, self.version = role, skew, version

    def Describe(self, request: Any, context: Any) -> pb.ReceiverServiceDescribeResponse:
        return pb.ReceiverServiceDescribeResponse(
            node=common_pb2.NodeDescription(
                role=self.role,
                kvferry_version=self.version,
                device="cpu",
                model=common_pb2.ModelDescription(id="tiny"),
                unix_time=0 if self.skew is None else time.time() + self.skew,
            )
        )


Serve = Callable[..., Address]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts a gRPC server: healthy by default, a receiver unless ``role`` is ""."""
    servers = []

    def start(
        role: str = "receiver",
        *,
        skew: float | None = 0.0,
        status: Any = health_pb2.HealthCheckResponse.SERVING,
        version: str = peers._own_version(),
        tls: tuple[Path, Path] | None = None,
    ) -> Address:
        server = grpc.server(ThreadPoolExecutor(2))
        servicer = health.HealthServicer()
        servicer.set("", status)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        if role:
            pb_grpc.add_ReceiverServiceServicer_to_server(FakeReceiver(role, skew, version), server)
        if tls is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            pair = (tls[1].read_bytes(), tls[0].read_bytes())
            port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        server.start()
        servers.append(server)
        return Address("127.0.0.1", port)

    yield start
    for server in servers:
        server.stop(0).wait()


@pytest.fixture
def stranger() -> Iterator[Address]:
    """A program that takes connections and says nothing sensible."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        done = threading.Event()

        def greet() -> None:
            listening.settimeout(0.05)
            while not done.is_set():
                try:
                    with listening.accept()[0] as connection:
                        connection.sendall(b"220 mail ready\r\n")
                except TimeoutError:
                    continue

        thread = threading.Thread(target=greet)
        thread.start()
        yield Address("127.0.0.1", listening.getsockname()[1])
        done.set()
        thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def test_a_free_port_is_fine_and_zero_always_is() -> None:
    assert ports.listen(f"127.0.0.1:{free_port()}", "sender").status == "ok"
    assert ports.listen("127.0.0.1:0", "sender").status == "ok"
    assert ports.page("127.0.0.1:0", "sender").status == "ok"


def test_a_port_that_is_taken_says_by_whom(serve: Serve, stranger: Address) -> None:
    bad(
        ports.listen(str(stranger), "sender"),
        "problem",
        "does not answer a health check",
        f"lsof -nP -i :{stranger.port}",
    )
    bad(ports.listen(str(serve("")), "receiver"), "problem", "another gRPC server")
    here = serve("receiver")
    bad(ports.listen(str(here), "sender"), "problem", "a kvferry receiver")
    running = ports.listen(str(here), "receiver")
    assert running.status == "ok"
    assert "the receiver is running there, with tiny" in running.message


def test_a_port_that_is_bound_but_silent_is_taken_all_the_same() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        text = f"127.0.0.1:{holder.getsockname()[1]}"
        bad(ports.listen(text, "sender"), "problem", "in use")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EACCES, "Permission denied"), ["Permission denied", "1024"]),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign"), ["no interface of this machine has the address 10.9.9.9"]),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), ["does not resolve", "IP address"]),
        (OSError(errno.EMFILE, "Too many open files"), ["Too many"]),
    ],
)
def test_an_address_that_cannot_be_bound_says_why(
    error: OSError, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_reachable", lambda _: None)
    monkeypatch.setattr("kvferry.core.ports.trouble", lambda _: error)
    bad(ports.listen("10.9.9.9:80", "sender"), "problem", *words)


def test_a_metrics_port_may_be_our_own_page_and_nothing_else(stranger: Address) -> None:
    metrics = NodeMetrics("sender", "tiny", {"kvferry": "1", "device": "cpu"})
    page = MetricsServer(metrics.registry, Address("127.0.0.1", 0))
    try:
        assert ports.page(str(page.address), "sender").status == "ok"
    finally:
        page.close()
    bad(ports.page(str(stranger), "sender"), "problem", "metrics", "another program")


# Certificates


Make = Callable[..., tuple[Path, Path]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that writes a self-signed certificate and its key."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def build(name: str = "node", days: float = 90, hosts: Sequence[str] = ("studio.local",)) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=100))
            .not_valid_after(now + dt.timedelta(days=days))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        )
        certificate, private = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        certificate.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        private.chmod(0o600)
        return certificate, private

    return build


def node(certificate: Path, key: Path, listen: str = "studio.local:7411", **more: Any) -> SenderConfig:
    return SenderConfig(listen=listen, certificate=str(certificate), key=str(key), **more)


def test_a_good_certificate_is_all_in_order(make: Make) -> None:
    certificate, key = make()
    found = [*certificates.certificate(node(certificate, key)), *certificates.authority(SenderConfig())]
    assert [(finding.name, finding.status) for finding in found] == [
        ("certificate", "ok"),
        ("certificate names", "ok"),
    ]
    assert "89 days" in found[0].message
    assert certificates.certificate(SenderConfig()) == []
    assert certificates.authority(SenderConfig(authority=str(certificate)))[0].status == "ok"


def test_certificates_that_are_expired_foreign_or_unreadable(make: Make, tmp_path: Path) -> None:
    certificate, key = make()
    expired = make("expired", days=-2)
    bad(certificates.certificate(node(*expired))[0], "problem", "expired", "kvferry certs")
    bad(certificates.authority(SenderConfig(authority=str(expired[0])))[0], "problem", "expired")
    bad(certificates.certificate(node(certificate, make("other")[1]))[0], "problem", "does not belong")
    bad(certificates.certificate(node(tmp_path / "none.pem", key))[0], "problem", "none.pem", "No such file")
    bad(certificates.certificate(node(key, key))[0], "problem", "no PEM certificate")


def test_certificates_that_end_soon_or_are_for_other_names(make: Make) -> None:
    soon = certificates.certificate(node(*make("soon", days=10)))
    bad(soon[0], "warning", "9 days")
    certificate, key = make(hosts=("studio.local", "*.ferry.test"))
    bad(certificates.certificate(node(certificate, key, "mini.local:1"))[1], "problem", "not for mini.local")
    assert certificates.certificate(node(certificate, key, "mini.ferry.test:1"))[1].status == "ok"
    bad(certificates.certificate(node(certificate, key, "a.b.ferry.test:1"))[1], "problem")
    anywhere = certificates.certificate(node(certificate, key, "0.0.0.0:7411"))[1]
    bad(anywhere, "warning", socket.gethostname())
    own = make("own", hosts=(socket.gethostname(),))
    assert certificates.certificate(node(*own, listen="[::]:7411"))[1].status == "ok"


def test_a_daemons_own_port_is_asked_over_tls(make: Make, serve: Serve, tmp_path: Path) -> None:
    certificate, key = make(hosts=("localhost",))
    listen = f"localhost:{serve(tls=(certificate, key)).port}"
    found = plan._ports("receiver", node(certificate, key, listen))[0]
    assert found.status == "ok", found
    assert "the receiver is running there" in found.message
    other = make("other", hosts=("localhost",))
    bad(plan._ports("receiver", node(*other, listen))[0], "warning", listen, "cannot be asked", "TLS")
    bad(plan._ports("receiver", node(tmp_path / "none", key, listen))[0], "warning", "No such file")
    # A peer that speaks TLS, called without it.
    address = Address("localhost", int(listen.rpartition(":")[2]))
    bad(peers.health(address, daemons.ask(address, PLAIN)), "problem", "TLS")


def test_a_key_that_others_can_read(make: Make) -> None:
    certificate, key = make()
    key.chmod(0o644)
    bad(certificates.certificate(node(certificate, key))[-1], "warning", f"chmod 600 {key}")


def test_without_the_package_the_check_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = make()
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "kvferry.core.certificates", raising=False)
    monkeypatch.delattr(kvferry.core, "certificates", raising=False)
    bad(certificates.certificate(node(certificate, key))[0], "warning", "not checked", "pip install cryptography")
    bad(certificates.authority(SenderConfig(authority=str(certificate)))[0], "warning", "not checked")


def test_token_files_are_read_as_the_daemon_would(tmp_path: Path) -> None:
    assert tokens.accepted(SenderConfig()) is None
    assert tokens.shown(SenderConfig()) is None
    listed, secret = tmp_path / "tokens.toml", tmp_path / "secret"
    config = SenderConfig(tokens=str(listed), token_file=str(secret))
    bad(tokens.accepted(config), "problem", "tokens.toml", "No such file")
    bad(tokens.shown(config), "problem", "secret", "No such file")
    entries = [f'[[tokens]]\nname = "{name}"\ndigest = "{name * 64}"\n' for name in "ab"]
    listed.write_text(entries[0] + "expires = 2020-01-01\n" + entries[1])
    bad(tokens.accepted(config), "warning", "2 token(s); expired: a")
    listed.write_text(entries[0] + "expires = 2020-01-01\n")
    bad(tokens.accepted(config), "problem", "nobody may call")
    listed.write_text("[[tokens]]\nname = 3\n")
    bad(tokens.accepted(config), "problem", "tokens.toml")
    listed.write_text(entries[1])
    secret.write_text(new_secret())
    secret.chmod(0o644)
    bad(tokens.shown(config), "warning", f"chmod 600 {secret}")
    secret.chmod(0o600)
    found = (tokens.accepted(config), tokens.shown(config))
    assert [finding.status for finding in found if finding] == ["ok", "ok"]


# The disk


def test_a_store_that_is_there_or_will_be(tmp_path: Path) -> None:
    assert disk.writable(tmp_path).message == f"{tmp_path} can be written"
    assert disk.writable(tmp_path / "a" / "b").message.endswith("will be made")
    assert list(tmp_path.iterdir()) == []
    assert disk.space(tmp_path / "a").status in ("ok", "warning")


def test_a_store_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    bad(disk.writable(tmp_path / "file" / "store"), "problem", "Not a directory", "in the way")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        bad(disk.writable(tmp_path / "store"), "problem", "Permission denied", "chmod")
        tmp_path.chmod(0o700)
    elif Path("/proc/self").is_dir():
        bad(disk.writable(Path("/proc/self/store")), "problem", "/proc/self")


@pytest.mark.parametrize(
    ("number", "word"), [(errno.EACCES, "chmod"), (errno.ENOSPC, "free some room"), (errno.EROFS, "read-only")]
)
def test_a_disk_that_takes_no_more_is_noticed_at_the_sync(
    number: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    bad(disk.writable(tmp_path), "problem", os.strerror(number), word)
    assert list(tmp_path.iterdir()) == []


def test_little_room_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    bad(disk.space(tmp_path), "warning", "1.0 MB")


def test_a_ledger_of_its_own_must_be_a_file_that_can_be_written(tmp_path: Path) -> None:
    assert disk.ledger(ReceiverConfig()) is None
    assert disk.ledger(SenderConfig()) is None
    bad(disk.ledger(ReceiverConfig(ledger=str(tmp_path))), "problem", "is a directory")
    good = disk.ledger(ReceiverConfig(ledger=str(tmp_path / "deep" / "ledger.jsonl")))
    assert good is not None
    assert good.status == "ok"


# Peers


def failing(error: OSError) -> Callable[[Address, float], socket.socket]:
    def connect(_: Address, __: float) -> socket.socket:
        raise error

    return connect


def test_a_healthy_peer_is_described_with_its_link(serve: Serve) -> None:
    found = peers.peer(serve(), PLAIN, System())
    assert [finding.status for finding in found] == ["ok"] * 5, found
    assert [finding.name for finding in found] == ["peer name", "peer", "link", "health", "clock"]
    assert "receiver" in found[3].message
    assert "ms a call" in found[3].message
    if sys.platform.startswith("linux"):
        assert "lo (loopback), MTU" in found[2].message


def test_a_dead_peer_is_refused_at_once() -> None:
    found = peers.peer(Address("127.0.0.1", free_port()), PLAIN, System())
    assert len(found) == 2
    bad(found[1], "problem", "refused", "start the daemon there", "listen")


ROUTED = OSError(errno.EHOSTUNREACH, "No route to host")


@pytest.mark.parametrize("error", [ROUTED, OSError(errno.EPERM, "Operation not permitted"), TimeoutError("timed out")])
@pytest.mark.parametrize("host", ["192.168.1.20", "10.0.0.9", "169.254.3.4"])
def test_a_mac_that_is_kept_off_the_local_network_is_told_where_to_allow_it(error: OSError, host: str) -> None:
    road, finding = peers.reach(Address(host, 7412), MAC, failing(error))
    assert road is None
    bad(finding, "problem", host, SETTINGS, "launchd", "ssh")


def test_the_same_elsewhere_speaks_of_network_and_firewall() -> None:
    routed = bad(peers.reach(Address("192.168.1.20", 7412), LINUX, failing(ROUTED))[1], "problem", "firewall")
    silent = bad(
        peers.reach(Address("192.168.1.20", 7412), LINUX, failing(TimeoutError("timed out")))[1],
        "problem",
        "no answer within 3 s",
        "awake",
    )
    public = bad(peers.reach(Address("8.8.8.8", 7412), MAC, failing(ROUTED))[1])
    for finding in (routed, silent, public):
        assert "Local Network" not in finding.remedy


def test_a_name_that_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    found = peers.peer(Address("studio.local", 7412), PLAIN, LINUX)
    assert len(found) == 1
    bad(found[0], "problem", "studio.local does not resolve", "IP address", "avahi")
    assert "avahi" not in peers.resolve(Address("studio.local", 7412), MAC).remedy


def test_a_peer_that_is_none_of_ours(serve: Serve, stranger: Address) -> None:
    bad(peers.health(stranger, daemons.ask(stranger, PLAIN, 2.0)), "problem", str(stranger), "7412")
    other = serve("")
    bad(peers.health(other, daemons.ask(other, PLAIN)), "problem", "no kvferry daemon", "7411")
    stopping = serve(status=health_pb2.HealthCheckResponse.NOT_SERVING)
    bad(peers.health(stopping, daemons.ask(stopping, PLAIN)), "problem", "is stopping")


def test_a_peer_of_another_version_is_a_warning(serve: Serve) -> None:
    address = serve(version="99.0")
    bad(peers.health(address, daemons.ask(address, PLAIN)), "warning", "99.0", "same version")


@pytest.mark.parametrize(
    ("skew", "status", "words"),
    [
        (0.5, "ok", []),
        (30.0, "warning", ["30.0 s ahead of", "timedatectl"]),
        (-30.0, "warning", ["30.0 s behind"]),
        (4000.0, "problem", ["expired or not yet valid", "Date & Time"]),
        (None, "warning", ["not compared"]),
    ],
)
def test_clocks_are_compared(serve: Serve, skew: float | None, status: str, words: list[str]) -> None:
    address = serve(skew=skew)
    (finding,) = peers.clock(address, daemons.ask(address, PLAIN))
    assert finding.status == status, finding
    if status != "ok":
        bad(finding, status, *words)


def test_a_way_through_a_vpn_is_pointed_out() -> None:
    def route(interface: str) -> System:
        text = f"  interface: {interface}\n recvpipe mtu expire\n 0 1380 0\n"
        return System("darwin", "arm64", (3, 12, 1), lambda arguments: text if "route" in arguments[0] else "")

    road = peers.Road("10.8.0.2", "192.168.1.20", 0.001)
    bad(peers.link(road, route("utun5")), "warning", "utun5, MTU 1380", "VPN")
    assert peers.link(road, route("en0")).message.startswith("192.168.1.20 is reached by en0, MTU 1380")
    assert peers.link(road, MAC).status == "ok"


# The command


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path) -> Callable[..., Result]:
    """Return the command with a quick MLX, and both daemons configured to be well."""
    monkeypatch.setattr(runtime, "probe_mlx", lambda: GOOD_PROBE)
    monkeypatch.setattr(runtime, "compiler", lambda _: None)
    for role in ("SENDER", "RECEIVER"):
        monkeypatch.setenv(f"KVFERRY_{role}_MODEL", str(model_dir))
        monkeypatch.setenv(f"KVFERRY_{role}_LISTEN", f"127.0.0.1:{free_port()}")
        monkeypatch.setenv(f"KVFERRY_{role}_STORE", str(tmp_path / role))
    monkeypatch.setattr(system, "System", lambda: LINUX)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["doctor", *arguments], catch_exceptions=False)

    return invoke


def findings_of(result: Result) -> list[dict[str, str]]:
    told = json.loads(result.stdout)
    assert set(told) == {"ok", "findings"}
    assert told["ok"] is (result.exit_code == 0)
    assert all(set(finding) == {"name", "status", "message", "remedy"} for finding in told["findings"])
    found: list[dict[str, str]] = told["findings"]
    return found


def test_a_machine_in_order_exits_with_zero(doctor: Callable[..., Result]) -> None:
    result = doctor("--json")
    found = findings_of(result)
    assert result.exit_code == 0, found
    names = [finding["name"] for finding in found]
    assert names.count("port") == names.count("store") == names.count("configuration") == 2
    assert names.count("model") == 1
    assert {"python", "mlx", "memory", "disk"} <= set(names)


def test_a_problem_exits_with_one_and_is_printed_with_its_remedy(
    doctor: Callable[..., Result], model_dir: Path
) -> None:
    (model_dir / "tokenizer.json").unlink()
    dead = f"127.0.0.1:{free_port()}"
    result = doctor("--role", "receiver", "--peer", dead)
    assert result.exit_code == 1
    assert "no tokenizer.json" in result.stdout
    assert f"problem  peer               {dead}: Connection refused" in result.stdout
    assert "→ start the daemon there" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("2 problems, ")
    assert "sender" not in result.stdout


@pytest.mark.parametrize(("key", "others"), [("sender", 1), ("ledger", 0)])
def test_the_sender_that_a_receivers_file_names_is_a_peer(
    doctor: Callable[..., Result], tmp_path: Path, key: str, others: int
) -> None:
    path, dead = tmp_path / "my-receiver.toml", f"127.0.0.1:{free_port()}"
    path.write_text(f'{key} = "{dead}"\n')
    found = findings_of(doctor("--json", "--config", str(path)))
    peers = [finding for finding in found if finding["name"] == "peer"]
    assert [dead in finding["message"] for finding in peers] == [True] * others


def test_a_configuration_that_is_wrong_is_a_finding(doctor: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "my-sender.toml"
    path.write_text("chunk_bytes = 1\n")
    result = doctor("--json", "--config", str(path))
    assert result.exit_code == 1
    (problem,) = [finding for finding in findings_of(result) if finding["status"] == "problem"]
    assert problem["name"] == "configuration"
    assert "chunk_bytes" in problem["message"]
    assert "deploy/sender.toml" in problem["remedy"]


def test_a_senders_file_has_its_receiver_looked_for(
    doctor: Callable[..., Result], tmp_path: Path, serve: Serve
) -> None:
    path = tmp_path / "sender.toml"
    path.write_text(f'receiver = "{serve()}"\n')
    result = doctor("--json", "--config", str(path))
    names = [finding["name"] for finding in findings_of(result)]
    assert result.exit_code == 0
    assert names[-5:] == ["peer name", "peer", "link", "health", "clock"]


def test_a_peer_over_tls_is_called_as_the_options_or_the_environment_say(
    doctor: Callable[..., Result], make: Make, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make(hosts=("localhost",))
    peer = f"localhost:{serve(tls=(certificate, key)).port}"

    def health(*arguments: str) -> str:
        found = findings_of(doctor("--json", "--peer", peer, *arguments))
        (status,) = [finding["status"] for finding in found if finding["name"] == "health"]
        return status

    assert health() == "problem"
    assert health("--authority", str(certificate)) == "ok"
    monkeypatch.setenv("KVFERRY_AUTHORITY", str(certificate))
    assert health() == "ok"
    # The peer that a daemon's own file names is called as that daemon would.
    path = certificate.parent / "sender.toml"
    path.write_text(f'receiver = "{peer}"\n')
    found = findings_of(doctor("--json", "--config", str(path)))
    assert [finding["status"] for finding in found if finding["name"] == "health"] == ["problem"]


def test_a_file_that_could_be_of_either_daemon_needs_the_role(doctor: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "kvferry.toml"
    path.write_text("")
    result = doctor("--config", str(path))
    assert result.exit_code == 2
    assert "--role" in result.stderr
    assert doctor("--config", str(path), "--role", "receiver").exit_code == 0


def test_a_peer_that_is_no_address_is_one_clear_error(doctor: Callable[..., Result]) -> None:
    result = doctor("--peer", "fe80::1")
    assert result.exit_code == 2
    assert "--peer" in result.stderr


def test_an_unprotected_address_is_pointed_out(doctor: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_RECEIVER_LISTEN", f"0.0.0.0:{free_port()}")
    monkeypatch.setenv("KVFERRY_RECEIVER_INSECURE", "true")
    found = findings_of(doctor("--json", "--role", "receiver"))
    warned = {finding["name"] for finding in found if finding["status"] == "warning"}
    assert "configuration" in warned
