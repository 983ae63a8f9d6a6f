#!/usr/bin/env python3
"""kvistd, then an engine on libkvist, while its calls fail, one after another.

Every call of libc that the program makes in a scenario (start, store, look, stop) is failed in turn,
once, and from then on; support/failing.c does it, from between program and libc. Some are drawn,
KVIST_FAILING_SECONDS=600 tries all.

kvistd must neither crash nor hang: it ends with a sentence and a status, or serves, and stops when
told to. When a call failed once only, it must serve an engine as before in the end.

An engine must neither crash nor hang nor read wrong bytes. When a call failed once only, it must
store and hit in the end, without being opened anew. A daemon that served it holds nothing of it
afterwards.
"""
import os
import random
import signal
import subprocess
import sys
import time
import unittest

import harness
import wire

sys.path.insert(0, os.path.join(harness.SOURCE, "tests", "support"))
from load import LoadEngine  # noqa: E402

FAILING = os.environ["KVIST_FAILING_LIBRARY"]
LOAD_ENGINE = os.environ["LOAD_ENGINE"]
SECONDS = float(os.environ.get("KVIST_FAILING_SECONDS", "15"))  # of each test
PATIENCE_S = 60
GIVE_UP_S = 1  # of an engine, while a call fails: what does not come because of that is no fault
KEY = b"k" * 32
BYTES = b"block of bytes " * 256

ORDERLY = (0, 1, 2)  # stopped, failed, no configuration


class Failing(harness.Case):
    def loop(self):
        """Each call of each name; as many as there is time for, others each time."""
        path = os.path.join(self.directory, "count")
        self.assertTrue(self.run_with("any:0", path))
        with open(path, encoding="ascii") as file:
            counts = {name: int(count) for name, count in map(str.split, file)}
        counts = {name: count for name, count in counts.items() if count > 0}
        runs = [(name, nth, forever) for name, count in counts.items()
                for nth in range(1, count + 1) for forever in ("", "+")]
        random.shuffle(runs)
        until = time.monotonic() + SECONDS
        done = 0
        for name, nth, forever in runs:
            if time.monotonic() > until:
                break
            with self.subTest(call=f"{name}:{nth}{forever}"):
                self.run_with(f"{name}:{nth}{forever}")
            done += 1
        print(f"{done} of {len(runs)} failures of {len(counts)} calls", file=sys.stderr)


class Daemon(Failing):
    def scenario(self, daemon, seconds):
        """What engines do; whatever the daemon does of it. @return whether all went well"""
        wire.DEADLINE_S = seconds
        try:
            with wire.Engine(daemon.socket, b"s" * 16) as engine:
                engine.put(KEY, BYTES)
                engine.stat()
            return True
        except (OSError, AssertionError, wire.Gone, LookupError, TypeError, ValueError):
            return False  # a Failure in place of a reply, or nothing

    def run_with(self, failing, count=None):
        """@return whether the daemon got ready"""
        directory = os.path.join(self.directory, "d")
        os.makedirs(directory, exist_ok=True)
        env = {"LD_PRELOAD": FAILING, "KVIST_FAILING": failing}
        if count is not None:
            env["KVIST_FAILING_COUNT"] = count
        flags = ("--nvme", os.path.join(directory, "nvme"), "--nvme-bytes", "256M") if harness.NVME and self.nvme else ()
        daemon = harness.Daemon(directory, *flags, arena="16M", env=env)
        try:
            ready = daemon.notified("READY=1", PATIENCE_S) is not None
            if ready:
                well = self.scenario(daemon, GIVE_UP_S)
                if not failing.endswith("+") and not well and daemon.process.poll() is None:
                    self.assertTrue(self.scenario(daemon, PATIENCE_S),
                                    f"{failing}: does not serve again")
                daemon.process.send_signal(signal.SIGTERM)
            status = daemon.ended(PATIENCE_S)
            self.assertIn(status, ORDERLY, f"{failing}: {status}\n{daemon.text()}")
            if not ready:
                self.assertNotEqual(status, 0, f"{failing}: never ready\n{daemon.text()}")
            if status != 0:
                self.assertIn("error: ", daemon.text(), failing)
            return ready
        finally:
            daemon.dispose()
            if os.path.exists(daemon.log):
                os.unlink(daemon.log)

    def test_memory(self):
        self.nvme = False
        self.loop()

    @harness.needs_nvme
    def test_with_nvme(self):
        self.nvme = True
        self.loop()


class Engine(Failing):
    BLOCKS = 4
    BLOCK_BYTES = 65536

    def run_with(self, failing, count=None):
        """@return whether it went as without a failure"""
        env = dict(os.environ, LD_PRELOAD=FAILING, KVIST_FAILING=failing)
        if count is not None:
            env["KVIST_FAILING_COUNT"] = count
        blocks = (self.first, self.BLOCKS)
        self.first += self.BLOCKS
        engine = LoadEngine([LOAD_ENGINE, self.daemon.socket, str(self.BLOCK_BYTES)],
                            env=env, stderr=subprocess.DEVNULL)
        well = False
        try:
            if not failing.endswith("+"):
                well = engine.ask("put", *blocks) == "ok"
            engine.tell("run", 50, *blocks)
            tally = engine.tally()
            self.assertEqual(tally["wrong"], 0, failing)
            well = well and tally["miss"] == 0
            status = engine.close()
        except (BrokenPipeError, LoadEngine.Died):  # refused to begin
            status = engine.process.wait()
        finally:
            engine.kill()
        self.assertIn(status, (0, 1), failing)
        if status == 0 and not failing.endswith("+"):
            self.assertTrue(well, f"{failing}: does not store and hit again")
        self.assert_at_rest(failing)
        return well

    def assert_at_rest(self, failing):
        until = time.monotonic() + PATIENCE_S
        while self.daemon.metric("sessions") > 0 or self.daemon.open_files() > self.files:
            self.assertLess(time.monotonic(), until, f"{failing}: something of it stays:"
                            f" {self.daemon.open_files()} open files, {self.files} before")
            time.sleep(0.01)

    def test_engine(self):
        self.daemon = self.start(arena="16M")
        engine = LoadEngine([LOAD_ENGINE, self.daemon.socket, str(self.BLOCK_BYTES)])
        self.first = 400  # more than fit: the pool has all segments, and keeps them
        self.assertEqual(engine.ask("put", 0, self.first), "ok")
        engine.close()
        self.files = 0
        while self.daemon.metric("sessions") > 0 or self.files != self.daemon.open_files():
            self.files = self.daemon.open_files()
            time.sleep(0.1)
        self.loop()


if __name__ == "__main__":
    harness.main()
