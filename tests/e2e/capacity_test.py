#!/usr/bin/env python3
"""How much of a full arena holds blocks, with real engines that store one block after another."""
import os
import sys
import unittest

import harness

sys.path.insert(0, os.path.join(harness.SOURCE, "tests", "support"))
from load import LoadEngine  # noqa: E402

LOAD_ENGINE = os.environ.get("LOAD_ENGINE", "load_engine")
MIB = 1 << 20
BEGINNING = 256  # blocks that an engine stores before it is known how many it takes at once
STEP = 16


class Capacity(harness.Case):
    def fill(self, arena_mib, block_mib, engine_count):
        """Fill the arena, then store as much again. @return least share of it that held blocks"""
        daemon = self.start(arena=f"{arena_mib}M")
        slots = arena_mib // block_mib
        engines = []
        for _ in range(engine_count):
            engine = LoadEngine([LOAD_ENGINE, daemon.socket, str(block_mib * MIB), "pool"])
            self.addCleanup(engine.kill)
            self.assertEqual(engine.ask("wait", 60), "ok")
            engines.append(engine)
        stored = 0
        least = 1.0
        beginning = max(BEGINNING * engine_count, slots) + STEP * engine_count
        while stored < beginning + slots:
            for index, engine in enumerate(engines):
                first = index * 65536 // engine_count + stored // engine_count
                self.assertEqual(engine.ask("put", first, STEP), "ok")
            stored += STEP * engine_count
            if stored > beginning:
                least = min(least, daemon.metric("slots_ready") / slots)
        lines = dict(line.split(" ", 1) for line in daemon.get("/metrics")[1].splitlines()
                     if not line.startswith("#"))
        self.assertEqual(float(lines["kvist_granted_bytes"]),
                         float(lines["kvist_slots_granted"]) * block_mib * MIB)
        self.assertIn("granted (", daemon.tool("status")[1])
        self.assertIn("granted (", daemon.tool("pools")[1])
        return least

    def test_one_engine(self):
        self.assertGreaterEqual(self.fill(512, 1, 1), 0.9)

    def test_four_engines(self):
        self.assertGreaterEqual(self.fill(512, 1, 4), 0.9)

    def test_a_larger_arena(self):
        self.assertGreaterEqual(self.fill(2048, 1, 2), 0.9)

    def test_large_blocks(self):
        self.assertGreaterEqual(self.fill(2048, 16, 1), 0.75)


if __name__ == "__main__":
    unittest.main()
