#!/usr/bin/env python3
"""Kill kvistd at random moments under load, again and again; read every byte back.

    kill_loop.py [--kills N] [--minutes N] [--seed N]

Goes on until both are reached (20 kills). Three pools: one that is only read, one that engines fill,
one that is larger than the memory, so that it evicts, spills and promotes. Of the first two no block
may be lost. Now and then kvistd is killed while it starts, stopped first (SIGSTOP), ended orderly
(SIGTERM), or an engine dies. Ends with the figures, or with what was wrong, and the seed.
"""
import argparse
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time

import harness
import wire

sys.path.insert(0, os.path.join(harness.SOURCE, "tests", "support"))
from load import LoadEngine  # noqa: E402
from supervise import Supervisor  # noqa: E402

LOAD_ENGINE = os.environ.get("LOAD_ENGINE", "load_engine")
BLOCK_BYTES = 32 << 10
ARENA = "128M"  # 4,096 blocks, of which each engine is granted 256 ahead
FIXED_BLOCKS = 200
FILLED_BLOCKS = 300
FLOOD_BLOCKS = 6000
RUN_MS = 400
NVME = os.environ.get("KVISTD_NVME", "1") == "1"


class Loop:
    def __init__(self, directory: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.socket = os.path.join(directory, "k.sock")
        config = pathlib.Path(directory, "kvistd.conf")
        config.write_text("")
        nvme = ["--nvme", os.path.join(directory, "nvme"), "--nvme-bytes", "256M",
                "--set", "nvme.admission=all"] if NVME else []
        self.service = Supervisor(
            [harness.KVISTD, "--config", str(config), "--socket", self.socket, "--metrics", "off",
             "--arena", ARENA, *nvme], directory)
        self.engines: list[LoadEngine] = []
        self.counts = dict.fromkeys(("right", "miss", "wrong", "bytes", "lost", "errors"), 0)
        self.signals = dict.fromkeys(("SIGKILL", "SIGTERM", "starting", "stopped", "engines"), 0)
        self.hits = 0
        self.ready_s: list[float] = []

    # --- Engines --------------------------------------------------------------------------------

    def engine(self, pool: str) -> LoadEngine:
        engine = LoadEngine([LOAD_ENGINE, self.socket, str(BLOCK_BYTES), pool])
        self.engines.append(engine)
        assert engine.ask("wait", 60) == "ok", "an engine cannot connect"
        return engine

    def add(self, tally: dict[str, int]) -> None:
        for name, value in tally.items():
            self.counts[name] += value

    def collect(self, engine: LoadEngine, loses: bool = False) -> None:
        """What an engine has seen in all; a pool that evicts may lose blocks."""
        stats = engine.numbers("stats")
        self.add({"bytes": stats["bytes"], "errors": stats["errors"],
                  "lost": 0 if loses else stats["lost"]})

    def kill_engine(self, engine: LoadEngine) -> None:
        """In the middle of what it does; what it has seen until now counts."""
        self.collect(engine)
        engine.tell("run", RUN_MS, 0, FILLED_BLOCKS)
        time.sleep(self.chance.random() * 0.1)
        engine.kill()
        self.engines.remove(engine)
        self.signals["engines"] += 1

    # --- The daemon -----------------------------------------------------------------------------

    def end_daemon(self) -> None:
        """kvistd ends, at a random moment, in a random way; another one is ready."""
        time.sleep(self.chance.random() * RUN_MS / 1000)
        way = self.chance.random()
        if way < 0.1:
            status = self.service.kill(signal.SIGTERM).status
            assert status == 0, f"an orderly end with {status}"
            self.signals["SIGTERM"] += 1
        else:
            if way < 0.2:
                signal.pidfd_send_signal(self.service.wait_ready().pidfd, signal.SIGSTOP)
                self.signals["stopped"] += 1
                time.sleep(self.chance.random() * 0.1)
            self.service.kill()
            self.signals["SIGKILL"] += 1
        if way > 0.8:
            self.service.wait(lambda: self.service.pid is not None, what="the next one")
            time.sleep(self.chance.random() * 0.05)
            self.service.kill()
            self.signals["SIGKILL"] += 1
            self.signals["starting"] += 1
        run = self.service.wait_ready()
        self.ready_s.append(run.ready_s - run.started_s)

    def run(self, kills: int, minutes: float) -> None:
        self.service.start().wait_ready()
        end_s = time.monotonic() + minutes * 60
        fixed = self.engine("fixed")
        filling = [self.engine("filled") for _ in range(2)]
        flood = self.engine("flood")
        assert fixed.ask("put", 0, FIXED_BLOCKS) == "ok", "blocks cannot be put"
        assert fixed.ask("hold", 7) == "ok", "a block cannot be leased"
        while self.signals["SIGKILL"] < kills or time.monotonic() < end_s:
            for engine in filling:
                engine.tell("run", RUN_MS, 0, FILLED_BLOCKS)
            flood.tell("run", RUN_MS, 0, FLOOD_BLOCKS)
            self.end_daemon()
            assert fixed.ask("held") == "right", "a leased block has changed"
            tally = fixed.numbers("get", 0, FIXED_BLOCKS)
            self.hits += tally["right"]
            self.add(tally)
            for engine in (*filling, flood):
                self.add(engine.tally())
            if self.chance.random() < 0.2:
                self.kill_engine(filling.pop(0))
                filling.append(self.engine("filled"))
            self.check()
        for engine in (fixed, *filling):
            self.collect(engine)
        self.collect(flood, loses=True)
        self.check()
        self.check_rest(fixed)

    # --- What must be true ----------------------------------------------------------------------

    def check(self) -> None:
        for name in ("wrong", "errors", "lost"):
            assert self.counts[name] == 0, f"{name}: {self.counts}"
        # No other pool takes from this one: it stays far smaller than the one that is too large.
        missing = FIXED_BLOCKS * len(self.ready_s) - self.hits
        assert missing == 0, f"committed blocks miss: {missing} of {self.counts}"
        ends = {run.status for run in self.service.runs[:-1]}
        assert ends <= {0, -signal.SIGKILL}, f"ends of kvistd: {ends}"
        assert "starting without what" not in self.service.text(), "a daemon started without the blocks"

    def check_rest(self, fixed: LoadEngine) -> None:
        """What engines held is given back when they are gone."""
        assert fixed.ask("wait", 60) == "ok"
        assert fixed.ask("release") == "ok"
        for engine in self.engines:
            assert engine.close() == 0, "an engine ended badly"

        def rest() -> bool:
            with wire.Peer(self.socket) as peer:
                peer.hello()
                metrics, _ = peer.stat()
            return all(metrics[name] == 0 for name in
                       ("sessions", "leased_slots", "slots_granted", "slots_retired"))

        wire.until(rest, "no session, lease or grant is left")

    def close(self) -> None:
        for engine in self.engines:
            engine.kill()
        self.service.close()

    def figures(self) -> str:
        ways = ", ".join(f"{name} {count}" for name, count in self.signals.items())
        ready_ms = [seconds * 1000 for seconds in self.ready_s]
        share = self.hits / (FIXED_BLOCKS * len(self.ready_s))
        return (f"kills {len(self.service.runs) - 1} ({ways}); "
                f"verified {self.counts['bytes'] / 2**30:.1f} GiB in {self.counts['right']} blocks, "
                f"wrong {self.counts['wrong']}, lost {self.counts['lost']}, "
                f"errors {self.counts['errors']}; "
                f"committed blocks hit after restart {share:.1%} of {self.hits}; "
                f"ready after {statistics.median(ready_ms):.0f} ms, at most {max(ready_ms):.0f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvist-", ignore_cleanup_errors=True) as directory:
        loop = Loop(directory, arguments.seed)
        try:
            loop.run(arguments.kills, arguments.minutes)
        except BaseException:
            print(f"seed {arguments.seed}\n{loop.service.describe()}")
            raise
        finally:
            loop.close()
    print(loop.figures())
    return 0


if __name__ == "__main__":
    sys.exit(main())
