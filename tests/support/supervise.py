"""A small service manager: of systemd what kvistd relies on, for tests that kill it many times.

It speaks sd_notify(3), sd_listen_fds(3) and the file descriptor store as systemd does:
messages count from the main process alone, those sent before its end are heard before its end,
sockets are passed before stored descriptors, and what does not fit the store vanishes silently.
"""
import array
import collections
import contextlib
import ctypes
import dataclasses
import fcntl
import os
import pathlib
import platform
import select
import signal
import socket
import struct
import threading
import time

LISTEN_FDS_START = 3
MESSAGE_BYTES = 65536
DESCRIPTORS_MAX = 253  # the kernel's bound for one message
CREDENTIALS = struct.Struct("3i")
# LISTEN_PID is the service's own pid, which nobody knows before there is the process.
SET_PID = 'export LISTEN_PID=$$ WATCHDOG_PID=$$; exec "$@"'
KCMP = {"x86_64": 312, "aarch64": 272}
libc = ctypes.CDLL(None)


def same_file(first: int, second: int) -> bool:
    """Whether two descriptors share one open file, as systemd's same_fd() finds out."""
    one, other = os.fstat(first), os.fstat(second)
    pid = os.getpid()
    return ((one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
            and libc.syscall(KCMP[platform.machine()], pid, pid, 0, first, second) == 0)


@dataclasses.dataclass
class Stored:
    """A descriptor in the store."""

    name: str
    descriptor: int
    polled: bool


@dataclasses.dataclass
class Run:
    """One process of the service, from its start to its end."""

    pid: int
    pidfd: int
    started_s: float
    ready_s: float | None = None
    status: int | None = None  # as os.waitstatus_to_exitcode() says
    passed: list[str] = dataclasses.field(default_factory=list)
    alive: int = 0  # WATCHDOG=1


class Supervisor:
    """Starts a command, keeps its descriptors, and starts it again whenever it ends.

    with Supervisor([kvistd, ...], directory) as service:
        service.wait_ready()
        service.kill()
        service.wait_ready()
    """

    def __init__(
        self,
        command: list[str],
        directory: str | os.PathLike,
        *,
        env: dict[str, str] | None = None,
        store_max: int = 1024,
        restart_s: float = 0.0,
        watchdog_s: float = 0.0,
        listener: socket.socket | None = None,
        listener_name: str = "kvistd.socket",
    ) -> None:
        """env: beside this process's; an empty value is left out.
        listener: borrowed; passed to every process as socket activation does."""
        self.command = list(command)
        self.directory = pathlib.Path(directory)
        self.log = self.directory / "supervised.log"
        self.runs: list[Run] = []
        self.messages: collections.deque[str] = collections.deque(maxlen=10000)
        self.lost = 0  # descriptors that did not fit the store
        self.environment = dict(env or {})
        self._store_max = store_max
        self._restart_s = restart_s
        self._watchdog_s = watchdog_s
        self._listener = listener
        self._listener_name = listener_name
        self._store: list[Stored] = []
        self._wanted = False
        self._closing = False
        self._deaf = False
        self._due_s: float | None = None
        self._changed = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._notify.setblocking(False)
        self._notify_path = str(self.directory / "supervisor")
        self._notify.bind(self._notify_path)
        self._thread = threading.Thread(target=self._serve, name="supervisor", daemon=True)
        self._thread.start()

    # --- What tests call ------------------------------------------------------------------------

    def __enter__(self) -> "Supervisor":
        return self.start()

    def __exit__(self, *_) -> None:
        self.close()

    def start(self) -> "Supervisor":
        with self._changed:
            assert self._running() is None, "it runs already"
            self._wanted = True
            self._spawn()
        self._poke()
        return self

    @property
    def pid(self) -> int | None:
        """The main process; None while there is none."""
        with self._changed:
            run = self._running()
            return run.pid if run else None

    def stored(self) -> collections.Counter[str]:
        """How many descriptors the store has under each name."""
        with self._changed:
            return collections.Counter(entry.name for entry in self._store)

    def wait(self, holds, limit_s: float = 60.0, what: str = "") -> None:
        """Wait until holds(), which is asked again after each event."""
        with self._changed:
            if not self._changed.wait_for(holds, limit_s):
                raise AssertionError(f"not within {limit_s} s: {what}\n{self.describe()}")

    def wait_ready(self, limit_s: float = 60.0) -> Run:
        """Wait until the process that runs, or that comes next, has said READY=1.

        One that ends with an exit status of its own meanwhile is a failure.
        """
        found: list[Run] = []
        first = len(self.runs) - 1

        def is_ready() -> bool:
            run = self._running()
            if run is not None and run.ready_s is not None:
                found.append(run)
            gave_up = any((ended.status or 0) > 0 for ended in self.runs[first:])
            return bool(found) or gave_up

        self.wait(is_ready, limit_s, "READY=1")
        if not found:
            raise AssertionError(f"it ended before it was ready\n{self.describe()}")
        return found[0]

    def wait_message(self, word: str, limit_s: float = 60.0) -> str:
        """Wait for a message that has this word, from now or before; clear() forgets those."""
        found: list[str] = []

        def heard() -> bool:
            found[:] = [text for text in self.messages if word in text]
            return bool(found)

        self.wait(heard, limit_s, word)
        return found[-1]

    def clear(self) -> None:
        with self._changed:
            self.messages.clear()

    def kill(self, number: int = signal.SIGKILL, limit_s: float = 60.0) -> Run:
        """End the main process by a signal and wait until it has; the next one starts by itself."""
        with self._changed:
            run = self._running()
            assert run is not None, "there is no process"
            signal.pidfd_send_signal(run.pidfd, number)
        self.wait(lambda: run.status is not None, limit_s, f"an end by signal {number}")
        return run

    @contextlib.contextmanager
    def deaf(self):
        """Its socket is full, and it does not read meanwhile; ends are seen all the same."""
        with self._changed:
            self._deaf = True
        self._poke()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as other:
            try:
                while True:
                    other.sendto(b"", self._notify_path)
            except BlockingIOError:
                pass
            try:
                yield
            finally:
                with self._changed:
                    self._deaf = False
                self._poke()

    def keep(self, name: str, descriptor: int) -> None:
        """Store a descriptor as if an earlier process had asked for it. Borrowed."""
        with self._changed:
            assert self._keep(name, os.dup(descriptor), False)

    def swap(self, name: str, other: str) -> None:
        """Give back two descriptors under each other's names from now on."""
        with self._changed:
            one, two = ([entry for entry in self._store if entry.name == wanted][0]
                        for wanted in (name, other))
            one.descriptor, two.descriptor = two.descriptor, one.descriptor

    def drop(self, name: str) -> None:
        """Lose what is stored under a name."""
        with self._changed:
            for entry in [entry for entry in self._store if entry.name == name]:
                self._forget(entry)

    def stop(self, limit_s: float = 120.0) -> int:
        """An orderly stop, after which the store is empty. Returns the exit status."""
        with self._changed:
            self._wanted = False
        return self.kill(signal.SIGTERM, limit_s).status

    def close(self) -> None:
        with self._changed:
            self._wanted = False
            self._closing = True
            run = self._running()
            if run is not None:
                signal.pidfd_send_signal(run.pidfd, signal.SIGKILL)
        self._poke()
        self._thread.join()
        self._forget_all()
        if self._notify.fileno() >= 0:
            self._notify.close()
            os.unlink(self._notify_path)
            os.close(self._wake)

    def text(self) -> str:
        """What its processes have written to stderr."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def describe(self) -> str:
        ends = [run.status for run in self.runs[-20:]]
        return f"last ends: {ends}\nlast messages: {list(self.messages)[-5:]}\n{self.text()[-4000:]}"

    # --- The manager's thread -------------------------------------------------------------------

    def _poke(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _running(self) -> Run | None:
        return self.runs[-1] if self.runs and self.runs[-1].status is None else None

    def _serve(self) -> None:
        while True:
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            with self._changed:
                if not self._deaf:
                    poller.register(self._notify, select.POLLIN)
                run = self._running()
                if self._closing and run is None:
                    return
                if run is not None:
                    poller.register(run.pidfd, select.POLLIN)
                for entry in self._store:
                    if entry.polled:
                        poller.register(entry.descriptor, 0)
                due_s = self._due_s
            timeout = None if due_s is None else max(0.0, due_s - time.monotonic()) * 1000
            ready = {descriptor for descriptor, _ in poller.poll(timeout)}
            if self._wake in ready:
                os.eventfd_read(self._wake)
            with self._changed:
                # All that a process said counts before its end does.
                if not self._deaf:
                    self._hear_all()
                for entry in [e for e in self._store if e.polled and e.descriptor in ready]:
                    self._forget(entry)
                if run is not None and run.pidfd in ready:
                    self._reap(run)
                if self._due_s is not None and time.monotonic() >= self._due_s:
                    self._due_s = None
                    if self._wanted:
                        self._spawn()
                self._changed.notify_all()

    def _spawn(self) -> None:
        passed = [] if self._listener is None else [(self._listener_name, self._listener.fileno())]
        passed += [(entry.name, entry.descriptor) for entry in self._store]
        env = {**os.environ, **self.environment, "NOTIFY_SOCKET": self._notify_path}
        if self._store_max > 0:
            env.setdefault("FDSTORE", str(self._store_max))
        env = {name: value for name, value in env.items() if value != ""}
        if self._watchdog_s > 0:
            env["WATCHDOG_USEC"] = str(int(self._watchdog_s * 1e6))
        if passed:
            env["LISTEN_FDS"] = str(len(passed))
            env["LISTEN_FDNAMES"] = ":".join(name for name, _ in passed)
        # Out of the way of the numbers that they get in the child.
        first_free = LISTEN_FDS_START + len(passed)
        copies: list[int] = []
        try:
            for _, descriptor in passed:
                copies.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, first_free))
            actions: list[tuple] = [
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, str(self.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                 0o600),
            ]
            actions += [(os.POSIX_SPAWN_DUP2, copy, LISTEN_FDS_START + index)
                        for index, copy in enumerate(copies)]
            started_s = time.monotonic()
            pid = os.posix_spawn("/bin/sh", ["sh", "-c", SET_PID, "sh", *self.command], env,
                                 file_actions=actions)
        finally:
            for copy in copies:
                os.close(copy)
        self.runs.append(Run(pid, os.pidfd_open(pid), started_s, passed=[n for n, _ in passed]))

    def _reap(self, run: Run) -> None:
        _, status = os.waitpid(run.pid, 0)
        os.close(run.pidfd)
        run.status = os.waitstatus_to_exitcode(status)
        if self._wanted:
            self._due_s = time.monotonic() + self._restart_s
        else:
            self._forget_all()  # a service that has stopped has no store

    # --- Messages -------------------------------------------------------------------------------

    def _hear_all(self) -> None:
        space = socket.CMSG_SPACE(4 * DESCRIPTORS_MAX) + socket.CMSG_SPACE(CREDENTIALS.size)
        while True:
            try:
                data, ancillary, _, _ = self._notify.recvmsg(
                    MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            descriptors = array.array("i")
            sender = 0
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(content[: len(content) // 4 * 4])
                elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    sender = CREDENTIALS.unpack(content)[0]
            unused = list(descriptors)
            run = self._running()
            if run is not None and sender == run.pid:
                unused = self._hear(run, data.decode(), unused)
            for descriptor in unused:
                os.close(descriptor)

    def _hear(self, run: Run, text: str, descriptors: list[int]) -> list[int]:
        """Act on a message of the main process. Returns the descriptors that nobody keeps."""
        self.messages.append(text)
        words = text.split("\n")
        values = dict(word.split("=", 1) for word in words if "=" in word)
        if "READY=1" in words and run.ready_s is None:
            run.ready_s = time.monotonic()
        if "WATCHDOG=1" in words:
            run.alive += 1
        if "FDSTOREREMOVE=1" in words:
            for entry in [e for e in self._store if e.name == values.get("FDNAME")]:
                self._forget(entry)
        elif "FDSTORE=1" in words:
            name = values.get("FDNAME", "stored")
            return [d for d in descriptors if not self._keep(name, d, "FDPOLL=0" not in words)]
        return descriptors  # a barrier's among them: closing it is the answer

    def _keep(self, name: str, descriptor: int, polled: bool) -> bool:
        if not name or len(name) > 255 or ":" in name or not name.isascii():
            name = "stored"
        if any(same_file(entry.descriptor, descriptor) for entry in self._store):
            return False
        if len(self._store) >= self._store_max:
            self.lost += 1
            return False
        if polled:
            with select.epoll() as trial:
                try:
                    trial.register(descriptor, 0)
                except PermissionError:
                    polled = False  # a file, which never hangs up
        self._store.append(Stored(name, descriptor, polled))
        return True

    def _forget(self, entry: Stored) -> None:
        self._store.remove(entry)
        os.close(entry.descriptor)

    def _forget_all(self) -> None:
        for entry in list(self._store):
            self._forget(entry)

