#!/usr/bin/env python3
"""A machine in trouble while kvistd serves: memory and limits that are small, disks that fail and come
back, engines that stand still. Engines see misses, and health says why."""
import os
import resource
import signal
import socket
import subprocess
import sys
import unittest

import harness
import wire
from hostile_test import Member, content, key

sys.path.insert(0, os.path.join(harness.SOURCE, "tests", "support"))
from load import LoadEngine  # noqa: E402  pylint: disable=wrong-import-position

LOAD_ENGINE = os.environ.get("LOAD_ENGINE", "load_engine")
SLOT_BYTES = wire.Engine.SLOT_BYTES


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
        try:
            with open(f"/sys/fs/ext4/{self.device}/trigger_fs_error", "w", encoding="ascii") as file:
                file.write("1")
        except OSError as error:
            self.skipTest(f"no fault can be made in ext4 here: {error}")
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


class Stopped(harness.Case):
    """An engine that stands still for longer than anybody waits for it."""

    LEASED = 8
    LIMITS = "hello_timeout_ms = 10\nidle_timeout_ms = 10\nsend_timeout_ms = 10\n"

    def engine(self, daemon, session, answers):
        """In a child: stores, leases, asks more than it reads, stops; then looks again."""
        engine = Member(daemon.socket, session, {"model": "stopped"})
        slots = {}
        for number in range(self.LEASED):
            if not engine.maps:
                engine.map_segment()
            engine.free = getattr(engine, "free", None) or engine.granted()
            slots[number] = engine.free[0][0]
            engine.put(key(number), content(number))
        engine.request(wire.STAT)
        for record, slot in enumerate(slots.values()):
            engine.lease(record, slot)
        # Some MiB of answers, which nobody takes.
        engine.send_bytes(wire.frame(wire.envelope(wire.STAT, {}, 1)) * 400)
        answers.send(b"leased")
        os.kill(os.getpid(), signal.SIGSTOP)
        right = all(engine.bytes_of(slot) == content(number) for number, slot in slots.items())
        gone = engine.ends() is None  # what it had not read, and then the end
        with wire.Peer(daemon.socket) as again:
            reply = again.hello(wire.ENGINE, session, 0, 1)
            answers.send(f"right {right} gone {gone} back {reply.body == wire.HELLO_REPLY}".encode())
            answers.recv(1)
        engine.close()

    def fork(self, daemon):
        """@return the child, and what it answers on"""
        mine, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            try:
                mine.close()
                self.engine(daemon, os.urandom(16), theirs)
            finally:
                os._exit(0)
        theirs.close()
        mine.settimeout(wire.DEADLINE_S)
        self.addCleanup(os.waitpid, child, 0)
        self.addCleanup(os.kill, child, signal.SIGKILL)
        self.addCleanup(mine.close)
        return child, mine

    def set_limits(self, daemon, limits):
        daemon.config(f"[daemon]\nsocket = {daemon.socket}\n{limits}")
        before = daemon.metric("reloads_total")
        daemon.process.send_signal(signal.SIGHUP)
        wire.until(lambda: daemon.metric("reloads_total") > before, "it is reloaded")

    def test_longer_than_every_limit(self):
        daemon = self.start("--set", "memory.eviction=lru", "--set", "limits.hold_ms=10")
        child, mine = self.fork(daemon)
        self.assertEqual(mine.recv(64), b"leased")
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
        self.set_limits(daemon, self.LIMITS)
        wire.until(lambda: daemon.metric("peers_dropped_total") == 1, "its connection is given up")
        self.set_limits(daemon, "")
        self.assertIn("peer does not read pid=%d" % child, daemon.text())
        # Its memory is not, and nobody waits for it: a flood of several arenas goes through.
        other = LoadEngine([LOAD_ENGINE, daemon.socket, str(SLOT_BYTES)])
        self.addCleanup(other.kill)
        for first in range(0, 4000, 100):
            self.assertEqual(other.ask("put", first, 100), "ok")
        self.assertEqual(other.numbers("stats")["errors"], 0)
        self.assertEqual(daemon.metric("leased_slots"), self.LEASED)
        self.assertEqual(daemon.metric("processes"), 2)
        os.kill(child, signal.SIGCONT)
        self.assertEqual(mine.recv(64), b"right True gone True back True")
        self.assertEqual(other.close(), 0)
        self.assertEqual(daemon.metric("leased_slots"), self.LEASED)
        mine.send(b".")
        wire.until(lambda: daemon.metric("processes") == 0, "it has ended")
        self.assertEqual((daemon.metric("leased_slots"), daemon.metric("slots_granted")), (0, 0))
        self.assertEqual(daemon.stop(), 0)

    def test_on_libkvist(self):
        """With a lease and slots to fill: it goes on where it stood."""
        daemon = self.start("--set", "daemon.send_timeout_ms=10", "--set", "limits.hold_ms=10")
        patient = LoadEngine([LOAD_ENGINE, daemon.socket, str(SLOT_BYTES), "patient"])
        self.addCleanup(patient.kill)
        self.assertEqual(patient.ask("put", 0, 1), "ok")
        self.assertEqual(patient.ask("hold", 0), "ok")
        taken = int(patient.ask("take", 4).split()[1])
        patient.process.send_signal(signal.SIGSTOP)
        other = LoadEngine([LOAD_ENGINE, daemon.socket, str(SLOT_BYTES), "other"])
        self.addCleanup(other.kill)
        for first in range(0, 4000, 100):
            self.assertEqual(other.ask("put", first, 100), "ok")
        patient.process.send_signal(signal.SIGCONT)
        self.assertEqual(patient.ask("held"), "right")
        self.assertEqual(patient.ask("commit", 5), f"ok {taken}")
        self.assertEqual(patient.numbers("get", 5, taken)["wrong"], 0)
        self.assertEqual(patient.ask("put", 100, 10), "ok")
        self.assertEqual(patient.numbers("stats")["errors"], 0)
        self.assertEqual((patient.close(), other.close()), (0, 0))
        wire.until(lambda: daemon.metric("leased_slots") + daemon.metric("slots_granted") == 0,
                   "all is given back")
        self.assertEqual(daemon.stop(), 0)


if __name__ == "__main__":
    harness.main()
