#!/usr/bin/env python3
"""A machine in trouble while kvistd serves: memory and limits that are small, disks that fail and come
back, engines that stand still. Engines see misses, and health says why."""
import os
import resource
import subprocess
import sys
import unittest

import harness
import wire

sys.path.insert(0, os.path.join(harness.SOURCE, "tests", "support"))
from load import LoadEngine  # noqa: E402  pylint: disable=wrong-import-position

LOAD_ENGINE = os.environ.get("LOAD_ENGINE", "load_engine")


class Group:
    """A memory cgroup, below that of this process."""

    def __init__(self, limit_bytes):
        """OSError, LookupError: there can be none"""
        self.path = None
        base, limit_name = self.place()
        path = os.path.join(base, f"kvist-test-{os.getpid()}")
        os.mkdir(path)
        self.path = path
        try:
            with open(os.path.join(path, limit_name), "w", encoding="ascii") as file:
                file.write(str(limit_bytes))
        except OSError:
            self.close()
            raise

    @staticmethod
    def place():
        """Where this process is in the hierarchy of memory. @return directory, name of the limit"""
        mounts = {}
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            for line in file:
                before, after = (part.split() for part in line.split(" - "))
                if after[0] == "cgroup2":
                    mounts[""] = before[4]
                elif after[0] == "cgroup":
                    mounts.update((name, before[4]) for name in after[2].split(","))
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
        for _, controllers, group in groups:
            if "memory" in controllers.split(",") and "memory" in mounts:
                return mounts["memory"] + group, "memory.limit_in_bytes"
        return next(mounts[""] + group for _, names, group in groups if not names), "memory.max"

    def wrap(self):
        """What a command is run by to be in it."""
        return ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', self.path]

    def kills(self):
        """How many processes were killed for want of memory."""
        path = os.path.join(self.path, "memory.events")
        if not os.path.exists(path):
            path = os.path.join(self.path, "memory.oom_control")
        with open(path, encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))

    def close(self):
        if self.path:
            os.rmdir(self.path)
            self.path = None


@unittest.skipIf(os.environ.get("KVIST_SANITIZE"), "sanitizers take memory of their own")
class Memory(harness.Case):
    LIMIT = 96 << 20
    LEAVES = 62 << 20  # beside 32 MiB and one part of 33

    def setUp(self):
        super().setUp()
        try:
            self.group = Group(self.LIMIT)
        except (OSError, LookupError, StopIteration) as error:
            self.skipTest(f"no memory cgroup can be made here: {error}")
        self.addCleanup(self.group.close)

    def test_an_arena_over_the_limit_of_its_cgroup(self):
        words = ["memory.arena_bytes is 96 MiB", "memory limit of kvistd's cgroup", "(62 MiB)"]
        said = self.refuses(arena="96M", wrap=self.group.wrap(), words=words, status=2)
        check = subprocess.run([*self.group.wrap(), harness.KVISTD, "--arena", "96M", "--socket",
                                f"{self.directory}/k.sock", "--metrics", "off", "--check-config"],
                               capture_output=True, text=True, check=False)
        self.assertEqual(check.returncode, 2)
        self.assertIn(check.stderr.removeprefix("kvistd: ").strip(), said)
        self.assertEqual(self.group.kills(), 0)

    def test_an_arena_of_what_the_cgroup_leaves(self):
        daemon = self.start(arena="auto", wrap=self.group.wrap())
        self.assertEqual(daemon.metric("arena_bytes"), 16 << 20)  # a quarter, or the least
        self.assertEqual(daemon.stop(), 0)

    def test_full_in_a_cgroup_that_is_hardly_larger(self):
        """Filled with the smallest blocks, of which each needs as much beside it as a large one."""
        nvme = ("--nvme", f"{self.directory}/nvme", "--nvme-bytes", "256M", "--set",
                "nvme.admission=all") if harness.NVME else ()
        daemon = self.start(*nvme, arena="62M", wrap=self.group.wrap())
        self.assertEqual(daemon.metric("arena_bytes"), self.LEAVES)
        for pool, block_bytes in enumerate((4096, 65536)):
            engine = LoadEngine([LOAD_ENGINE, daemon.socket, str(block_bytes), f"pool{pool}"])
            self.addCleanup(engine.kill)
            for first in range(0, 20000 if block_bytes == 4096 else 1500, 500):
                self.assertEqual(engine.ask("put", first, 500), "ok")
        self.assertGreater(daemon.metric("evictions_total"), 0)
        self.assertGreater(daemon.metric("arena_used_bytes"), self.LEAVES * 3 / 4)
        self.assertEqual(self.group.kills(), 0)
        self.assert_serves(daemon)
        self.assertEqual(daemon.stop(), 0)


