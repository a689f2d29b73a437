"""The download of an archive: interrupted, wrong and malicious ones, from a local server."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.data import archive
from engine.data.archive import Archive, download_archive, open_downloaded_source
from engine.data.sources.open import open_source_for_preflight
from support.data.photo_folder import write_photo_folder
from support.messages import raises_problem


@dataclass
class Served:
    """What the server sends: `limit` bytes before it closes the connection, and whether it knows ranges."""

    content: bytes
    limit: int | None = None
    has_ranges: bool = True
    ranges: list[str | None] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    def __init__(self, served: Served, *args: object) -> None:
        self.served = served
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        requested = self.headers["Range"]
        self.served.ranges.append(requested)
        start = int(requested.removeprefix("bytes=").rstrip("-")) if requested and self.served.has_ranges else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.served.content) - start))
        self.end_headers()
        self.wfile.write(self.served.content[start : self.served.limit])

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served(tmp_path: Path) -> Served:
    write_photo_folder(tmp_path / "flower_photos")
    return Served(packed(lambda tar: tar.add(tmp_path / "flower_photos", "flower_photos")))


@pytest.fixture
def published(served: Served) -> Iterator[Archive]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, served))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Archive(f"http://127.0.0.1:{server.server_port}/photos.tgz", len(served.content), "flower_photos")
    server.shutdown()
    thread.join()
    server.server_close()


def packed(fill: object) -> bytes:
    """Return the bytes of a .tgz that `fill` writes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        fill(tar)  # type: ignore[operator]
    return buffer.getvalue()


def download(published: Archive, folder: Path, checksum: str | None = None) -> list[str]:
    messages: list[str] = []
    download_archive(published, folder, checksum, messages.append)
    return messages


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_run_downloads_missing_folder_and_the_form_does_not(
    published: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(archive.ARCHIVES, "flower-photos", published)
    path = tmp_path / "data" / "photos"
    config = resolve_config("flowers", [f"data.path={path}", "data.download=true", "model.weights=null"]).config
    assert open_source_for_preflight(config) is None
    assert not path.exists()
    source = open_downloaded_source(config, lambda _: None)
    assert source is not None and source.classes == ("cat", "dog")
    assert names(path.parent) == ["photos"]


def test_missing_folder_without_download_says_how_to_get_it(tmp_path: Path) -> None:
    config = resolve_config("flowers", [f"data.path={tmp_path}/photos", "model.weights=null"]).config
    with raises_problem("not-found", "data.path", f"{tmp_path}/photos ", " flower-photos ", "data.download=true"):
        open_source_for_preflight(config)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_interrupted_download_continues(published: Archive, served: Served, tmp_path: Path, has_ranges: bool) -> None:
    served.limit, served.has_ranges = 1000, has_ranges
    with raises_problem("download-failed", "data.download", " 1 KiB "):
        download(published, tmp_path / "photos")
    assert (tmp_path / ".photos.part").stat().st_size == 1000
    served.limit = None
    messages = download(published, tmp_path / "photos", hashlib.sha256(served.content).hexdigest())
    assert served.ranges == [None, "bytes=1000-"]
    assert messages[0].startswith("continuing" if has_ranges else "downloading")
    assert names(tmp_path) == ["flower_photos", "photos"]
    assert names(tmp_path / "photos") == ["cat", "dog"]


def test_archive_of_another_size_or_checksum_is_refused_and_deleted(
    published: Archive, served: Served, tmp_path: Path
) -> None:
    smaller = Archive(published.url, published.size_bytes - 1, published.folder)
    with raises_problem("data-changed", "data.download", published.url, f" {smaller.size_bytes:,} "):
        download(smaller, tmp_path / "photos")
    actual = hashlib.sha256(served.content).hexdigest()
    with raises_problem("checksum-mismatch", "data.checksum", published.url, f" {actual}, ", "0" * 64):
        download(published, tmp_path / "photos", "0" * 64)
    assert names(tmp_path) == ["flower_photos"]


def member(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    "bad",
    [
        member("flower_photos/../../x"),
        member("/flower_photos/x"),
        member("flower_photos/x", tarfile.SYMTYPE),
        member("flower_photos/x", tarfile.LNKTYPE),
        member("flower_photos/x", tarfile.CHRTYPE),
    ],
    ids=["parent", "absolute", "link", "hard link", "device"],
)
def test_archive_with_member_outside_or_link_is_refused(
    bad: tarfile.TarInfo, published: Archive, served: Served, tmp_path: Path
) -> None:
    served.content = packed(lambda tar: tar.addfile(bad))
    with raises_problem("damaged", "data.download", published.url, f"{bad.name.removeprefix('/')} "):
        download(Archive(published.url, len(served.content), "flower_photos"), tmp_path / "photos")
    assert names(tmp_path) == ["flower_photos"]


@pytest.mark.parametrize("position", [30, -8], ids=["data", "CRC"])
def test_damaged_archive_is_refused_and_deleted(
    position: int, published: Archive, served: Served, tmp_path: Path
) -> None:
    content = bytearray(served.content)
    content[position] ^= 0xFF
    served.content = bytes(content)
    with raises_problem("damaged", "data.download", published.url):
        download(published, tmp_path / "photos")
    assert names(tmp_path) == ["flower_photos"]


def test_unpacking_deletes_what_a_killed_one_left(published: Archive, tmp_path: Path) -> None:
    (tmp_path / ".photos.tmp" / "flower_photos" / "old").mkdir(parents=True)
    download(published, tmp_path / "photos")
    assert names(tmp_path) == ["flower_photos", "photos"]
    assert names(tmp_path / "photos") == ["cat", "dog"]


def test_server_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    gone = Archive("http://127.0.0.1:9/photos.tgz", 10, "flower_photos")
    with raises_problem("download-failed", "data.download", gone.url, str(tmp_path / "new" / "photos")):
        download(gone, tmp_path / "new" / "photos")
    assert names(tmp_path) == []
