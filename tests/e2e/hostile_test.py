#!/usr/bin/env python3
"""What a member may do to the memory that it is lent: its own pool's bytes, and nothing else."""
import ctypes
import fcntl
import glob
import mmap
import os
import random
import resource
import signal
import struct
import sys
import unittest

import harness
import wire

sys.path.insert(0, os.path.join(harness.SOURCE, "tests", "support"))
from load import LoadEngine  # noqa: E402  pylint: disable=wrong-import-position

LOAD_ENGINE = os.environ.get("LOAD_ENGINE", "load_engine")
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 2, 4, 8
FALLOC_PUNCH_HOLE = 3  # and FALLOC_FL_KEEP_SIZE
LIBC = ctypes.CDLL(None, use_errno=True)


def key(number):
    return number.to_bytes(32, "little")


def content(number):
    return random.Random(number).randbytes(wire.Engine.SLOT_BYTES)


def punch(fd, offset, length):
    """@return 0, or errno"""
    failed = LIBC.fallocate(fd, FALLOC_PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(length))
    return ctypes.get_errno() if failed else 0


class Member(wire.Engine):
    """An engine that keeps the descriptors it gets."""

    def __init__(self, *arguments, **more):
        self.kept = {}
        super().__init__(*arguments, **more)

    def receive(self):
        message = super().receive()
        for fd in message.fds:
            self.kept.setdefault(message.body, []).append(os.dup(fd))
        return message

    def close(self):
        for fd in [fd for fds in self.kept.values() for fd in fds]:
            os.close(fd)
        self.kept = {}
        super().close()

    def lease(self, record, slot):
        offset = struct.unpack_from("<QII16sQIIIIIIQQQQ", self.page, 0)[11]
        struct.pack_into("<I", self.page, 96, record + 1)  # lease_high
        struct.pack_into("<Q", self.page, offset + 16 * record, (self.pool + 1) << 32 | slot)

    def bytes_of(self, slot):
        segment, index = divmod(slot, self.slots_per_segment)
        start = index * self.SLOT_BYTES
        return self.maps[segment][start:start + self.SLOT_BYTES]