class Limits(harness.Case):
    @staticmethod
    def limit(which, value):
        return lambda: resource.setrlimit(which, (value, value))

    def test_as_few_open_files_as_it_starts_with(self):
        """Who comes first is served, and health says what to raise."""
        nvme = ("--nvme", f"{self.directory}/nvme", "--nvme-bytes", "128M") if harness.NVME else ()
        daemon = self.start(*nvme, preexec_fn=self.limit(resource.RLIMIT_NOFILE, 256))
        self.assertEqual(daemon.get("/healthz")[1],
                         "degraded: the limit of open files is low: raise LimitNOFILE\n")
        self.assertEqual(daemon.metric("process_open_files_max"), 256)
        engine = LoadEngine([LOAD_ENGINE, daemon.socket, "65536"])
        self.addCleanup(engine.kill)
        for first in range(0, 2000, 100):  # more than fits, so that segments come and blocks go
            self.assertEqual(engine.ask("put", first, 100), "ok")
        self.assertEqual(engine.numbers("get", 0, 2000)["wrong"], 0)
        self.assertGreater(daemon.metric("evictions_total"), 0)
        self.assertEqual(engine.close(), 0)
        wire.until(lambda: daemon.metric("processes") == 0, "its files are given back")
        self.assert_serves(daemon)
        self.assertEqual(daemon.stop(), 0)

    def test_no_memory_may_be_locked(self):
        daemon = self.start(preexec_fn=self.limit(resource.RLIMIT_MEMLOCK, 0))
        engine = LoadEngine([LOAD_ENGINE, daemon.socket, "65536"],
                            preexec_fn=self.limit(resource.RLIMIT_MEMLOCK, 0))
        self.addCleanup(engine.kill)
        self.assertEqual(engine.ask("put", 0, 100), "ok")
        self.assertEqual(daemon.get("/healthz")[1].split("\n")[0], "ok")
        self.assertEqual(daemon.stop(), 0)


