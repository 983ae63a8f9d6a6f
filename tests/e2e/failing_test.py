#!/usr/bin/env python3
"""kvistd while its calls fail, one after another: it says why and ends, or goes on serving.

Every call of libc that kvistd makes in a scenario (start, an engine that stores and looks, stop) is
failed in turn, once, and from then on (all of them with KVIST_FAILING_SECONDS=600); support/failing.c does it, from between kvistd and libc. A run
must neither crash nor hang: it ends with a sentence and a status, or serves, and stops when told to.
When a call failed once only, the daemon must serve an engine as before in the end.
"""
import os
import random
import signal
import sys
import time
import unittest

import harness
import wire

FAILING = os.environ["KVIST_FAILING_LIBRARY"]
SECONDS = float(os.environ.get("KVIST_FAILING_SECONDS", "15"))  # of each test
PATIENCE_S = 60
GIVE_UP_S = 1  # of an engine, while a call fails: what does not come because of that is no fault
KEY = b"k" * 32
BYTES = b"block of bytes " * 256

ORDERLY = (0, 1, 2)  # stopped, failed, no configuration


class Failing(harness.Case):
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

    def counts(self):
        path = os.path.join(self.directory, "count")
        self.assertTrue(self.run_with("any:0", path))
        with open(path, encoding="ascii") as file:
            return {name: int(count) for name, count in map(str.split, file)}

    def loop(self):
        """Each call of each name; as many as there is time for, others each time."""
        counts = {name: count for name, count in self.counts().items() if count > 0}
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

    def test_memory(self):
        self.nvme = False
        self.loop()

    @harness.needs_nvme
    def test_with_nvme(self):
        self.nvme = True
        self.loop()


if __name__ == "__main__":
    harness.main()
