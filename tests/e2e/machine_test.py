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


if __name__ == "__main__":
    harness.main()
