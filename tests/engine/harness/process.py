"""Child processes: start them with a log, wait for them, end them with everything they started."""
import os
import pathlib
import select
import signal
import subprocess
import time
from collections.abc import Callable


class Failed(AssertionError):
    """A child did not do what it was asked; the text has the end of its log."""


def tail(path: pathlib.Path, line_count: int = 40) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join(lines[-line_count:])


def wait_until(condition: Callable[[], object], limit_s: float, what: str) -> object:
    """Ask until the condition is true; returns what it returned."""
    limit = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > limit:
            raise Failed(f"after {limit_s} s still not true: {what}")
        time.sleep(0.02)


class Child:
    """A process in a session of its own, with its output in a log file."""

    def __init__(self, name: str, directory: pathlib.Path) -> None:
        self.name = name
        self.directory = directory
        self.process: subprocess.Popen | None = None
        self.pidfd = -1
        self.log = directory / f"{name}.log"

    def spawn(self, argv: list[str], env: dict[str, str], **more) -> None:
        assert self.process is None
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                argv, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, **more
            )
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def exit_code(self) -> int | None:
        """How it ended, without reaping it: its process group stays ours until end()."""
        what = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if what is None:
            return None
        return what.si_status if what.si_code == os.CLD_EXITED else -what.si_status

    def alive(self) -> bool:
        return self.process is not None and self.exit_code() is None

    def fail(self, what: str) -> Failed:
        state = "not started"
        if self.process is not None:
            code = self.exit_code()
            state = "running" if code is None else f"ended with {code}"
        return Failed(f"{self.name}: {what} ({state}); its log {self.log} ends:\n{tail(self.log)}")

    def signal(self, number: int) -> None:
        """To the process alone."""
        if self.alive():
            os.kill(self.pid, number)

    def signal_all(self, number: int) -> None:
        """To the process and to all that it started."""
        if self.process is not None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass

    def wait_end(self, limit_s: float) -> int:
        """Its exit status, or minus the signal that ended it."""
        ready, _, _ = select.select([self.pidfd], [], [], limit_s)
        if not ready:
            raise self.fail(f"did not end within {limit_s} s")
        code = self.exit_code()
        assert code is not None
        return code

    def end(self) -> None:
        """Kill what is left. Safe to call again."""
        if self.process is None:
            return
        self.signal_all(signal.SIGKILL)
        self.process.wait()
        os.close(self.pidfd)
        self.process = None
        self.pidfd = -1