class Memory(harness.Case):
    def member(self, daemon, *arguments, **more):
        engine = Member(daemon.socket, os.urandom(16), *arguments, **more)
        self.addCleanup(engine.close)
        return engine

    def store(self, engine, numbers):
        """Blocks with contents of their own. @return slots by number"""
        slots = {}
        for number in numbers:
            if not engine.maps:
                engine.map_segment()
            if not getattr(engine, "free", None):
                engine.free = engine.granted()
            slots[number] = engine.free[0][0]
            engine.put(key(number), content(number))
        engine.request(wire.STAT)
        return slots

    def assert_holds(self, engine, slots):
        for number, slot in slots.items():
            self.assertEqual(engine.bytes_of(slot), content(number))

    def test_nothing_can_be_resized_or_unsealed(self):
        daemon = self.start()
        engine = self.member(daemon)
        self.store(engine, range(4))
        kinds = (wire.HELLO_REPLY, wire.POOL_REPLY, wire.SEGMENT)
        self.assertEqual(sorted(engine.kept), sorted({*kinds, *engine.kept}))
        for kind in kinds:
            fd = engine.kept[kind][0]
            size = os.fstat(fd).st_size
            self.assertEqual(fcntl.fcntl(fd, F_GET_SEALS) & 7, 7)
            for length in (0, size - 4096, size + 4096):
                with self.assertRaises(OSError):
                    os.ftruncate(fd, length)
            with self.assertRaises(PermissionError):
                fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE)  # which would stop the others
        with self.assertRaises(PermissionError):  # the map is for reading
            mmap.mmap(engine.kept[wire.POOL_REPLY][0], 4096)
        with self.assertRaises(OSError):
            os.pwrite(engine.kept[wire.POOL_REPLY][0], b"x", 0)
        self.assertNotEqual(punch(engine.kept[wire.POOL_REPLY][0], 0, 4096), 0)
        self.assert_serves(daemon)

    def test_holes_hurt_nobody_else(self):
        daemon = self.start()
        other = self.member(daemon, {"model": "other"})
        theirs = self.store(other, range(100, 120))
        engine = self.member(daemon)
        self.store(engine, range(40))
        for kind in (wire.SEGMENT, wire.HELLO_REPLY):
            for fd in engine.kept[kind]:
                self.assertEqual(punch(fd, 0, os.fstat(fd).st_size), 0)
        engine.free = []
        engine.request(wire.STAT)
        self.assert_holds(other, theirs)
        self.store(other, range(120, 140))
        self.assert_serves(daemon)
        engine.socket.close()
        self.assertEqual(daemon.stop(), 0)  # orderly: every lease and grant was accounted for

    def test_a_page_of_nonsense_that_changes_all_the_time(self):
        daemon = self.start("--set", "daemon.log_level=error")
        other = self.member(daemon, {"model": "other"})
        theirs = self.store(other, range(100, 110))
        child = os.fork()
        if child == 0:
            try:
                engine = Member(daemon.socket, os.urandom(16))
                engine.map_segment()
                engine.granted()
                noise = [os.urandom(len(engine.page)) for _ in range(3)]
                noise += [bytes(len(engine.page)), b"\xff" * len(engine.page),
                          struct.pack("<II", 0, 1) * (len(engine.page) // 8)]
                while True:
                    for page in noise:
                        engine.page[:] = page
            finally:
                os._exit(1)
        self.addCleanup(os.waitpid, child, 0)
        self.addCleanup(os.kill, child, signal.SIGKILL)
        wire.until(lambda: daemon.metric("sessions") == 2, "both are there")
        # All that reads pages: eviction, listings, figures, grants.
        for first in range(200, 2000, 100):
            self.store(other, range(first, first + 100))
            daemon.tool("status")
        self.assertGreater(daemon.metric("evictions_total"), 100)
        self.assertEqual(daemon.metric("checksum_mismatch_total"), 0)
        self.assertLess(daemon.metric("loop_lag_microseconds_max"), 2e6)
        self.assert_serves(daemon)
        self.assertEqual(len(theirs), 10)

    def test_forged_marks_and_late_commits(self):
        daemon = self.start()
        engine = self.member(daemon)
        engine.map_segment()
        slots = engine.granted()
        mark_offset = struct.unpack_from("<Q", engine.page, 72)[0]
        for ticket in range(4096):  # the mark of a reservation that was never given
            struct.pack_into("<Q", engine.page, mark_offset + 8 * ticket, slots[0][2])
        slot, ticket, reservation = slots[0]
        engine.commit(slot, ticket, reservation, key(1), 4096)  # its own, marked: as good as filled
        slot, ticket, reservation = slots[1]
        engine.commit(slot, ticket, reservation, key(2), 4096)  # marked for another one
        engine.request(wire.STAT)
        self.assertEqual(daemon.metric("commits_total"), 1)
        self.assertEqual(daemon.metric("commits_unmarked_total"), 1)
        engine.fill(*slots[2], b"x" * 4096)
        self.assertEqual(daemon.tool("clear", "--all", "--yes")[0], 0)
        engine.commit(*slots[2], key(3), 4096)  # granted before the clear
        engine.request(wire.STAT)
        self.assertEqual(daemon.metric("commits_stale_total"), 1)
        self.assertEqual(daemon.metric("slots_ready"), 0)
        engine.commit(*slots[2], key(3), 4096)  # a grant that has ended
        engine.request(wire.STAT)
        self.assertEqual(daemon.metric("slots_ready"), 0)
        engine.commit(slots[3][0], slots[3][1], slots[3][2] + 1000000, key(4), 4096)
        self.assert_ends(engine, wire.INVALID, "granted")

    def test_leases_that_are_never_given_back(self):
        daemon = self.start("--set", "memory.eviction=lru")  # the oldest go first: these
        engine = self.member(daemon)
        held = self.store(engine, range(60))
        for record, slot in enumerate(held.values()):
            engine.lease(record, slot)
        other = self.member(daemon)
        for first in range(1000, 4000, 200):
            self.store(other, range(first, first + 200))
        self.assert_holds(engine, held)
        self.assertGreater(daemon.metric("evictions_leased_total"), 0)
        self.assertGreaterEqual(daemon.metric("leased_slots"), 60)
        self.assertEqual(daemon.metric("commits_total"), 60 + 3000)

    def test_stopped_with_granted_slots_and_going_on(self):
        daemon = self.start()
        patient = LoadEngine([LOAD_ENGINE, daemon.socket, "65536"])
        self.addCleanup(patient.kill)
        self.assertEqual(patient.ask("wait", 30), "ok")
        taken = int(patient.ask("take", 20).split()[1])
        self.assertGreater(taken, 0)
        patient.process.send_signal(signal.SIGSTOP)
        other = self.member(daemon, {"model": "other"})
        for first in range(1000, 5000, 200):  # all of the arena, several times over
            self.store(other, range(first, first + 200))
        self.assertGreaterEqual(daemon.metric("slots_granted"), taken)
        patient.process.send_signal(signal.SIGCONT)
        self.assertEqual(patient.ask("commit", 5), f"ok {taken}")
        wire.until(lambda: patient.ask("get", 5, taken) == f"right {taken} miss 0 wrong 0",
                   "what it had posted is found")
        self.assertEqual(daemon.metric("checksum_mismatch_total"), 0)
        self.assertEqual(patient.close(), 0)


@unittest.skipIf(os.environ.get("KVIST_SANITIZE"), "sanitizers turn core dumps off")
class Dumps(harness.Case):
    """Core dumps hold no block, but for what a thread had in its registers: the end of the last one
    that it copied. What holds blocks is marked so that the kernel leaves it out."""

    BLOCK_BYTES = 60001 * 8  # its last page is not whole: disks take whole pages only

    @staticmethod
    def words(number, first):
        """As load_engine fills a block: 4 of its words."""
        return b"".join(struct.pack("<Q", (number << 32 | index) * 0xbf58476d1ce4e5b9 % 2**64)
                        for index in range(first, first + 4))

    def core(self, process):
        """The core that a process leaves when it is aborted."""
        process.send_signal(signal.SIGABRT)
        process.wait()
        cores = glob.glob(os.path.join(self.directory, "core*"))
        self.assertEqual(len(cores), 1, "a core that is a file is needed: see core_pattern")
        with open(cores[0], "rb") as file:
            data = file.read()
        os.unlink(cores[0])
        return data

    def assert_marked(self, pid):
        """Every mapping of shared memory has MADV_DONTDUMP. @return how many there are"""
        count, inside = 0, False
        with open(f"/proc/{pid}/smaps", encoding="utf-8") as file:
            for line in file:
                if "-" in line.split()[0]:
                    inside = "/memfd:" in line
                elif line.startswith("VmFlags:") and inside:
                    count += 1
                    self.assertIn("dd", line.split())
        return count

    def test_of_the_daemon_and_of_an_engine(self):
        def cores():
            resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)

        flags = ["--set", "nvme.admission=all", "--nvme", f"{self.directory}/nvme", "--nvme-bytes",
                 "256M"] if os.environ.get("KVISTD_NVME", "1") == "1" else []
        daemon = self.start(*flags, preexec_fn=cores, cwd=self.directory)
        engine = LoadEngine([LOAD_ENGINE, daemon.socket, str(self.BLOCK_BYTES)], preexec_fn=cores,
                            cwd=self.directory)
        self.addCleanup(engine.kill)
        self.assertEqual(engine.ask("put", 1, 200), "ok")  # more than memory holds
        if flags:
            self.assertEqual(engine.numbers("fetch", 1, 20)["wrong"], 0)
            self.assertGreater(daemon.metric("nvme_reads_total"), 0)
        self.assertEqual(engine.ask("hold", 190), "ok")
        self.assertGreater(self.assert_marked(daemon.process.pid), 5)
        self.assertGreater(self.assert_marked(engine.process.pid), 5)
        for process in (engine.process, daemon.process):
            data = self.core(process)
            self.assertGreaterEqual(data.find(daemon.socket.encode()), 0)  # it is a core of it
            found = [(number, first) for number in range(1, 201) for first in (0, 30000, 59950)
                     if data.find(self.words(number, first)) >= 0]
            self.assertEqual(found, [], f"blocks in the core of {process.args[0]}")


if __name__ == "__main__":
    harness.main()
