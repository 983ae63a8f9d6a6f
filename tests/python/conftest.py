"""Fixtures: a real kvistd for each test that asks for one, real clients and pools on it.

Needs the installed package `kvist` on the path and a built kvistd: the program that KVISTD names,
or that of the build folder KVIST_BUILD, or one of the presets' folders.
"""

import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

MIB = 1 << 20
BLOCK_BYTES = 64 << 10


def kvistd_path() -> str:
    if "KVISTD" in os.environ:
        return os.environ["KVISTD"]
    builds = [os.environ["KVIST_BUILD"]] if "KVIST_BUILD" in os.environ else []
    for build in (*builds, "build/release", "build/dev", "build"):
        path = ROOT / build / "daemon/kvistd"
        if os.access(path, os.X_OK):
            return str(path)
    pytest.fail("kvistd is not built: cmake --preset release && cmake --build --preset release, or set KVISTD")


class Daemon:
    """A kvistd in a directory of its own."""

    def __init__(self, directory: pathlib.Path, *arguments: str) -> None:
        self.directory = directory
        self.socket = str(directory / "kvist.sock")
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        assert self.process is None
        with open(self.directory / "kvistd.log", "ab") as log:
            self.process = subprocess.Popen(
                [kvistd_path(), "--socket", self.socket, "--metrics", "off", *self.arguments],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 20
        while not os.path.exists(self.socket):
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail((self.directory / "kvistd.log").read_text())
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


@pytest.fixture
def start_daemon() -> Iterator[Callable[..., Daemon]]:
    """start_daemon(*arguments): a daemon that is stopped after the test."""
    daemons: list[Daemon] = []
    with tempfile.TemporaryDirectory(prefix="kvist-test-") as folder:

        def start(*arguments: str) -> Daemon:
            directory = pathlib.Path(folder) / str(len(daemons))
            directory.mkdir()
            daemons.append(Daemon(directory, *arguments))
            return daemons[-1]

        yield start
        for daemon in daemons:
            daemon.stop()


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon("--arena", str(256 * MIB))


@pytest.fixture
def session() -> bytes:
    return secrets.token_bytes(16)


def eventually(condition: Callable[[], object], what: str, limit_s: float = 10.0) -> object:
    """Ask until it is true. What is posted to the daemon happens soon, not at once."""
    deadline = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"after {limit_s} s still not true: {what}"
        time.sleep(0.005)
