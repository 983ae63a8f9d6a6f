#!/usr/bin/env python3
"""kvistd, then an engine on libkvist, under valgrind: no byte read that was not written, no leak.

The sanitizers do not see what was never initialised, nor into the libraries; valgrind does.
"""
import os
import shutil
import signal
import sys
import unittest

import harness

sys.path.insert(0, os.path.join(harness.SOURCE, "tests", "support"))
from load import LoadEngine  # noqa: E402

LOAD_ENGINE = os.environ["LOAD_ENGINE"]
BLOCK_BYTES = 65536
PATIENCE_S = 180  # it runs some thirty times slower


@unittest.skipUnless(shutil.which("valgrind"), "needs valgrind")
class Memcheck(harness.Case):
    def wrap(self):
        self.report = os.path.join(self.directory, "report")
        return ("valgrind", "--error-exitcode=99", "--leak-check=full",
                "--errors-for-leak-kinds=definite", f"--log-file={self.report}")

    def assert_clean(self, status):
        with open(self.report, encoding="utf-8", errors="replace") as file:
            self.assertEqual(status, 0, file.read()[-4000:])

    def nvme(self):
        return ("--nvme", os.path.join(self.directory, "nvme"),
                "--nvme-bytes", "256M") if harness.NVME else ()

    def work(self, daemon, engine):
        """More blocks than fit; read, evicted, promoted, saved, cleared."""
        self.assertEqual(engine.ask("wait", PATIENCE_S), "ok")
        self.assertEqual(engine.ask("put", 0, 300), "ok")
        self.assertEqual(engine.numbers("run", 2000, 0, 400)["wrong"], 0)
        self.assertEqual(engine.numbers("fetch", 0, 20 if harness.NVME else 0)["wrong"], 0)
        if harness.NVME:
            self.assertEqual(daemon.tool("save")[0], 0)
        self.assertEqual(daemon.tool("clear", "--all", "--yes")[0], 0)

    def test_kvistd(self):
        daemon = self.launch(*self.nvme(), arena="16M", wrap=self.wrap())
        self.assertIsNotNone(daemon.notified("READY=1", PATIENCE_S), daemon.text())
        engine = LoadEngine([LOAD_ENGINE, daemon.socket, str(BLOCK_BYTES)])
        self.addCleanup(engine.kill)
        self.work(daemon, engine)
        self.assertEqual(engine.close(), 0)
        daemon.process.send_signal(signal.SIGTERM)
        self.assert_clean(daemon.ended(PATIENCE_S))

    def test_engine(self):
        daemon = self.start(*self.nvme(), arena="16M")
        engine = LoadEngine([*self.wrap(), LOAD_ENGINE, daemon.socket, str(BLOCK_BYTES)])
        self.addCleanup(engine.kill)
        self.work(daemon, engine)
        self.assert_clean(engine.close())


if __name__ == "__main__":
    harness.main()
