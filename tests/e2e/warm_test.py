#!/usr/bin/env python3
"""kvistd is killed and comes back: its memory, sessions, grants and leases are as they were."""
import os
import signal
import socket
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

    def wait_stored(self, service):
        """Until the store has what kvistd believes it to have."""
        service.wait(lambda: sum(service.stored().values()) == self.metrics()["stored_files"], 60,
                     "all is stored, and nothing else")

    def restart_with(self, service, arena):
        """Kill kvistd; the next one has another arena size."""
        service.command[service.command.index("--arena") + 1] = arena
        service.kill()
        service.wait_ready()

    def wait_until(self, holds, what):
        deadline = time.monotonic() + 60
        while not holds():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.02)

    def health(self):
        with wire.Peer(self.socket) as peer:
            peer.hello()
            return peer.stat()[1]

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

    def test_what_was_taken_before_is_committed_after(self):
        service = self.service()
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 10), "ok")
        self.assertEqual(engine.ask("hold", 3), "ok")
        self.assertEqual(engine.ask("take", 20), "ok 20")
        self.killed(service, engine)
        self.assertEqual(engine.ask("wait", 30), "ok")
        self.assertEqual(engine.ask("commit", 100), "ok 20")
        self.assertEqual(engine.ask("held"), "right")
        self.assertEqual(self.metrics()["leased_slots"], 1)
        self.assertEqual(engine.ask("release"), "ok")
        other = self.engine()
        self.assertEqual(other.ask("put", 200, 1), "ok")  # what came before is there by now
        self.all_right(other, 100, 20)

    def test_an_engine_that_ended_meanwhile_holds_nothing(self):
        service = self.service(restart_s=1.0)
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 50), "ok")
        self.assertEqual(engine.ask("hold", 7), "ok")
        service.kill()
        engine.kill()
        service.wait_ready()
        metrics = self.metrics()
        self.assertEqual([metrics[name] for name in
                          ("sessions", "slots_granted", "leased_slots", "adopted_blocks")],
                         [0, 0, 0, 50])
        self.assertEqual(sum(service.stored()[name] for name in service.stored()
                             if name[0] in "pd"), 0, service.stored())
        self.all_right(self.engine(), 0, 50)

    def test_what_tensors_look_like_is_remembered(self):
        def opened(shape):
            peer = wire.Peer(self.socket)
            self.addCleanup(peer.close)
            peer.hello(role=wire.WORKER, session=os.urandom(16), ranks=1).close()
            reply = peer.request(wire.OPEN_POOL, {1: {1: "model", 2: "x"}, 2: 65536, 5: shape})
            reply.close()
            return reply.body

        service = self.service()
        self.assertEqual(opened(b"a" * 32), wire.POOL_REPLY)
        self.killed(service)
        self.assertEqual(opened(b"b" * 32), wire.FAILURE)
        self.assertEqual(opened(b"a" * 32), wire.POOL_REPLY)

    def test_an_orderly_restart_is_as_warm(self):
        flags = ["--nvme", os.path.join(self.directory, "nvme"), "--nvme-bytes", "256M"]
        service = self.service(*(flags if harness.NVME else []))
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 100), "ok")
        self.assertEqual(service.kill(signal.SIGTERM).status, 0)
        service.wait_ready()
        self.assertEqual(engine.ask("wait", 30), "ok")
        self.all_right(engine, 0, 100)
        metrics = self.metrics()
        self.assertEqual(metrics["adopted_blocks"], 100)
        self.assertEqual(metrics["nvme_blocks"], 100 if harness.NVME else 0)
        self.assertEqual(metrics["stored_files"], sum(service.stored().values()))

    def test_a_smaller_arena_keeps_what_fits(self):
        service = self.service()
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 400), "ok")
        self.assertEqual(engine.close(), 0)
        self.restart_with(service, "32M")
        self.assertEqual(self.metrics()["adopted_blocks"], 400)
        self.wait_until(lambda: self.metrics()["arena_used_bytes"] <= 32 << 20, "it shrinks")
        self.assertGreater(self.metrics()["slots_ready"], 200)

    def test_a_smaller_arena_takes_what_engines_do_not_use(self):
        service = self.service(arena="128M")
        engines = [self.engine() for _ in range(16)]
        self.wait_until(lambda: self.metrics()["arena_used_bytes"] > 64 << 20, "it is granted")
        engines[0].process.send_signal(signal.SIGSTOP)
        self.restart_with(service, "32M")
        for engine in engines[1:]:
            self.assertEqual(engine.ask("wait", 30), "ok")
        self.wait_until(lambda: self.health().startswith("degraded: more memory"), "health says so")
        self.assertGreater(self.metrics()["arena_used_bytes"], 32 << 20)
        self.wait_until(lambda: "health=\"degraded: more memory" in service.text(), "it is logged")
        engines[0].process.send_signal(signal.SIGCONT)
        self.wait_until(lambda: self.metrics()["arena_used_bytes"] <= 32 << 20, "it shrinks")
        self.assertEqual(self.health(), "ok")
        for number, engine in enumerate(engines):
            self.assertEqual(engine.ask("put", number, 1), "ok")

    def test_a_larger_arena_is_used(self):
        service = self.service(arena="32M")
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 100), "ok")
        connects = engine.numbers("stats")["connects"]
        self.restart_with(service, "128M")
        self.wait_until(lambda: engine.numbers("stats")["connects"] > connects, "it connects")
        self.assertEqual(engine.ask("put", 0, 1000), "ok")
        self.all_right(engine, 0, 1000)
        metrics = self.metrics()
        self.assertEqual(metrics["evictions_total"], 0)
        self.assertGreater(metrics["arena_used_bytes"], 62 << 20)
        self.assertIn("the arena has another size", service.text())
        self.assertNotIn("cut into segments of a smaller arena", service.text())
        self.assertEqual(engine.ask("wait", 30), "ok")
        self.restart_with(service, "128M")
        self.all_right(engine, 0, 1000)


