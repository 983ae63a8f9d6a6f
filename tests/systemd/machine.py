"""A machine of its own for a real systemd: namespaces and a root directory, on this kernel.

Nothing of the host's is written to: see boot. What the machine starts ends with it.
"""
import contextlib
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
from load import LoadEngine  # noqa: E402

BUILD = pathlib.Path(os.environ.get("KVIST_BUILD", HERE.parents[1] / "build/release")).resolve()
BLOCK_BYTES = 65536
SOCKET = "/run/kvist/kvist.sock"
SERVICE = "kvistd.service"
SKIPPED = 77
BOOT_S = 60.0
NEEDED = ("unshare", "nsenter", "setpriv", "mount", "pivot_root", "cmake", "systemctl")


class Impossible(Exception):
    """No such machine can be had here; the text says why."""


def own_cgroup() -> pathlib.Path:
    """Where this process is in the cgroup2 hierarchy."""
    mounted = None
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ")
        if after.split()[0] == "cgroup2":
            mounted = pathlib.Path(before.split()[4])
    if mounted is None:
        raise Impossible("no cgroup2 hierarchy is mounted")
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return mounted / line[3:].lstrip("/")
    raise Impossible("this process is in no cgroup2 hierarchy")


def wait_until(holds: Callable[[], object], what: str, limit_s: float = 60.0) -> object:
    limit = time.monotonic() + limit_s
    while True:
        value = holds()
        if value:
            return value
        if time.monotonic() > limit:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.02)


class Machine:
    """Booted by the constructor, gone after close()."""

    def __init__(self, build: pathlib.Path = BUILD) -> None:
        if os.geteuid() != 0:
            raise Impossible("root is needed to make a machine of namespaces")
        for program in NEEDED:
            if shutil.which(program) is None:
                raise Impossible(f"{program} is not installed")
        if not os.path.exists("/lib/systemd/systemd"):
            raise Impossible("systemd is not installed")
        if "\toverlay" not in pathlib.Path("/proc/filesystems").read_text():
            raise Impossible("the kernel has no overlay file system")
        self.pid = 0
        self.pidfd = -1
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="kvist-rig-"))
        self.cgroup = own_cgroup() / self.directory.name
        try:
            self.cgroup.mkdir()
        except OSError as error:
            self.directory.rmdir()
            raise Impossible(f"no cgroup can be made: {error}") from error
        try:
            self._boot(build)
        except BaseException:
            self.close()
            raise

    def _boot(self, build: pathlib.Path) -> None:
        join = 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"'
        outlives = ["setpriv", "--pdeathsig", "KILL"]
        namespaces = ["unshare", "--mount", "--pid", "--cgroup", "--ipc", "--uts", "--net",
                      "--fork", "--kill-child"]
        mine, theirs = os.pipe()
        with open(mine) as told, tempfile.TemporaryFile() as said:
            self.process = subprocess.Popen(
                ["sh", "-c", join, "sh", self.cgroup, *outlives, *namespaces, "sh", "-c",
                 f'exec 3>&{theirs} {theirs}>&-; exec "$@"', "sh", HERE / "boot", self.directory,
                 build],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=[theirs],
                start_new_session=True)
            os.close(theirs)
            ready, _, _ = select.select([told], [], [], BOOT_S)
            pid = told.readline() if ready else ""
            if not pid:
                said.seek(0)
                raise AssertionError(f"it did not boot: {said.read().decode()}")
        self.pid = int(pid)
        self.pidfd = os.pidfd_open(self.pid)
        self.wait(lambda: self.try_run("systemctl", "is-active", "multi-user.target").stdout
                  == "active\n", "multi-user.target")

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.close(self.pidfd)
            self.pidfd = -1
        if hasattr(self, "process"):
            if self.pid == 0:
                self.process.kill()
            self.process.wait()
        self._remove_cgroups()
        self.directory.rmdir()  # its mounts were the machine's alone

    def _remove_cgroups(self) -> None:
        # A killed process leaves its cgroup a moment after its end has been seen.
        wait_until(lambda: "populated 0" in (self.cgroup / "cgroup.events").read_text(),
                   "all processes of the machine are gone")
        for path, _, _ in os.walk(self.cgroup, topdown=False):
            os.rmdir(path)

    # --- Inside -----------------------------------------------------------------------------------

    def enter(self, *command: str) -> list[str]:
        """A command line that runs one inside."""
        return ["nsenter", "--all", "--target", str(self.pid), "--root", "--wd", "--",
                "env", "-i", "PATH=/usr/sbin:/usr/bin", "LC_ALL=C", *command]

    def try_run(self, *command: str, limit_s: float = 60.0) -> subprocess.CompletedProcess:
        return subprocess.run(self.enter(*command), capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=limit_s, check=False)

    def run(self, *command: str, limit_s: float = 60.0) -> str:
        """Its stdout; an AssertionError when it fails."""
        done = self.try_run(*command, limit_s=limit_s)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}"
                                 f"{done.stderr}\n{self.journal()[-4000:]}")
        return done.stdout

    def popen(self, *command: str, **more) -> subprocess.Popen:
        return subprocess.Popen(self.enter(*command), **more)

    def wait(self, holds: Callable[[], object], what: str, limit_s: float = 60.0) -> object:
        try:
            return wait_until(holds, what, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.journal()[-6000:]}") from None

    def path(self, inside: str) -> pathlib.Path:
        """A file of the machine's, as the host sees it."""
        return pathlib.Path(f"/proc/{self.pid}/root/{inside}")

    def write(self, inside: str, text: str) -> None:
        self.path(inside).parent.mkdir(parents=True, exist_ok=True)
        self.path(inside).write_text(text)

    def show(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "--value", "-p", name, unit).strip()

    def journal(self, *arguments: str) -> str:
        return self.try_run("journalctl", "--no-pager", "-o", "short-monotonic", *arguments).stdout


