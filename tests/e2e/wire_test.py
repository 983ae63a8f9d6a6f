#!/usr/bin/env python3
"""kvistd against peers that break every rule: it says what is wrong, and goes on serving."""
import array
import os
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import unittest

import harness
import wire

SESSION = bytes(range(16))


class Garbage(harness.Case):
    def setUp(self):
        super().setUp()
        self.daemon = self.start("--set", "daemon.log_level=error")
        self.files = self.daemon.files_at_rest()
        self.addCleanup(self.still_serves)

    def still_serves(self):
        self.assert_serves(self.daemon)
        wire.until(lambda: self.daemon.metric("connections") == 0, "connections are closed")
        # Sessions of this very process live on; a killed one's fds are looked at elsewhere.
        sessions = self.daemon.metric("sessions")
        wire.until(lambda: sessions > 0 or self.daemon.open_files() <= self.files, "fds come back")
        self.assertEqual(self.daemon.stop(), 0, self.daemon.text())

    def peer(self, **hello):
        peer = wire.Peer(self.daemon.socket)
        self.addCleanup(peer.close)
        if hello.pop("greet", True):
            self.assertEqual(peer.hello(**hello).body, wire.HELLO_REPLY)
        return peer

    def test_random_bytes(self):
        chance = random.Random(3)
        for _ in range(200):
            peer = self.peer(greet=False)
            peer.send_bytes(chance.randbytes(chance.randrange(1, 5000)))
            peer.socket.shutdown(socket.SHUT_WR)
            peer.ends()
            peer.close()

    def test_random_messages_in_frames(self):
        chance = random.Random(4)
        for turn in range(300):
            peer = self.peer(greet=turn % 2 == 0)
            peer.send_bytes(wire.frame(chance.randbytes(chance.randrange(1, 300))))
            peer.socket.shutdown(socket.SHUT_WR)
            peer.ends()
            peer.close()

    def test_flipped_bits_of_real_messages(self):
        chance = random.Random(5)
        for _ in range(120):
            peer = self.peer(role=wire.ENGINE, session=chance.randbytes(16), ranks=1)
            message = bytearray(wire.envelope(wire.OPEN_POOL, {
                1: [{1: "model", 2: "x"}], 2: 65536}, 9) if chance.random() < 0.5 else
                wire.envelope(wire.COMMIT, {1: 0, 2: {1: 1, 2: 1, 3: wire.Fixed64(7),
                                                      4: bytes(32), 6: 4096}}))
            for _ in range(chance.randrange(1, 4)):
                message[chance.randrange(len(message))] ^= 1 << chance.randrange(8)
            peer.send_bytes(wire.frame(bytes(message)))
            peer.socket.shutdown(socket.SHUT_WR)
            peer.ends()
            peer.close()

    def test_truncated_frames(self):
        whole = wire.frame(wire.envelope(wire.STAT, {}, 2))
        for length in range(1, len(whole)):
            peer = self.peer()
            peer.send_bytes(whole[:length])
            peer.close()
        peer = self.peer(greet=False)
        peer.send_bytes(struct.pack("<I", 1000) + b"x" * 10)
        peer.close()

    def test_a_frame_in_single_bytes(self):
        peer = self.peer()
        for byte in wire.frame(wire.envelope(wire.STAT, {}, 2)):
            peer.send_bytes(bytes([byte]))
        self.assertEqual(peer.receive().body, wire.STAT_REPLY)

    def test_huge_and_empty_lengths(self):
        for length in (0, wire.FRAME_BYTES_MAX + 1, 1 << 31, 0xFFFFFFFF):
            peer = self.peer()
            peer.send_bytes(struct.pack("<I", length) + b"x" * 64)
            self.assert_ends(peer, wire.PROTOCOL)
        peer = self.peer()
        peer.send_bytes(struct.pack("<I", wire.FRAME_BYTES_MAX) + b"\x0a" * wire.FRAME_BYTES_MAX)
        self.assert_ends(peer, wire.PROTOCOL)

    def test_unknown_messages(self):
        peer = self.peer()
        peer.send(999)  # nobody waits: nothing happens
        reply = peer.request(998, {1: "x"})
        self.assertEqual((reply.body, reply.number(1)), (wire.FAILURE, wire.UNSUPPORTED))
        self.assertEqual(peer.request(wire.STAT).body, wire.STAT_REPLY)

    def test_nothing_comes_before_hello(self):
        for body in (wire.STAT, wire.LIST, wire.CLEAR, wire.ADMIN, wire.OPEN_POOL, 998):
            fields = {wire.CLEAR: {1: 1}, wire.ADMIN: {1: 1},
                      wire.OPEN_POOL: {1: {1: "a", 2: "b"}, 2: 65536}}.get(body)
            peer = self.peer(greet=False)
            peer.send(body, fields, 1)
            self.assert_ends(peer, wire.PROTOCOL, "hello")

    def test_replies_and_pushes_from_a_client(self):
        for body in [*range(30, 38), *range(40, 45)]:
            peer = self.peer()
            peer.send(body, {}, 1 if body < 40 else 0)
            self.assert_ends(peer, wire.PROTOCOL)

    def test_requests_without_id_and_posts_with_one(self):
        for body, ident in ((wire.STAT, 0), (wire.LIST, 0), (wire.MAPPED, 5)):
            peer = self.peer()
            peer.send(body, {1: 0, 2: 0, 3: 1} if body == wire.MAPPED else {}, ident)
            self.assert_ends(peer, wire.PROTOCOL)

    def test_hellos_that_make_no_sense(self):
        cases = [
            {"role": 9}, {"role": wire.ENGINE, "session": b"short", "ranks": 1},
            {"role": wire.WORKER, "session": SESSION, "rank": 4, "ranks": 4},
            {"role": wire.WORKER, "session": SESSION, "rank": 0, "ranks": 17},
            {"role": wire.WORKER, "session": SESSION, "rank": 0, "ranks": 0},
            {"role": wire.ENGINE, "session": SESSION, "rank": 0, "ranks": 2},
            {"role": wire.TOOL, "session": SESSION}, {"values": {8: "n" * 200}},
        ]
        for case in cases:
            with self.subTest(case=case):
                peer = self.peer(greet=False)
                peer.hello(**case).close()
                self.assert_ends_after_failure(peer)
        peer = self.peer()
        peer.send(wire.HELLO, {1: 1, 3: 1}, 7)
        self.assert_ends(peer, wire.PROTOCOL, "second hello")

    def assert_ends_after_failure(self, peer):
        try:
            while True:
                peer.receive().close()
        except wire.Gone:
            pass

    def test_versions(self):
        for values, status in (({1: 2}, wire.VERSION), ({1: 0}, wire.VERSION),
                               ({2: 4}, wire.VERSION), ({2: 0xFFFFFFFF}, wire.VERSION)):
            with self.subTest(values=values):
                peer = self.peer(greet=False)
                peer.send(wire.HELLO, {1: 1, 2: 2, 3: 2, 4: 0, **values}, 1)
                self.assert_ends(peer, status, "update the older")
        peer = self.peer(greet=False)
        peer.send(wire.HELLO, {1: 1, 2: 2, 3: 99, 4: wire.ENGINE, 5: SESSION, 7: 1}, 1)
        self.assert_ends(peer, wire.VERSION, "layout 99")
        for values in ({2: 1}, {2: 3}, {3: 99}):  # a minor one away; a tool maps nothing
            reply = self.peer(greet=False).hello(values=values)
            self.assertEqual(reply.body, wire.HELLO_REPLY)

    def test_who_may_send_what(self):
        posts = {
            wire.COMMIT: {1: 0, 2: {1: 1, 2: 1, 3: wire.Fixed64(7), 4: bytes(32), 6: 4096}},
            wire.RETURN: {1: 0, 2: {1: 1, 2: 1, 3: wire.Fixed64(7)}},
            wire.PREFETCH: {1: 0, 2: bytes(32)},
            wire.SUSPECT: {1: 0, 2: bytes(32)},
            wire.MAPPED: {1: 0, 2: 0, 3: 1},
            wire.UNMAPPED: {1: 0, 2: 0, 3: 1},
        }
        for body, fields in posts.items():
            peer = self.peer()
            peer.send(body, fields)
            self.assert_ends(peer, wire.PROTOCOL)
        for body in (wire.COMMIT, wire.RETURN, wire.PREFETCH):
            peer = self.peer(role=wire.WORKER, session=os.urandom(16), ranks=1)
            peer.send(body, posts[body])
            self.assert_ends(peer, wire.PROTOCOL, "scheduler")
        for body in (wire.MAPPED, wire.UNMAPPED):
            peer = self.peer(role=wire.SCHEDULER, session=os.urandom(16), ranks=1)
            peer.send(body, posts[body])
            self.assert_ends(peer, wire.PROTOCOL, "rank")
        peer = self.peer()
        peer.send(wire.OPEN_POOL, {1: {1: "a", 2: "b"}, 2: 65536}, 3)
        self.assert_ends(peer, wire.PROTOCOL, "tool")

    def test_commits_of_what_was_not_granted(self):
        for slot, ticket, reservation, block in ((0, 0, 1, 4096), (0, 4095, 1 << 63, 4096),
                                                 (70000, 0, 1, 4096), (0, 0, 1, 1 << 28)):
            engine = wire.Engine(self.daemon.socket, os.urandom(16))
            engine.commit(slot, ticket, reservation, bytes(32), block)
            self.assert_ends(engine, wire.INVALID, "granted")
            engine.close()
        for body, fields in ((wire.RETURN, {1: 0, 2: {1: 0, 3: wire.Fixed64(9)}}),
                             (wire.PREFETCH, {1: 7, 2: bytes(32)}),
                             (wire.SUSPECT, {1: 7, 2: bytes(32)})):
            engine = wire.Engine(self.daemon.socket, os.urandom(16))
            engine.send(body, fields)
            self.assert_ends(engine, wire.INVALID)
            engine.close()

    def test_answers_about_segments_that_are_not_there(self):
        engine = wire.Engine(self.daemon.socket, os.urandom(16))
        for body in (wire.MAPPED, wire.UNMAPPED):
            for fields in ({1: 7, 2: 511, 3: 5}, {1: 0, 2: 0, 3: 0xFFFFFFFF}):
                engine.send(body, fields)
        self.assertEqual(engine.request(wire.STAT).body, wire.STAT_REPLY)
        engine.close()

    def test_pools_that_cannot_be(self):
        for fields in ({2: 65536}, {1: {1: "", 2: "x"}, 2: 65536}, {1: {1: "a", 2: "b"}, 2: 1},
                       {1: {1: "a", 2: "b"}, 2: 4097}, {1: {1: "a", 2: "b"}, 2: 1 << 40},
                       {1: [{1: "a", 2: "b"}] * 300, 2: 65536},
                       {1: {1: "a", 2: "b" * 300000}, 2: 65536}):
            peer = self.peer(role=wire.ENGINE, session=os.urandom(16), ranks=1)
            peer.send(wire.OPEN_POOL, fields, 3)
            self.assert_ends(peer, wire.PROTOCOL)
        # Two that do not fit each other, and one that does not fit the arena.
        engine = wire.Engine(self.daemon.socket, os.urandom(16))
        other = self.peer(role=wire.ENGINE, session=os.urandom(16), ranks=1)
        other.send(wire.OPEN_POOL, {1: {1: "model", 2: "test"}, 2: 131072}, 3)
        self.assert_ends(other, wire.INVALID)
        large = self.peer(role=wire.ENGINE, session=os.urandom(16), ranks=1)
        reply = large.request(wire.OPEN_POOL, {1: {1: "large", 2: "x"}, 2: 64 << 20})
        self.assertEqual((reply.body, reply.number(1)), (wire.FAILURE, 3), reply.text(2))
        engine.close()

    def test_tensors_that_differ_under_one_identity(self):
        pool = {1: {1: "model", 2: "shape"}, 2: 65536}
        for shape, body in ((b"a" * 32, wire.POOL_REPLY), (b"a" * 32, wire.POOL_REPLY),
                            (b"b" * 32, wire.FAILURE)):
            peer = self.peer(role=wire.WORKER, session=os.urandom(16), ranks=1)
            reply = peer.request(wire.OPEN_POOL, {**pool, 5: shape})
            self.assertEqual(reply.body, body, reply.text(2) if body == wire.FAILURE else "")
            reply.close()

    def test_file_descriptors_are_not_taken(self):
        peer = self.peer()
        pipe = os.pipe()
        fds = array.array("i", [pipe[0]] * 4)
        peer.socket.sendmsg([wire.frame(wire.envelope(wire.STAT, {}, 2))],
                            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        self.assert_ends(peer, wire.PROTOCOL)
        os.close(pipe[0])
        os.close(pipe[1])

    def test_questions_that_have_no_answer(self):
        peer = self.peer()
        reply = peer.request(wire.CLEAR, {2: bytes(32)})
        self.assertEqual((reply.body, reply.number(1)), (wire.FAILURE, wire.NOT_FOUND))
        reply = peer.request(wire.INSPECT, {1: bytes(32)})
        self.assertEqual((reply.body, reply.fields), (wire.INSPECT_REPLY, {}))
        reply = peer.request(wire.LIST, {1: 0xFFFFFFFF})
        self.assertEqual((reply.body, reply.fields), (wire.LIST_REPLY, {}))
        reply = peer.request(wire.CLEAR, {1: 1})
        self.assertEqual((reply.body, reply.fields), (wire.CLEAR_REPLY, {}))
        reply = peer.request(wire.ADMIN, {1: 2})
        self.assertEqual((reply.body, reply.number(1)), (wire.FAILURE, wire.UNSUPPORTED))


class Crowds(harness.Case):
    def test_ten_thousand_connections(self):
        room = harness.raise_files(20000) - 100
        daemon = self.start("--set", "daemon.log_level=error")
        files = daemon.files_at_rest()
        peers, refused = [], 0
        for _ in range(10000):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.connect(daemon.socket)
            peers.append(peer)
            if len(peers) >= room:
                peers.pop(0).close()
        # While all of them are open, others still get in: strangers make place.
        wire.until(lambda: self.gets_in(daemon), "a peer is let in")
        for peer in peers:
            peer.setblocking(False)
            try:
                refused += b"connections" in peer.recv(4096)
            except BlockingIOError:
                pass
        for peer in peers:
            peer.close()
        self.assertGreater(refused, 5000)
        self.assert_serves(daemon)
        wire.until(lambda: daemon.open_files() <= files, "fds are given back")
        self.assertGreater(daemon.metric("connections_rejected_total"), 5000)
        self.assertEqual(daemon.stop(), 0)

    def gets_in(self, daemon):
        try:
            with wire.Peer(daemon.socket) as peer:
                return peer.hello().body == wire.HELLO_REPLY
        except (wire.Gone, BlockingIOError):  # turned away, or not even waiting in line
            return False

    def test_out_of_file_descriptors(self):
        def few_files():
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

        daemon = self.start(preexec_fn=few_files)
        self.assertIn("degraded", daemon.get("/healthz")[1])
        peers = []
        for _ in range(300):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.connect(daemon.socket)
            peers.append(peer)
        # The one that is let in and out in vain tells that the daemon has run out.
        wire.until(lambda: "cannot accept" in daemon.text(), "it runs out")
        for peer in peers:
            peer.close()
        self.assert_serves(daemon)
        self.assertGreater(daemon.metric("accept_errors_total"), 0)
        self.assertEqual(daemon.stop(), 0)

    def test_a_peer_that_does_not_read(self):
        daemon = self.start("--set", "daemon.send_timeout_ms=500")
        question = wire.frame(wire.envelope(wire.STAT, {}, 1)) * 500
        with wire.Peer(daemon.socket) as peer:
            peer.hello()
            peer.socket.setblocking(False)
            end = select.poll()
            end.register(peer.socket, select.POLLHUP)
            sent = 0
            while not end.poll(0):
                try:
                    sent += peer.socket.send(question)
                except BlockingIOError:
                    self.assert_serves(daemon)  # the others do not wait
                except BrokenPipeError:
                    break
        self.assertGreater(sent, 0)
        self.assertIn("does not read", daemon.text())
        self.assertEqual(daemon.metric("peers_dropped_total"), 1)
        self.assertLess(daemon.metric("process_private_bytes"), 200 << 20)
        self.assertEqual(daemon.stop(), 0)

    def test_a_peer_that_never_says_hello(self):
        daemon = self.start("--set", "daemon.hello_timeout_ms=100")
        with wire.Peer(daemon.socket) as peer:
            self.assert_ends(peer, wire.TIMED_OUT, "hello")
        with wire.Peer(daemon.socket) as peer:
            peer.send_bytes(b"\x10\x00")  # and one that begins to
            self.assert_ends(peer, wire.TIMED_OUT, "hello")
        self.assert_serves(daemon)

    def test_a_flood_of_suspects_drops_no_good_block(self):
        daemon = self.start()
        keys = [os.urandom(32) for _ in range(64)]
        with wire.Engine(daemon.socket, os.urandom(16)) as engine:
            for key in keys:
                engine.put(key, os.urandom(engine.SLOT_BYTES))
            with wire.Peer(daemon.socket) as other:
                other.hello()
                wire.until(lambda: other.stat()[0]["checksums_total"] == 64, "all have checksums")
            for _ in range(2000):
                engine.send(wire.SUSPECT, {1: engine.pool, 2: keys})
            metrics, _ = engine.stat()
            self.assertEqual(metrics["suspects_total"], 2000 * 64)
            self.assertEqual(metrics["suspects_confirmed_total"], 0)
            self.assertEqual(metrics["slots_ready"], 64)
            self.assertEqual(metrics["checksum_mismatch_total"], 0)
            self.assertLess(metrics["loop_lag_microseconds_max"], 1e6)
        self.assert_serves(daemon)

    def test_a_flood_of_complaints_does_not_fill_the_log(self):
        daemon = self.start()
        for _ in range(500):
            with wire.Peer(daemon.socket) as peer:
                peer.send(wire.STAT, {}, 1)
                peer.ends()
        self.assertLessEqual(daemon.text().count("peer refused"), 41)
        self.assert_serves(daemon)

    def test_half_sent_requests_do_not_keep_a_probe_out(self):
        harness.raise_files(4096)
        daemon = self.start()
        peers = []
        for _ in range(2000):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.connect(daemon.http)
            peer.sendall(b"GET /healthz HTTP/1.1\r\n")
            peers.append(peer)
            if len(peers) % 400 == 0:
                self.assertEqual(daemon.get("/healthz"), (200, "ok\n"))
        self.assertGreater(daemon.metric("http_rejected_total"), 1900)
        for peer in peers:
            peer.close()
        self.assertEqual(daemon.stop(), 0)


class Processes(harness.Case):
    """Sessions end when their processes do, not when their sockets close."""

    CHILD = """
import os, sys
sys.path.insert(0, {here!r})
import wire
engine = wire.Engine({path!r}, bytes.fromhex({session!r}))
engine.map_segment()
engine.granted()
print("ready", flush=True)
sys.stdin.readline()
engine.socket.close()
print("closed", flush=True)
sys.stdin.readline()
"""

    def child(self, daemon, session, **popen):
        code = self.CHILD.format(here=os.path.dirname(os.path.abspath(__file__)),
                                 path=daemon.socket, session=session.hex())
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, text=True, **popen)
        self.addCleanup(lambda: (child.kill(), child.wait(), child.stdin.close(),
                                 child.stdout.close()))
        self.assertEqual(child.stdout.readline(), "ready\n")
        return child

    def test_killed(self):
        for flags in ({}, {"env": {"KVIST_FAULT": "peer.pidfd:1"}}):
            with self.subTest(flags=flags):
                daemon = self.start(**flags)
                child = self.child(daemon, os.urandom(16))
                self.assertEqual(daemon.metric("sessions"), 1)
                self.assertGreater(daemon.metric("slots_granted"), 0)
                child.kill()
                wire.until(lambda: daemon.metric("sessions") == 0, "the session ends")
                self.assertEqual(daemon.metric("slots_granted"), 0)
                self.assertEqual(daemon.metric("processes"), 0)
                self.assertEqual(daemon.stop(), 0)
                daemon.dispose()

    def test_stopped_or_disconnected_is_not_ended(self):
        daemon = self.start()
        child = self.child(daemon, os.urandom(16))
        child.stdin.write("\n")
        child.stdin.flush()
        self.assertEqual(child.stdout.readline(), "closed\n")
        wire.until(lambda: daemon.metric("connections") == 0, "the socket is closed")
        child.send_signal(signal.SIGSTOP)
        self.assertEqual(daemon.metric("sessions"), 1)
        self.assertGreater(daemon.metric("slots_granted"), 0)
        child.kill()
        wire.until(lambda: daemon.metric("sessions") == 0, "the session ends")

    def test_a_process_that_cannot_be_watched(self):
        daemon = self.start(env={"KVIST_FAULT": "peer.pidfd:1+"})
        with wire.Peer(daemon.socket) as peer:
            reply = peer.hello(wire.ENGINE, SESSION, 0, 1)
            self.assertEqual((reply.body, reply.number(1)), (wire.FAILURE, wire.DENIED))
            self.assertIn("PID namespace", reply.text(2))
        self.assert_serves(daemon)

    def test_connecting_again(self):
        daemon = self.start()
        first = wire.Engine(daemon.socket, SESSION)
        first.map_segment()
        first.granted()
        second = wire.Engine(daemon.socket, SESSION)  # the same process
        self.assertIsNone(first.ends())
        second.map_segment()
        self.assertEqual(daemon.metric("sessions"), 1)
        self.assertEqual(daemon.metric("processes"), 1)
        slots = second.granted()
        second.free = slots
        second.put(b"k" * 32, b"content" * 100)
        wire.until(lambda: daemon.metric("slots_ready") == 1, "the block is published")
        first.close()
        second.close()

    def test_a_place_that_is_taken(self):
        daemon = self.start()
        child = self.child(daemon, SESSION)
        with wire.Peer(daemon.socket) as peer:
            reply = peer.hello(wire.ENGINE, SESSION, 0, 1)
            self.assertEqual((reply.body, reply.number(1)), (wire.FAILURE, wire.EXISTS))
            child.kill()
            child.wait()
            self.assertEqual(peer.hello(wire.ENGINE, SESSION, 0, 1).body, wire.HELLO_REPLY)

    def test_ranks_that_disagree(self):
        daemon = self.start()
        with wire.Peer(daemon.socket) as one, wire.Peer(daemon.socket) as other:
            one.hello(wire.WORKER, SESSION, 0, 2).close()
            other.send(wire.HELLO, {1: 1, 2: 2, 3: 2, 4: wire.WORKER, 5: SESSION, 6: 1, 7: 3}, 1)
            self.assert_ends(other, wire.INVALID, "ranks")
        self.assert_serves(daemon)

    def test_what_was_posted_before_the_end_counts(self):
        daemon = self.start()
        child = os.fork()
        if child == 0:
            engine = wire.Engine(daemon.socket, SESSION)
            for index in range(20):
                engine.put(bytes([index]) * 32, b"x" * 4096)
                engine.send(wire.STAT, {}, 1000 + index)  # whose answer nobody awaits
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        wire.until(lambda: daemon.metric("sessions") == 0, "the session ends")
        self.assertEqual(daemon.metric("commits_total"), 20)

    @unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
    def test_other_users(self):
        daemon = self.start("--set", "daemon.socket_mode=0666",
                            "--set", "tenants.other=uid:65534")
        os.chmod(self.directory, 0o755)
        engine = wire.Engine(daemon.socket, SESSION)
        engine.put(b"k" * 32, b"x" * 5000)
        wire.until(lambda: daemon.metric("slots_ready") == 1, "the block is published")
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                with wire.Peer(daemon.socket) as peer:
                    refused = peer.hello(wire.ENGINE, SESSION, 0, 1).number(1) == wire.DENIED
                with wire.Peer(daemon.socket) as peer:
                    peer.hello()
                    admin = peer.request(wire.ADMIN, {1: 1}).number(1) == wire.DENIED
                    blind = (peer.request(wire.LIST).fields == {} and
                             peer.request(wire.INSPECT, {1: b"k" * 32}).fields == {} and
                             peer.request(wire.CLEAR, {2: engine.pool_id}).number(1) ==
                             wire.NOT_FOUND)
                other = wire.Engine(daemon.socket, bytes(16))
                apart = other.pool_id != engine.pool_id
                os.write(write_end, bytes([refused, admin, blind, apart]))
            finally:
                os._exit(0)
        os.close(write_end)
        answers = os.read(read_end, 10)
        os.waitpid(child, 0)
        os.close(read_end)
        self.assertEqual(answers, bytes([1, 1, 1, 1]))
        engine.close()


if __name__ == "__main__":
    harness.main()
