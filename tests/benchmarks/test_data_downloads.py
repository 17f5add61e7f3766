"""Downloads from registries and hubs, with registries made by the tests in place of the public ones."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.data import downloads, hub, registry, sources
from benchmarks.data.errors import DataError, NoAnswerError, UnreachableError
from tests.benchmarks.data_cases import publish, tiny, write_bert, write_layout

FILES = {"package/data/a.txt": b"first", "package/data/b.txt": b"second", "package/../evil.txt": b"never read"}
PACKAGE = registry.Package("npm", "made", "1.0.0", "package/data", ("a.txt", "b.txt"), 1000, 1000)


def tarball() -> bytes:
    """An npm package with the files."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, content in FILES.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return target.getvalue()


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A registry on this machine, for a user without npm; `answer` and `length` say what it sends."""
    state = SimpleNamespace(answer=tarball(), length=None, asked=[])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            self.send_response(200 if state.answer else 404)
            self.send_header("Content-Length", str(state.length or len(state.answer)))
            self.end_headers()
            self.wfile.write(state.answer)

        def do_HEAD(self) -> None:
            self.send_error(405)

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("npm_config_registry", state.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(registry.shutil, "which", lambda tool: None)
    yield state
    server.shutdown()
    server.server_close()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_without_npm_the_tarball_comes_from_its_registry(web: SimpleNamespace, tmp_path: Path) -> None:
    members = registry.fetch(PACKAGE, tmp_path)
    assert web.asked == ["/made/-/made-1.0.0.tgz"]
    assert contents(members) == {"a.txt": b"first", "b.txt": b"second"}
    assert not list(tmp_path.rglob("evil.txt"))


def test_half_a_tarball_is_refused(web: SimpleNamespace, tmp_path: Path) -> None:
    web.length = len(web.answer)
    web.answer = web.answer[: web.length // 2]
    with pytest.raises(UnreachableError, match=rf"{len(web.answer)} of {web.length} bytes came|IncompleteRead"):
        registry.fetch(PACKAGE, tmp_path)


def test_a_damaged_tarball_is_refused(web: SimpleNamespace, tmp_path: Path) -> None:
    web.answer = web.answer[: len(web.answer) // 2]
    with pytest.raises(DataError, match=r"npm made 1.0.0: the archive is damaged or lacks a file"):
        registry.fetch(PACKAGE, tmp_path)


def test_a_tarball_without_the_file_is_refused(web: SimpleNamespace, tmp_path: Path) -> None:
    package = registry.Package("npm", "made", "1.0.0", "package/data", ("c.txt",), 1000, 1000)
    with pytest.raises(DataError, match=r"lacks a file \('package/data/c.txt'\)"):
        registry.fetch(package, tmp_path)


def test_a_package_the_registry_does_not_have_is_unreachable(web: SimpleNamespace, tmp_path: Path) -> None:
    web.answer = b""
    with pytest.raises(UnreachableError, match="Not Found"):
        registry.fetch(PACKAGE, tmp_path)


def test_the_registry_of_npmrc_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("npm_config_registry", raising=False)
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.npm_registry() == registry.NPM_REGISTRY
    (tmp_path / ".npmrc").write_text("color=false\nregistry = https://npm.example.org/\n")
    assert registry.npm_registry() == "https://npm.example.org/"


def test_pip_takes_a_wheel_apart_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / "made_wheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("made_wheel/__init__.py", "raise SystemExit('this was run')")
        wheel.writestr("made_wheel/data/a.txt", b"first")
        wheel.writestr("made_wheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-wheel\nVersion: 1.0\n")
        wheel.writestr("made_wheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("made_wheel-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    package = registry.Package("PyPI", "made-wheel", "1.0", "made_wheel/data", ("a.txt",), 1000, 1000)
    assert contents(registry.fetch(package, tmp_path / "work")) == {"a.txt": b"first"}


def watched(script: str, folder: Path) -> None:
    downloads.run_watched([sys.executable, "-c", script], folder, 1000, "made", environment={})


def test_a_tool_that_gets_nothing_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "START_SECONDS", 0.3)
    with pytest.raises(NoAnswerError, match="nothing came"):  # not after its end: that would be no error
        watched("import time; time.sleep(60)", tmp_path)


def test_a_tool_that_stalls_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(downloads, "START_BYTES", 10)
    with pytest.raises(NoAnswerError, match="nothing came"):
        watched("open('half', 'wb').write(bytes(500)); import time; time.sleep(60)", tmp_path)


@pytest.mark.parametrize(
    ("printed", "error", "message"),
    [
        ("npm error code EAI_AGAIN", NoAnswerError, "no connection to the registry"),
        ("ERROR: No matching distribution found", UnreachableError, "No matching distribution"),
        ("", UnreachableError, "ended with code 3"),
    ],
)
def test_a_tool_that_fails_says_why(printed: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message) as raised:
        watched(f"print({printed!r}); raise SystemExit(3)", tmp_path)
    assert type(raised.value) is error


def test_a_tool_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="cannot be run"):
        downloads.run_watched(["./no-such-tool"], tmp_path, 10, "made", environment={})


def test_a_hub_is_asked_whether_it_answers(web: SimpleNamespace) -> None:
    assert downloads.answers(web.url)
    assert not downloads.answers("http://127.0.0.1:9/")


def zipped(folder: Path, top: str) -> bytes:
    """A folder's files as the archive that is published."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for file in sorted((folder / top).iterdir()):
            archive.write(file, f"{top}/{file.name}")
        archive.writestr(f"{top}/test.tsv", "index\tquestion\tsentence\n")  # published too, and not read
    return target.getvalue()


