"""Downloads with a progress bar that give up early, by a command such as pip or npm, or over HTTP."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm.auto import tqdm

from benchmarks.data.errors import NoAnswerError, NoRoomError, UnreachableError

START_SECONDS, START_BYTES = 15.0, 100_000  # a tool with fewer bytes after this time has no connection
STALL_SECONDS = 30.0  # a tool that gets no more bytes for this time has lost the connection
CONNECT_SECONDS = 4.0
NO_CONNECTION = (  # in the logs of npm and of pip
    *("EAI_AGAIN", "ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "EHOSTUNREACH", "ETIMEDOUT"),
    *("NewConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionResetError"),
)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
POLL_SECONDS = 0.1


def run_watched(command: Sequence[str], folder: Path, size: int, title: str, *, environment: Mapping[str, str]) -> None:
    """Run a command that downloads about `size` bytes into `folder`, and stop it if no more bytes arrive.

    Raises:
        UnreachableError: the command failed or stalled; the message holds the error that it printed.
    """
    log = folder / "log.txt"
    with log.open("wb") as output, progress(size, title) as bar:
        try:
            process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **environment},
            )  # fmt: skip
        except OSError as error:
            raise UnreachableError(f"{command[0]} cannot be run ({error.strerror})") from error
        try:
            wait_while_bytes_come(process, folder, log, size, bar)
            if process.returncode == 0:
                bar.update(size - bar.n)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        text = log.read_text("utf-8", errors="replace")
        if any(sign in text for sign in NO_CONNECTION):
            raise NoAnswerError("no connection to the registry")
        raise UnreachableError(error_in(text) or f"{Path(command[0]).name} ended with code {process.returncode}")


def wait_while_bytes_come(process: subprocess.Popen[bytes], folder: Path, log: Path, size: int, bar: tqdm) -> None:
    """Wait for a process that downloads into a folder.

    Raises:
        NoAnswerError: no bytes arrived for some time.
    """
    seen, start = 0, time.monotonic()
    last = start
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        now = bytes_in(folder, log)
        if now > seen:
            seen, last = now, time.monotonic()
            bar.update(min(seen, size) - bar.n if seen > START_BYTES else 0)  # the first bytes are the tool's own files
        began, limit = (last, STALL_SECONDS) if seen > START_BYTES else (start, START_SECONDS)
        if time.monotonic() - began > limit:
            raise NoAnswerError(f"nothing came for {limit:.0f} s")


def fetch_url(url: str, target: Path, size: int, title: str) -> None:
    """Download `url` into the file `target`.

    Raises:
        UnreachableError: there is no answer, the server refuses, or the number of bytes is not as announced.
    """
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as answer, target.open("xb") as file:
            announced = int(answer.headers.get("Content-Length") or 0)
            with progress(announced or size, title) as bar:
                left = 2 * size + 10**6
                while block := answer.read(1 << 18):
                    left -= len(block)
                    if left < 0:
                        raise ValueError(f"it sends more than twice the {size:,} bytes that are known")
                    file.write(block)
                    bar.update(len(block))
    except (OSError, ValueError) as error:  # URLError and time-outs are OSErrors; ValueError: no URL
        if getattr(error, "errno", None) in NO_ROOM:
            raise NoRoomError(f"no room for {target.name} in {target.parent}") from error
        raise UnreachableError(f"{url}: {getattr(error, 'reason', None) or error}") from error
    if announced and target.stat().st_size != announced:
        raise UnreachableError(f"{url}: {target.stat().st_size} of {announced} bytes came")


def answers(url: str) -> bool:
    """Whether a web server answers within a few seconds, including the time to look up its name."""
    result: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CONNECT_SECONDS):
                result.append(True)
        except urllib.error.HTTPError:
            result.append(True)  # the server refuses HEAD, but it answers
        except (OSError, ValueError):
            result.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    return bool(result) and result[0]


def require_answer(url: str) -> None:
    """Raise `NoAnswerError` if a web server does not answer within a few seconds."""
    if not answers(url):
        raise NoAnswerError(f"{url} does not answer")


def require_room(folder: Path, size: int) -> None:
    """Raise `NoRoomError` if the disk of a folder has less than `size` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise NoRoomError(
            f"{size / 1e6:.0f} MB needed and {free / 1e6:.0f} MB free in {folder.parent}; make room, or set "
            "GGDA_CACHE_DIR to a folder on another disk"
        )


def progress(size: int, title: str) -> tqdm:
    """Return a progress bar over `size` bytes, which is shown only on a terminal."""
    return tqdm(total=size, desc=title, unit="B", unit_scale=True, disable=None, leave=False)


def bytes_in(folder: Path, log: Path) -> int:
    """Return the bytes in all files of a folder except the log; files that vanish meanwhile do not count."""
    total = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            path = Path(inner) / name
            try:
                total += path.stat().st_size if path != log else 0
            except OSError:
                continue
    return total


def error_in(log: str) -> str:
    """Return the line of a tool's log that says most about its failure: the longest error line.

    Lines that only say where the complete log is do not count.
    """
    errors = [line for line in log.splitlines() if "error" in line.lower() and "complete log" not in line]
    return max((line.strip() for line in errors), key=len, default="")[:200]