class Case(unittest.TestCase):
    """Each test has a machine of its own, with kvistd.socket listening and kvistd not started."""

    CONFIG = f"""
[memory]
arena_bytes = 64M
[nvme]
path = /var/lib/kvist
bytes = 256M
"""

    def setUp(self) -> None:
        self.machine = Machine()
        self.addCleanup(self.machine.close)
        self.machine.write("/etc/kvist/kvistd.conf", self.CONFIG)

    def drop_in(self, *lines: str) -> None:
        self.machine.write(f"/etc/systemd/system/{SERVICE}.d/test.conf",
                           "\n".join(("[Service]", *lines, "")))
        self.machine.run("systemctl", "daemon-reload")

    def engine(self) -> LoadEngine:
        """A real engine inside, connected: the first one starts kvistd."""
        engine = LoadEngine(self.machine.enter("/build/tests/e2e/load_engine", SOCKET,
                                               str(BLOCK_BYTES)))
        self.addCleanup(engine.kill)
        self.assertEqual(engine.ask("wait", 60), "ok", self.machine.journal())
        return engine

    def put(self, engine: LoadEngine, first: int, count: int) -> None:
        self.assertEqual(engine.ask("put", first, count), "ok", self.machine.journal())

    def all_right(self, engine: LoadEngine, word: str, first: int, count: int) -> None:
        """get or fetch: every block is found, and every byte as it was put."""
        self.assertEqual(engine.numbers(word, first, count),
                         {"right": count, "miss": 0, "wrong": 0}, self.machine.journal())
        self.assertEqual(engine.numbers("stats")["errors"], 0)

    def main_pid(self) -> int:
        return int(self.machine.show(SERVICE, "MainPID"))

    def is_active(self) -> bool:
        return self.machine.show(SERVICE, "ActiveState") == "active"

    def signal(self, name: str) -> None:
        self.machine.run("systemctl", "kill", "--kill-whom=main", f"--signal={name}", SERVICE)


def main() -> None:
    """Run a file's tests; 77 and the reason where there can be no machine."""
    try:
        Machine().close()
    except Impossible as reason:
        print(f"skipped: {reason}")
        sys.exit(SKIPPED)
    unittest.main(verbosity=2, argv=sys.argv)