class Swapped(Warm):
    def swapped(self, kind, count, alive=False):
        """Swap the first stored descriptors of a kind two by two, and kill kvistd."""
        service = self.service()
        engine = self.engine()
        other = self.engine()
        self.assertEqual(engine.ask("put", 0, 100), "ok")
        self.wait_stored(service)
        if not alive:
            self.assertEqual(engine.close(), 0)
            self.assertEqual(other.close(), 0)
            service.wait(lambda: self.metrics()["sessions"] == 0, 60, "the engines have ended")
        names = sorted((name for name in service.stored() if name[0] == kind),
                       key=lambda name: int(name[1:], 16))[:count]
        for one, two in zip(names[::2], names[1::2]):
            service.swap(one, two)
        self.killed(service, engine if alive else None)
        return service, engine

    def never_wrong(self, engine):
        numbers = engine.numbers("get", 0, 100)
        self.assertEqual(numbers["wrong"], 0, numbers)
        return numbers["right"]

    def test_segments(self):
        service, _ = self.swapped("s", 20)
        metrics = self.metrics()
        self.assertEqual(self.never_wrong(self.engine()), metrics["adopted_blocks"])
        self.assertIn("stored fds are not what they were stored as fds=20 ", service.text())
        self.assertEqual(metrics["adopted_files_mistaken"], 20)
        self.assertGreater(metrics["adopted_blocks_dropped"], 0)
        self.assertEqual(metrics["adopted_blocks"] + metrics["adopted_blocks_dropped"], 100)
        self.wait_stored(service)

    def begins_anew(self, kind):
        service, engine = self.swapped(kind, 2, alive=True)
        self.assertIn("starting without what kvistd had left", service.text())
        self.assertEqual(self.never_wrong(engine), 0)
        self.assertEqual(engine.ask("wait", 30), "ok")
        self.assertEqual(engine.ask("put", 0, 100), "ok")
        self.all_right(engine, 0, 100)
        self.wait_stored(service)

    def test_segments_that_are_mapped(self):
        self.begins_anew("s")

    def test_session_pages(self):
        self.begins_anew("p")

    def test_processes(self):
        self.begins_anew("d")