def test_qnli_comes_from_the_published_archive_with_nothing_else_installed(
    web: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = tiny("qnli")
    write_layout("GLUE", tmp_path / "glue", content)
    publish(monkeypatch, "qnli", content)
    web.answer = zipped(tmp_path / "glue", "QNLI")
    (package,) = registry.PACKAGES["qnli"]
    assert package.version == "https://dl.fbaipublicfiles.com/glue/data/QNLIv2.zip"
    local = replace(package, version=f"{web.url}/glue/data/QNLIv2.zip")
    monkeypatch.setattr(registry, "PACKAGES", registry.PACKAGES | {"qnli": (local,)})
    monkeypatch.delenv("GGDA_OFFLINE", raising=False)
    origin = sources.obtain("qnli", None, allow_stand_in=False)
    assert (origin.source, origin.stand_in) == ("GLUE QNLIv2", False)
    assert web.asked[-1] == "/glue/data/QNLIv2.zip"
    for part, values in content.items():
        np.testing.assert_array_equal(origin.content[part], values)
    again = sources.obtain("qnli", None, allow_stand_in=False)
    assert again.source == "cache (from GLUE QNLIv2)"


def test_a_publisher_that_does_not_answer_costs_no_download(tmp_path: Path) -> None:
    package = replace(registry.PACKAGES["qnli"][0], version="http://127.0.0.1:9/QNLIv2.zip")
    with pytest.raises(NoAnswerError, match="does not answer"):
        registry.fetch(package, tmp_path)


class Hub:
    """A server that speaks the hub's protocol for one model: its list of files, their headers and contents."""

    COMMIT = "c" * 40

    def __init__(self, folder: Path, repository: str) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.repository, self.asked = repository, list[str]()
        hub_of = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def answer(self, with_body: bool) -> None:
                path = self.path.partition("?")[0]
                hub_of.asked.append(f"{self.command} {path}")
                status, body, headers = hub_of.answer(path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        about = {"id": self.repository, "sha": self.COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
        if path == "/":
            return 200, b"", {}
        if path.startswith(f"/api/models/{self.repository}/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in self.files.items()
            ]
            return 200, json.dumps(listed).encode(), {"Content-Type": "application/json"}
        if path.startswith(f"/api/models/{self.repository}"):
            return 200, json.dumps(about).encode(), {"Content-Type": "application/json"}
        name = path.rpartition("/")[2]
        if path == f"/{self.repository}/resolve/{self.COMMIT}/{name}" and name in self.files:
            body = self.files[name]
            etag = f'"{hashlib.sha256(body).hexdigest()}"'
            return 200, body, {"ETag": etag, "X-Repo-Commit": self.COMMIT, "X-Linked-Size": str(len(body))}
        return 404, b"", {"X-Error-Code": "EntryNotFound"}


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    write_bert(tmp_path / "repository")
    for name in registry.BERT_MEMBERS:
        if not (tmp_path / "repository" / name).exists():
            (tmp_path / "repository" / name).write_text(f"{{}} {name}")
    (tmp_path / "repository" / "pytorch_model.bin").write_bytes(b"not asked for")
    served = Hub(tmp_path / "repository", hub.BERT)
    threading.Thread(target=served.server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    yield served
    served.server.shutdown()
    served.server.server_close()


def test_bert_comes_from_a_hub_that_speaks_its_protocol(hugging_face: Hub, tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    hub.fetch_bert(tmp_path / "into")
    assert contents(tmp_path / "into") == {name: hugging_face.files[name] for name in registry.BERT_MEMBERS}
    assert not any("pytorch_model.bin" in asked for asked in hugging_face.asked)


def test_a_hub_without_the_model_is_an_error_with_its_name(hugging_face: Hub, tmp_path: Path) -> None:
    hugging_face.repository = "somebody/else"
    with pytest.raises((DataError, UnreachableError), match="Hugging Face: "):
        hub.fetch_bert(tmp_path)


def test_a_hub_that_does_not_answer_costs_no_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NoAnswerError, match="does not answer"):
        hub.fetch_bert(tmp_path)
