#!/usr/bin/env python3
"""kvistd is killed and comes back: its memory, sessions, grants and leases are as they were."""
import os
import sys
import time

import harness
import wire

sys.path.insert(0, os.path.join(harness.SOURCE, "tests", "support"))
from load import LoadEngine  # noqa: E402
from supervise import Supervisor  # noqa: E402

LOAD_ENGINE = os.environ.get("LOAD_ENGINE", "load_engine")
BLOCK_BYTES = 64 << 10


class Warm(harness.Case):
    def service(self, *flags, arena="64M", **options):
        self.socket = os.path.join(self.directory, "k.sock")
        self.http = os.path.join(self.directory, "http.sock")
        command = [harness.KVISTD, "--config", self.config(), "--arena", arena, "--metrics",
                   f"unix:{self.http}", "--socket", self.socket, *flags]
        service = Supervisor(command, self.directory, **options)
        self.addCleanup(service.close)
        service.start().wait_ready()
        return service

    def config(self):
        path = os.path.join(self.directory, "empty.conf")
        with open(path, "w", encoding="utf-8"):
            return path

    def engine(self, block_bytes=BLOCK_BYTES):
        engine = LoadEngine([LOAD_ENGINE, self.socket, str(block_bytes)])
        self.addCleanup(engine.kill)
        self.assertEqual(engine.ask("wait", 30), "ok")
        return engine

    def metrics(self):
        with wire.Peer(self.socket) as peer:
            peer.hello()
            return peer.stat()[0]

    def killed(self, service, engine=None):
        """Kill kvistd; wait until it serves, and the engine with it, again."""
        connects = engine.numbers("stats")["connects"] if engine else 0
        service.kill()
        service.wait_ready()
        while engine and engine.numbers("stats")["connects"] == connects:
            time.sleep(0.01)

    def all_right(self, engine, first, count):
        self.assertEqual(engine.numbers("get", first, count),
                         {"right": count, "miss": 0, "wrong": 0})


class Kill(Warm):
    def test_blocks_are_there_before_and_after(self):
        service = self.service()
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 100), "ok")
        before = engine.numbers("stats")
        service.kill()
        self.all_right(engine, 0, 100)  # nobody is there to ask
        service.wait_ready()
        self.assertIn("adopted what kvistd had left blocks=100 ", service.text())
        self.assertEqual(engine.ask("wait", 30), "ok")
        self.all_right(engine, 0, 100)
        self.assertEqual(engine.ask("put", 100, 50), "ok")
        after = engine.numbers("stats")
        self.assertEqual(after["instance"], before["instance"])
        self.assertGreaterEqual(after["mapped"], before["mapped"])
        other = self.engine()
        self.all_right(other, 0, 150)
        self.assertEqual(self.metrics()["slots_retired"], 0)


if __name__ == "__main__":
    harness.main()