class Deaf(Warm):
    def hello(self):
        peer = wire.Peer(self.socket)
        self.addCleanup(peer.close)
        peer.hello(role=wire.WORKER, session=os.urandom(16), ranks=1).close()
        return peer

    def open_pool(self, peer):
        reply = peer.request(wire.OPEN_POOL, {1: {1: "model", 2: os.urandom(4).hex()}, 2: 65536})
        reply.close()
        self.assertEqual(reply.body, wire.POOL_REPLY)

    def opened(self):
        """A session with an open pool."""
        peer = self.hello()
        self.open_pool(peer)
        return peer

    def test_nobody_waits_for_a_manager_that_does_not_read(self):
        service = self.service(arena="256M", watchdog_s=0.3)
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 20), "ok")
        with service.deaf():
            alive = service.runs[-1].alive
            peers = [self.opened() for _ in range(20)]
            for peer in peers[:10]:
                peer.close()
            signal.pidfd_send_signal(service.runs[-1].pidfd, signal.SIGHUP)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                metrics = self.metrics()
                if metrics["manager_messages_waiting"] >= 60 and metrics["reloads_total"] == 1:
                    break
            self.assertGreaterEqual(metrics["manager_messages_waiting"], 60)
            self.assertEqual(metrics["reloads_total"], 1)
            self.all_right(engine, 0, 20)
            self.assertLess(metrics["loop_lag_microseconds_max"], 5e6)
        service.wait_message("RELOADING=1")
        service.wait(lambda: service.runs[-1].alive > alive, 60, "the watchdog is fed")
        for peer in peers[10:]:
            peer.close()
        self.assertEqual(engine.ask("put", 100, 50), "ok")
        self.wait_stored(service)
        self.killed(service, engine)
        self.all_right(engine, 100, 50)
        self.assertEqual(self.metrics()["manager_messages_dropped_total"], 0)

    def test_it_starts_beside_a_manager_that_does_not_read(self):
        service = self.service()
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 20), "ok")
        connects = engine.numbers("stats")["connects"]
        with service.deaf():
            service.kill()
            deadline = time.monotonic() + 60
            while engine.numbers("stats")["connects"] == connects:
                self.assertLess(time.monotonic(), deadline, "it does not serve")
                time.sleep(0.01)
            self.all_right(engine, 0, 20)
        service.wait_ready()
        self.assertEqual(self.metrics()["adopted_blocks"], 20)

    def young_then_killed(self, begin, processes=0, pools=0):
        """Kill kvistd before a young engine is stored; the blocks of an older one stay.

        begin(peer): the young one, as far as it comes; peer: of a session that is stored."""
        service = self.service()
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 20), "ok")
        peer = self.hello()
        self.wait_stored(service)
        with service.deaf():
            young = begin(peer)
            service.kill()
        service.wait_ready()
        self.assertEqual(engine.ask("wait", 30), "ok")
        metrics = self.metrics()
        self.assertEqual([metrics[name] for name in (
            "adopted_blocks", "adopted_processes_dropped", "adopted_pools_dropped")],
            [20, processes, pools], service.text())
        self.assertIn(f"not all was stored when kvistd ended processes={processes} pools={pools} ",
                      service.text())
        self.all_right(engine, 0, 20)
        self.all_right(self.engine(), 0, 20)
        self.wait_stored(service)
        return young

    def test_a_process_is_not_stored(self):
        self.young_then_killed(lambda _: self.hello(), processes=1)

    def test_a_process_and_its_pool_are_not_stored(self):
        self.young_then_killed(lambda _: self.opened(), processes=1, pools=1)

    def test_a_pool_of_a_stored_process_is_not_stored(self):
        self.young_then_killed(self.open_pool, pools=1)

    def test_an_engine_that_is_not_stored_works_later(self):
        def begin(_):
            young = LoadEngine([LOAD_ENGINE, self.socket, str(BLOCK_BYTES)])
            self.addCleanup(young.kill)
            self.assertEqual(young.ask("wait", 1), "timeout")  # nothing is lent to it
            return young

        young = self.young_then_killed(begin, processes=1)
        self.assertEqual(young.ask("wait", 30), "ok")
        self.all_right(young, 0, 20)
        self.assertEqual(young.ask("put", 100, 20), "ok")
        self.all_right(young, 100, 20)


class Cold(Warm):
    def test_nothing_is_kept_without_a_store(self):
        service = self.service(store_max=0)
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 20), "ok")
        instance = engine.numbers("stats")["instance"]
        self.killed(service, engine)
        self.assertNotIn("what kvistd had left", service.text())
        self.assertEqual(self.metrics()["stored_files_max"], 0)
        self.assertEqual(engine.ask("wait", 30), "ok")
        self.assertNotEqual(engine.numbers("stats")["instance"], instance)
        self.assertEqual(engine.ask("put", 0, 20), "ok")

    def test_an_arena_that_does_not_fit_the_store_is_refused(self):
        error = self.refuses(words=["FileDescriptorStoreMax"], status=2, env={"FDSTORE": "300"})
        self.assertIn("64 segments", error)

    def test_what_is_not_understood_is_let_go(self):
        service = self.service()
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 20), "ok")
        service.drop("r0")  # as if the store had been full
        self.killed(service, engine)
        self.assertIn("starting without what kvistd had left", service.text())
        self.assertEqual(engine.ask("wait", 30), "ok")
        self.assertEqual(engine.ask("put", 0, 20), "ok")
        self.assertEqual(service.stored()["r0"], 1)

    def test_what_it_does_not_know_is_closed_and_removed(self):
        service = self.service()
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 20), "ok")
        for name in ("stranger", "s0123456789ab", "r0r"):
            with open(os.devnull, "rb") as stranger:
                service.keep(name, stranger.fileno())
        near, far = socket.socketpair()
        with near, far:
            service.keep("s7fffffff", near.fileno())
        self.killed(service, engine)
        self.assertIn('passed fds are not used count=3 first="stranger" ', service.text())
        self.assertEqual(self.metrics()["adopted_blocks"], 20)
        self.wait_stored(service)

    def test_a_store_that_is_no_longer_wanted_is_emptied(self):
        service = self.service()
        engine = self.engine()
        self.assertEqual(engine.ask("put", 0, 20), "ok")
        service.environment["FDSTORE"] = ""
        self.killed(service, engine)
        self.assertIn('reason="FDSTORE is not set" action=closed', service.text())
        self.assertEqual(service.text().count("passed fds are not used"), 1)
        service.wait(lambda: not service.stored(), 60, "the store is emptied")
        self.assertEqual(engine.ask("wait", 30), "ok")
        self.assertEqual(engine.ask("put", 0, 20), "ok")


if __name__ == "__main__":
    harness.main()
