"""Which argument is which document: nothing that looks like a slip is ever sent."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvferry.client import _documents
from kvferry.client._requests import send_parts, send_start
from kvferry.core.errors import InvalidRequestError, TooLargeError

MIB = 1024 * 1024


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_bytes(b"from the file")
    (tmp_path / "two words.txt").write_bytes(b"from the file")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_bytes(b"from the file")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("value", ["notes", "two words.txt", "sub/a.txt", "./notes", Path("notes"), Path("sub/a.txt")])
def test_what_names_a_file_is_that_file(value: str | Path) -> None:
    assert _documents.read(value, None).data == b"from the file"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "value",
    [
        "The access code is 4417.",
        "Version 2.5 is out",
        "and/or is a bad habit of writers",
        "notes\nand more",
        "notes\r\n\r\nand more",
        "北の倉庫の暗証番号は4417です。",
        "a " * 200 + "report.txt",
        "x" * 300,
        "语" * 250,
        "Ends in three dots...",
    ],
)
def test_what_names_none_and_looks_like_none_is_the_text(value: str) -> None:
    assert _documents.read(value, None).data == value.encode()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "value",
    [
        "report.txt",
        "report",
        "my report.txt",
        "report.txt\n",
        "sub/b.txt",
        "/etc/no such thing",
        "./no such thing",
        "~/no such thing",
        r"C:\no such thing",
        "資料/報告",
        "資料.txt",
        "-",
    ],
)
def test_a_name_of_no_file_is_refused_with_the_way_out(value: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"no such file; give text= to send these") as caught:
        _documents.read(value, None)
    assert caught.value.fields["value"] == value
    assert _documents.read(None, value).data == value.encode()


@pytest.mark.usefixtures("folder")
def test_a_directory_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'sub' is a directory"):
        _documents.read("sub", None)
    with pytest.raises(InvalidRequestError, match=r"document: sub: .*directory"):
        _documents.read(Path("sub"), None)


@pytest.mark.usefixtures("folder")
def test_a_missing_path_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="document: gone: No such file"):
        _documents.read(Path("gone"), None)


@pytest.mark.parametrize("arguments", [(None, None), ("notes", "text"), (Path("notes"), "text")])
def test_exactly_one_document(arguments: tuple[Any, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="either the document or text="):
        _documents.read(*arguments)


@pytest.mark.parametrize("value", ["", b"", io.BytesIO(b"")])
def test_an_empty_document_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="document: is empty"):
        _documents.read(value, None)


def test_other_types_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a list is neither"):
        _documents.read(["text"], None)  # type: ignore[arg-type]


CRLF = b"\xef\xbb\xbfone\r\ntwo\rthree\n"


def test_bytes_travel_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "dos.txt"
    path.write_bytes(CRLF)
    with path.open("rb") as binary, path.open(encoding="utf-8", newline="") as text:
        documents = [_documents.read(source, None) for source in (path, str(path), CRLF, binary, text)]
    assert {document.data for document in documents} == {CRLF}
    assert {document.digest for document in documents} == {blake3(CRLF).digest()}
    # The byte order mark is one code point.
    assert {document.characters for document in documents} == {16}


def test_a_file_that_rewrites_line_endings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dos.txt"
    path.write_bytes(CRLF)
    with path.open(encoding="utf-8") as file, pytest.raises(InvalidRequestError, match="newline=''"):
        _documents.read(file, None)


def test_an_open_file_without_such_endings_is_read(tmp_path: Path) -> None:
    path = tmp_path / "unix.txt"
    path.write_text("one\ntwo\n", encoding="utf-8")
    with path.open(encoding="utf-8") as file:
        assert _documents.read(file, None).data == b"one\ntwo\n"
    assert _documents.read(io.StringIO("one\r\ntwo"), None).data == b"one\r\ntwo"


def test_a_pipe_is_read_to_its_end() -> None:
    source, sink = os.pipe()
    with os.fdopen(source, "rb", buffering=0) as file, os.fdopen(sink, "wb", buffering=0) as writer:
        writer.write(b"first ")
        parts = iter([b"second"])

        class Raw:
            def read(self, size: int) -> bytes:
                data: bytes = file.read(size)
                for part in parts:
                    writer.write(part)
                    writer.close()
                return data

        assert _documents.read(Raw(), None).data == b"first second"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"caf\xe9!", r"not UTF-8 at byte 3 \(0xe9\)"),
        (b"abc\xc3", r"not UTF-8 at byte 3 \(0xc3\)"),
        ("plain".encode("utf-16"), r"not UTF-8 at byte 0 \(0xff\); it looks like UTF-16"),
    ],
)
def test_undecodable_bytes_are_located(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(data)
    for source in (data, path, io.BytesIO(data)):
        with pytest.raises(InvalidRequestError, match=message):
            _documents.read(source, None)


def test_half_a_surrogate_pair_is_located() -> None:
    with pytest.raises(InvalidRequestError, match=r"character at 2 \(U\+D83D\)"):
        _documents.read(None, "ab\ud83dcd")


def test_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_documents, "MAX_DOCUMENT_BYTES", 10)
    path = tmp_path / "large.txt"
    path.write_bytes(b"12345678901")
    for source in (path, b"12345678901", io.BytesIO(b"12345678901"), io.StringIO("ééééé é")):
        with pytest.raises(TooLargeError, match="more than 10 bytes") as caught:
            _documents.read(source, None)
        assert caught.value.fields["limit"] == 10
    assert _documents.read(b"1234567890", None).characters == 10


@given(st.text(min_size=1))
def test_any_text_is_sent_as_it_is(text: str) -> None:
    document = _documents.read(None, text)
    assert document.data.decode() == text
    assert document.characters == len(text)


@given(st.text(), st.text())
def test_text_with_a_line_break_inside_is_never_a_name(before: str, after: str) -> None:
    text = f"{before}\n.{after}"
    assert _documents.read(text, None).data == text.encode()


@pytest.mark.parametrize("size", [1, MIB - 1, MIB, MIB + 1, 3 * MIB + 7])
def test_pieces_are_small_and_whole(size: int) -> None:
    document = _documents.read(os.urandom(size // 2 + 1).hex()[:size].encode(), None)
    start = send_start(document, method="B1", receiver="", question=None, system=None, parameters={})
    first, *rest = send_parts(start, document)

    assert first.WhichOneof("part") == "start"
    assert (first.start.text_bytes, first.start.text_digest) == (size, blake3(document.data).digest())
    assert b"".join(request.text for request in rest) == document.data
    assert max(len(request.text) for request in rest) <= MIB
    assert len(rest) == -(-size // MIB)
