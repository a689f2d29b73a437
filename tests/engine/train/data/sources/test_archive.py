"""The download of an archive: complete, torn and wrong ones, from a local server."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.train.data.sources import open as archive
from engine.train.data.sources.open import Archive, download_archive, open_downloaded_source, open_source_for_preflight
from support.data.photo_folder import write_photo_folder
from support.messages import raises_problem


@dataclass
class Served:
    """What the server sends: `limit` bytes before it closes the connection."""

    content: bytes
    limit: int | None = None


class Handler(BaseHTTPRequestHandler):
    def __init__(self, served: Served, *args: object) -> None:
        self.served = served
        super().__init__(*args)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.served.content)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.served.content[: self.served.limit])

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served(tmp_path: Path) -> Served:
    write_photo_folder(tmp_path / "flower_photos")
    with tarfile.open(fileobj=(buffer := io.BytesIO()), mode="w:gz") as tar:
        tar.add(tmp_path / "flower_photos", "flower_photos")
    return Served(buffer.getvalue())


@pytest.fixture
def published(served: Served) -> Iterator[Archive]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, served))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Archive(f"http://127.0.0.1:{server.server_port}/photos.tgz", "1 KiB", "flower_photos")
    server.shutdown()
    thread.join()
    server.server_close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_run_downloads_missing_folder_and_the_form_does_not(
    published: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(archive.ARCHIVES, "flower-photos", published)
    path = tmp_path / "data" / "photos"
    config = resolve_config("flowers", [f"data.path={path}", "data.download=true", "model.weights=null"]).config
    assert open_source_for_preflight(config) is None
    assert not path.exists()
    said: list[str] = []
    source = open_downloaded_source(config, said.append)
    assert source is not None and source.classes == ("cat", "dog")
    assert names(path.parent) == ["photos"]
    assert said == [f"downloading {published.url} (1 KiB)"] and not capfd.readouterr().err


def test_missing_folder_without_download_says_how_to_get_it(tmp_path: Path) -> None:
    config = resolve_config("flowers", [f"data.path={tmp_path / 'photos'}", "model.weights=null"]).config
    with raises_problem("not-found", "data.path", "data.download=true"):
        open_source_for_preflight(config)


@pytest.mark.parametrize("limit", [0, 100])
def test_torn_download_is_one_sentence_and_leaves_nothing(
    published: Archive, served: Served, tmp_path: Path, limit: int
) -> None:
    served.limit = limit
    with raises_problem("download-failed", "data.download", published.url):
        download_archive(published, tmp_path / "data" / "photos", None)
    assert names(tmp_path / "data") == []


def test_archive_with_another_checksum_is_refused(published: Archive, served: Served, tmp_path: Path) -> None:
    folder, checksum = tmp_path / "data" / "photos", hashlib.sha256(served.content).hexdigest()
    with raises_problem("checksum-mismatch", "data.checksum", checksum):
        download_archive(published, folder, "0" * 64)
    assert names(folder.parent) == []
    download_archive(published, folder, checksum.upper())
    assert names(folder) == ["cat", "dog"]
