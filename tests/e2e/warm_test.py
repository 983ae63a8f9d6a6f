#!/usr/bin/env python3
"""kvistd is killed and comes back: its memory, sessions, grants and leases are as they were."""
import os
import random
import subprocess
import sys
import time

import harness
import wire

sys.path.insert(0, os.path.join(harness.SOURCE, "tests", "support"))
from supervise import Supervisor  # noqa: E402

LOAD_ENGINE = os.environ.get("LOAD_ENGINE", "load_engine")
BLOCK_BYTES = 64 << 10


class Engine:
    """A load_engine process."""

    def __init__(self, socket_path, block_bytes=BLOCK_BYTES):
        self.process = subprocess.Popen([LOAD_ENGINE, socket_path, str(block_bytes)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, *words):
        print(*words, file=self.process.stdin, flush=True)

    def answer(self):
        line = self.process.stdout.readline()
        assert line, f"the engine died: {self.process.wait()}"
        return line.strip()

    def ask(self, *words):
        self.tell(*words)
        return self.answer()

    def numbers(self, *words):
        """An answer of words and numbers, as a dictionary."""
        self.tell(*words)
        return self.tally()

    def tally(self):
        parts = self.answer().split()
        return dict(zip(parts[::2], map(int, parts[1::2])))

    def close(self):
        """Its exit status."""
        self.process.stdin.close()
        status = self.process.wait(60)
        self.process.stdout.close()
        return status

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


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

    def engine(self, **options):
        engine = Engine(self.socket, **options)
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

    def test_twenty_kills_under_load(self):
        service = self.service()
        fixed = self.engine()
        busy = [self.engine() for _ in range(2)]
        self.assertEqual(fixed.ask("put", 0, 100), "ok")
        seed = random.randrange(1 << 32)
        chance = random.Random(seed)
        total = {"right": 0, "miss": 0, "wrong": 0}
        for _ in range(20):
            for engine in busy:
                engine.tell("run", 300, 1000, 300)
            time.sleep(chance.random() * 0.25)
            self.killed(service)
            self.all_right(fixed, 0, 100)
            for engine in busy:
                for word, count in engine.tally().items():
                    total[word] += count
        self.assertEqual(total["wrong"], 0, f"seed {seed}")
        self.assertGreater(total["right"], 0)
        self.assertEqual(service.text().count("adopted what kvistd had left"), 20, service.text())
        for engine in [fixed, *busy]:
            self.assertEqual(engine.ask("wait", 30), "ok")
            self.assertEqual(engine.ask("put", 0, 120), "ok")
            self.assertEqual(engine.close(), 0)


if __name__ == "__main__":
    harness.main()