class Disk(harness.Case):
    """A file system on a loop device, whose file lies where it can run out of room."""

    def setUp(self):
        super().setUp()
        self.unshare = harness.may_mount()
        if self.unshare is None or os.geteuid() != 0:
            self.skipTest("cannot have a mount namespace and loop devices here")
        self.disk = os.path.join(self.directory, "disk")
        self.tier = os.path.join(self.disk, "d", "nvme")
        os.mkdir(self.disk)

    def hold(self, on_errors):
        """Mounted for as long as the test runs. @return what a command is run by to see it"""
        script = (f'mount -t tmpfs -o size=120m none "{self.disk}" && cd "{self.disk}" && mkdir d && '
                  'truncate -s 100m image && mkfs.ext4 -q -O ^has_journal image && '
                  f'mount -o loop,errors={on_errors} image d && findmnt -n -o SOURCE "{self.disk}/d" '
                  '&& exec sleep 600')
        holder = subprocess.Popen([*self.unshare, "sh", "-c", script], stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL)
        self.addCleanup(holder.stdout.close)
        self.addCleanup(holder.wait)
        self.addCleanup(holder.kill)
        self.device = os.path.basename(holder.stdout.readline().decode().strip())
        if not self.device:
            self.skipTest("no file system can be made on a loop device here")
        self.inside = f"/proc/{holder.pid}/root{self.disk}"
        return ["nsenter", "-t", str(holder.pid), "-m"]

    def begin(self, on_errors):
        """A daemon and an engine with ten blocks in both tiers."""
        self.mounts = self.hold(on_errors)
        daemon = self.start("--nvme", self.tier, "--nvme-bytes", "64M", arena="32M",
                            wrap=self.mounts)
        engine = LoadEngine([LOAD_ENGINE, daemon.socket, "65536"])
        self.addCleanup(engine.kill)
        self.assertEqual(engine.ask("put", 0, 10), "ok")
        self.assertEqual(daemon.tool("save")[0], 0)
        self.assertEqual(daemon.metric("nvme_blocks"), 10)
        return daemon, engine

    def goes_on(self, daemon, engine, first):
        """Without the disk: what is stored is there, and what is read is right."""
        for number in range(first, first + 1000, 100):  # more than memory has room for
            self.assertEqual(engine.ask("put", number, 100), "ok")
        tally = engine.numbers("get", 0, first + 1000)
        self.assertEqual(tally["wrong"], 0)
        self.assertGreater(tally["right"], 0)
        self.assertEqual(engine.numbers("fetch", 0, 10)["wrong"], 0)
        self.assertEqual(engine.numbers("stats")["errors"], 0)
        self.assertEqual(daemon.get("/readyz"), (200, "ready\n"))

    def is_degraded(self, daemon, *words):
        """Health, metrics and log say what is wrong."""
        def told():
            health = daemon.get("/healthz")[1]
            return health.startswith("degraded: ") and all(word in health for word in words)
        wire.until(told, f"health says {words}")
        self.assertEqual(daemon.metric("degraded"), 1)
        self.assertGreater(daemon.metric("nvme_write_errors_total"), 0)
        wire.until(lambda: 'warn: health changed health="degraded: ' in daemon.text(), "the log")

    @harness.needs_nvme
    def test_read_only_while_it_serves(self):
        """As ext4 does when it finds a fault in itself; nobody else may while files are written."""
        daemon, engine = self.begin("remount-ro")
        with open(f"/sys/fs/ext4/{self.device}/trigger_fs_error", "w", encoding="ascii") as file:
            file.write("1")
        self.goes_on(daemon, engine, 100)
        self.is_degraded(daemon, self.tier, "Read-only file system")
        status, _, error = daemon.tool("save")
        self.assertEqual(status, 1)
        self.assertIn("could not be written", error)
        # Repaired and mounted anew, it is another one than kvistd has open.
        subprocess.run([*self.mounts, "sh", "-c",
                        f'umount -l "{self.disk}/d" && mkdir "{self.tier}"'], check=True)
        self.is_degraded(daemon, self.tier, "another directory", "restart kvistd")
        self.assertEqual(engine.numbers("get", 1000, 100)["wrong"], 0)
        self.assertEqual(daemon.stop(), 0)

    @harness.needs_nvme
    def test_a_device_that_fails_and_is_well_again(self):
        daemon, engine = self.begin("continue")
        with open(f"{self.inside}/fill", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                pass
        self.goes_on(daemon, engine, 100)
        self.is_degraded(daemon, "No space left")
        os.unlink(f"{self.inside}/fill")
        wire.until(lambda: daemon.get("/healthz")[1] == "ok\n", "it is well again", 60)
        wire.until(lambda: 'warn: health changed health="ok"' in daemon.text(), "the log says so")
        self.assertEqual(engine.ask("put", 5000, 100), "ok")
        status, _, error = daemon.tool("save")
        self.assertEqual((status, error), (0, ""))
        self.assertGreater(daemon.metric("nvme_blocks"), 100)
        self.assertEqual(engine.numbers("get", 0, 5100)["wrong"], 0)
        self.assertEqual(daemon.stop(), 0)


if __name__ == "__main__":
    harness.main()
