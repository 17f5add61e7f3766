"""The tests as on other machines: `make test-matrix`, or `python tests/matrix.py ROW… -- PYTEST_ARGUMENT…` for a part.

Every row has a home that cannot be written to, an order of tests of its own, and no network: a network namespace with
a loopback only where `unshare` may make one, else proxies that lead nowhere, and the table says which.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

PARALLEL = ("-n", "auto", "--dist", "loadfile")
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there
ROWS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "plain": ({}, (*PARALLEL, "--order=1")),
    "no-simd": ({"ATEN_CPU_CAPABILITY": "default"}, (*PARALLEL, "--order=2")),
    "avx2": ({"ATEN_CPU_CAPABILITY": "avx2"}, (*PARALLEL, "--order=3")),
    "mkl-avx2": ({"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, (*PARALLEL, "--order=4")),
    "two-threads": ({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}, (*PARALLEL, "--order=5")),  # or cores spin
    "one-process": ({}, ("-n", "0", "--order=reversed")),
}


def main(arguments: list[str]) -> int:
    """Run the rows named, or all; 0 if all of them pass."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, more = arguments[:cut] or list(ROWS), arguments[cut + 1 :]
    unknown = [name for name in chosen if name not in ROWS]
    if unknown:
        raise SystemExit(f"{unknown[0]!r} is not a row of the matrix: pass some of {', '.join(ROWS)}.")
    isolated = cut_off()
    network = "none" if isolated else "proxies that lead nowhere (unshare is not allowed here)"
    results = []
    for name in chosen:
        variables, options = ROWS[name]
        print(
            f"\n== {name}: {' '.join(f'{k}={v}' for k, v in variables.items())} pytest {' '.join(options)}", flush=True
        )
        command = [sys.executable, "-m", "pytest", *options, *more]
        if isolated:
            command = [*isolated, sys.executable, __file__, "--in-namespace", *command]
        results.append(subprocess.run(command, env=environment(variables), check=False).returncode)
    print(f"\nnetwork: {network}; home: {environment({})['HOME']}")
    for name, code in zip(chosen, results, strict=True):
        print(f"{name:12} {'passed' if code == 0 else f'FAILED ({code})'}")
    return int(any(results))


def environment(variables: dict[str, str]) -> dict[str, str]:
    """This environment without caches of the user's, with a home that cannot exist and `variables`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "HF_", "TORCH_HOME", "MPLCONFIGDIR"))}
    proxies = {f"{scheme}_proxy": NOWHERE for scheme in ("http", "https", "all")}
    return (
        kept
        | {"OMP_NUM_THREADS": "1", "HOME": "/dev/null/home", "no_proxy": "localhost,127.0.0.1"}
        | proxies
        | variables
    )


def cut_off() -> list[str]:
    """The command before a command that takes its network away, or nothing where that is not allowed."""
    user = [] if os.geteuid() == 0 else ["--map-current-user", "--keep-caps"]
    command = ["unshare", *user, "--net"]
    found = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if found and found.returncode == 0 else []


def loopback_up() -> None:
    """Switch on `lo`, which is down in a new namespace: servers of the tests and ranks of torchrun listen there."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = fcntl.ioctl(any_socket, get_flags, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", found)[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-namespace"]:
        loopback_up()
        ctypes.CDLL(None).prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT, clear all: the tests are an ordinary user's again
        os.execv(sys.argv[2], sys.argv[2:])
    raise SystemExit(main(sys.argv[1:]))
