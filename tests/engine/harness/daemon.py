"""Real kvistd processes with configurations of their own."""
import http.client
import json
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from . import paths
from .process import Child, wait_until

sys.path.insert(0, str(paths.ROOT / "tests" / "support"))
from supervise import Supervisor  # noqa: E402

READY_LIMIT_S = 60.0
MIB = 1 << 20
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, limit_s: float) -> None:
        super().__init__("localhost", timeout=limit_s)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Daemon(Child):
    """kvistd in a temporary directory. start() and stop() as often as wanted; close() at the end."""

    HOMES = "/tmp"  # where the temporary directories are made: sockets' paths are short

    # Names on /metrics that the tests ask for.
    BLOCKS = "kvist_slots_ready"
    SESSIONS = "kvist_sessions"
    LEASED = "kvist_leased_slots"
    GRANTED = "kvist_slots_granted"
    COMMITS = "kvist_commits_total"
    CHECKSUMS = "kvist_checksums_total"
    MISMATCHES = "kvist_checksum_mismatch_total"
    CONFIRMED = "kvist_suspects_confirmed_total"
    PROMOTES = "kvist_promotes_total"
    SPILLS = "kvist_spills_total"
    UNMARKED = "kvist_commits_unmarked_total"
    CORRUPT_ON_DISK = "kvist_nvme_corrupt_total"

    def __init__(
        self, name: str = "kvistd", arena_mib: int = 512, nvme_mib: int = 0, **settings: str
    ) -> None:
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="kvist-", dir=self.HOMES))
        super().__init__(name, self.home)
        self.socket = str(self.home / "s" / "kvist.sock")
        self.status_socket = str(self.home / "s" / "status.sock")
        self.nvme = self.home / "nvme"
        self.config = self.home / "kvistd.conf"
        (self.home / "s").mkdir()
        self.write_config(arena_mib, nvme_mib, settings)

    def write_config(self, arena_mib: int, nvme_mib: int, settings: dict[str, str]) -> None:
        """The only place that knows the file's format. settings: section_key=value."""
        sections: dict[str, dict[str, str]] = {
            "daemon": {"socket": self.socket, "metrics_listen": f"unix:{self.status_socket}"},
            "memory": {"arena_bytes": f"{arena_mib}M"},
            "nvme": {},
            "limits": {},
        }
        if nvme_mib:
            sections["nvme"] = {"path": str(self.nvme), "bytes": f"{nvme_mib}M"}
        for name, value in settings.items():
            section, key = name.split("_", 1)
            sections[section][key] = value
        with open(self.config, "w") as file:
            for section, rows in sections.items():
                file.write(f"[{section}]\n")
                file.writelines(f"{key} = {value}\n" for key, value in rows.items())

    def __enter__(self) -> "Daemon":
        return self.start()

    def __exit__(self, *_) -> None:
        self.close()

    def start(self) -> "Daemon":
        """Start and wait for READY=1 on a notify socket."""
        notify_path = str(self.home / "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(notify_path)
            try:
                env = {**os.environ, "NOTIFY_SOCKET": notify_path}
                self.spawn([paths.kvistd(), "--config", str(self.config)], env)
                self._wait_ready(notify)
            finally:
                os.unlink(notify_path)
        return self

    def _wait_ready(self, notify: socket.socket) -> None:
        limit = time.monotonic() + READY_LIMIT_S
        while True:
            left = max(0.0, limit - time.monotonic())
            ready, _, _ = select.select([notify, self.pidfd], [], [], left)
            if notify in ready:
                message, descriptors, _, _ = socket.recv_fds(notify, 4096, 16)
                for descriptor in descriptors:
                    os.close(descriptor)
                if b"READY=1" in message.split(b"\n"):
                    return
            elif self.pidfd in ready:
                raise self.fail("kvistd ended before it was ready")
            else:
                raise self.fail(f"kvistd was not ready within {READY_LIMIT_S} s")

    def stop(self, limit_s: float = 90.0) -> int:
        """An orderly stop, which saves to NVMe. Returns the exit status."""
        self.signal(signal.SIGTERM)
        code = self.wait_end(limit_s)
        self.end()
        return code

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait_end(30.0)
        self.end()

    def close(self) -> None:
        self.end()
        shutil.rmtree(self.home, ignore_errors=True)

    def get(self, path: str, limit_s: float = 10.0) -> tuple[int, str]:
        connection = UnixConnection(self.status_socket, limit_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics; those that differ in labels alone are added up."""
        status, text = self.get("/metrics")
        if status != 200:
            raise self.fail(f"/metrics answered {status}")
        values: dict[str, float] = {}
        for line in text.splitlines():
            match = SAMPLE.match(line)
            if match and not line.startswith("#"):
                values[match[1]] = values.get(match[1], 0.0) + float(match[3])
        return values

    def metric(self, name: str) -> float:
        values = self.metrics()
        if name not in values:
            known = ", ".join(sorted(v for v in values if v.startswith("kvist_")))
            raise self.fail(f"there is no metric {name}; there are {known}")
        return values[name]

    def wait_metric(self, name: str, condition, limit_s: float, what: str) -> float:
        value = self.metric(name)

        def holds() -> bool:
            nonlocal value
            value = self.metric(name)
            return condition(value)

        try:
            wait_until(holds, limit_s, what)
        except AssertionError:
            raise self.fail(f"{name} is {value}, expected: {what}") from None
        return value

    def tool(self, *args: str) -> dict:
        """What the kvist tool says with --json."""
        done = subprocess.run(
            [paths.kvist_tool(), "--socket", self.socket, *args, "--json"],
            capture_output=True, text=True, timeout=120,
        )
        if done.returncode != 0:
            raise self.fail(f"kvist {' '.join(args)} failed: {done.stderr}")
        return json.loads(done.stdout)


class KeptDaemon(Daemon):
    """Under a service manager that keeps its memory and starts it again whenever it ends."""

    ADOPTED = "adopted what kvistd had left blocks="

    def start(self) -> "KeptDaemon":
        self.service = Supervisor([paths.kvistd(), "--config", str(self.config)], self.home)
        self.service.start().wait_ready(READY_LIMIT_S)
        return self

    def kill(self) -> None:
        """Killed, and ready again."""
        self.service.kill()
        self.service.wait_ready(READY_LIMIT_S)

    def adopted(self) -> list[int]:
        """How many blocks each of its starts has found."""
        lines = [line for line in self.service.text().splitlines() if self.ADOPTED in line]
        return [int(line.split(self.ADOPTED)[1].split()[0]) for line in lines]

    def close(self) -> None:
        self.service.close()
        super().close()
