#!/usr/bin/env python3
"""kvistd is killed again and again under a real systemd, and comes back each time."""
import os
import resource
import signal
import sys

import machine
from machine import SERVICE, SOCKET

sys.path.insert(0, str(machine.HERE.parent / "e2e"))
import wire  # noqa: E402

KILLS = 20
BLOCKS = 50
STORE_MAX = 1024  # FileDescriptorStoreMax= of the unit


class Kills(machine.Case):
    def test_twenty_in_a_row(self):
        rig = self.machine
        self.drop_in("RestartSec=50ms", "RestartSteps=0")
        engine = self.engine()
        self.put(engine, 0, BLOCKS)
        inode = rig.path(SOCKET).stat().st_ino
        pids = set()
        for count in range(KILLS):
            # Every other time without waiting until it is ready.
            rig.wait(self.is_active if count % 2 else self.main_pid, "it runs")
            pids.add(self.main_pid())
            self.signal("KILL")
            rig.wait(lambda: int(rig.show(SERVICE, "NRestarts")) > count, "it is started again")
            self.assertNotEqual(rig.show(SERVICE, "ActiveState"), "failed")
            self.assertEqual(rig.path(SOCKET).stat().st_ino, inode)
            self.all_right(engine, "get", 0, BLOCKS)
        self.assertEqual(len(pids), KILLS)
        self.assertIn("health     ok", rig.run("kvist", "status"))
        self.assertEqual(rig.show(SERVICE, "NRestarts"), str(KILLS))
        self.put(engine, BLOCKS, BLOCKS)
        self.all_right(self.engine(), "get", 0, 2 * BLOCKS)


class FullStore(machine.Case):
    """As many descriptors as the unit may keep: sessions of four processes and two pools each."""

    CONFIG = "[memory]\narena_bytes = 256M\n"

    def stored(self):
        return int(self.machine.show(SERVICE, "NFileDescriptorStore"))

    def join_until_refused(self):
        """Sessions, by the wire alone. @return what the last one was told"""
        path = str(self.machine.path(SOCKET))
        self.crowd = []
        while True:
            session = os.urandom(16)
            for rank in range(4):
                peer = wire.Peer(path)
                self.crowd.append(peer)
                role = wire.SCHEDULER if rank == 0 else wire.WORKER
                reply = peer.hello(role, session, max(0, rank - 1), 3)
                if reply.body != wire.HELLO_REPLY:
                    return reply.text(2)
                for part in range(2):
                    peer.request(wire.OPEN_POOL, {1: [{1: "model", 2: session + bytes([part])}],
                                                  2: machine.BLOCK_BYTES, 4: 0})

    def test_survives_kills_and_empties(self):
        rig = self.machine
        self.drop_in("RestartSec=50ms", "RestartSteps=0")
        engine = self.engine()
        self.put(engine, 0, 1)
        self.assertEqual(engine.ask("hold", 0), "ok")  # or the crowd would push it out
        told, tell = os.pipe()
        crowd = os.fork()
        if crowd == 0:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
            os.write(tell, self.join_until_refused().encode())
            signal.pause()
        self.addCleanup(os.close, told)
        self.addCleanup(os.waitpid, crowd, 0)
        self.addCleanup(os.kill, crowd, signal.SIGKILL)
        os.close(tell)
        # A page or a pidfd: by how many kvistd has stored of its own.
        self.assertIn(os.read(told, 4096).decode(),
                      ("no more fds can be kept", "the service manager can keep no more processes"))
        rig.wait(lambda: self.stored() > 1000, "systemd has read what it is to store")
        for count in range(3):
            self.signal("KILL")
            rig.wait(lambda: int(rig.show(SERVICE, "NRestarts")) > count and self.is_active(),
                     "it is started again")
            self.assertGreater(self.stored(), 1000)
            self.assertEqual(engine.ask("held"), "right")
            self.all_right(engine, "get", 0, 1)
        os.kill(crowd, signal.SIGKILL)
        # Of the crowd the pools are left: a map each, and the segments of the arena.
        rig.wait(lambda: self.stored() < STORE_MAX // 2, "what the crowd held is given back")
        self.all_right(self.engine(), "get", 0, 1)


class SmallStore(machine.Case):
    def test_a_limit_that_is_too_low_is_refused(self):
        self.drop_in("FileDescriptorStoreMax=100", "Environment=FDSTORE=100")
        self.assertNotEqual(self.machine.try_run("systemctl", "start", SERVICE).returncode, 0)
        self.assertIn("FileDescriptorStoreMax=", self.machine.journal("-u", SERVICE))

    def test_what_vanishes_is_missed_and_never_wrong(self):
        """systemd keeps fewer than kvistd believes, and does not say so."""
        rig = self.machine
        self.drop_in("FileDescriptorStoreMax=20", "Environment=FDSTORE=1024")
        engine = self.engine()
        self.put(engine, 0, 5 * BLOCKS)
        self.signal("KILL")
        rig.wait(lambda: rig.show(SERVICE, "NRestarts") == "1" and self.is_active(), "a restart")
        self.assertLessEqual(int(rig.show(SERVICE, "NFileDescriptorStore")), 20)
        for reader in (engine, self.engine()):
            self.assertEqual(reader.numbers("get", 0, 5 * BLOCKS)["wrong"], 0)
        self.put(self.engine(), 5 * BLOCKS, BLOCKS)
        self.assertEqual(engine.numbers("stats")["errors"], 0)


if __name__ == "__main__":
    machine.main()
