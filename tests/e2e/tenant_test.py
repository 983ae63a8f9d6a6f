#!/usr/bin/env python3
"""Several users and tenants on one kvistd: none takes what is the others'."""
import ctypes
import json
import mmap
import os
import signal
import struct
import sys
import traceback
import unittest

import harness
import wire

sys.path.insert(0, os.path.join(harness.SOURCE, "tests", "support"))
from load import LoadEngine  # noqa: E402  pylint: disable=wrong-import-position

LOAD_ENGINE = os.environ.get("LOAD_ENGINE", "load_engine")

PR_SET_KEEPCAPS = 8


class User:
    """A child that is another user: does something, answers, and lives until it is closed."""

    def __init__(self, uid, act, keep_capabilities=False):
        answer, self.answer_end = os.pipe()
        wait, self.end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.end)
                os.setgroups([])
                os.setgid(uid)
                if keep_capabilities:
                    ctypes.CDLL(None).prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
                os.setuid(uid)
                os.write(self.answer_end, json.dumps(act()).encode())
                os.close(self.answer_end)
                os.read(wait, 1)
            except BaseException:  # pylint: disable=broad-except
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(self.answer_end)
        os.close(wait)
        with os.fdopen(answer, "rb") as file:
            text = file.read()
        if not text:
            self.close()
            raise AssertionError(f"user {uid} failed")
        self.answer = json.loads(text)

    def close(self):
        if self.pid:
            os.close(self.end)
            os.waitpid(self.pid, 0)
            self.pid = 0


@unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
class Case(harness.Case):
    A, B = 65534, 65533  # the tenants a and b

    def setUp(self):
        super().setUp()
        os.chmod(self.directory, 0o755)

    def start(self, *flags, **options):
        return super().start("--set", "daemon.socket_mode=0666", "--set", f"tenants.a=uid:{self.A}",
                             "--set", f"tenants.b=uid:{self.B}", *flags, **options)

    def user(self, uid, act):
        user = User(uid, act)
        self.addCleanup(user.close)
        return user

    def ask(self, uid, act, keep_capabilities=False):
        """What another user gets as an answer."""
        user = User(uid, act, keep_capabilities)
        user.close()
        return user.answer


class Shares(Case):
    def connect_until_refused(self, daemon, count):
        """@return how many tools got in, and what the first other one was told"""
        self.kept = []
        for index in range(count):
            peer = wire.Peer(daemon.socket)
            self.kept.append(peer)
            try:
                reply = peer.hello()
            except wire.Gone:
                return index, "gone"
            if reply.body != wire.HELLO_REPLY:
                return index, reply.text(2)
        return count, ""

    def test_idle_connections_of_one_user_do_not_keep_others_out(self):
        daemon = self.start()
        got, text = self.user(self.A, lambda: self.connect_until_refused(daemon, 600)).answer
        self.assertEqual(got, 240)
        self.assertIn("tenant a has 240 of kvistd's 512 connections", text)
        self.assertIn("share what=connections tenant=a", daemon.text())
        other, _ = self.user(self.B, lambda: self.connect_until_refused(daemon, 600)).answer
        self.assertEqual(other, 120)
        for uid in (65000, 65001):  # of the default tenant, where each user counts alone
            more, text = self.user(uid, lambda: self.connect_until_refused(daemon, 600)).answer
            self.assertGreaterEqual(more, 30)
        self.assertIn("user 65001 has", text)
        self.assertGreater(daemon.metric("share_refusals_total"), 3)
        self.assertIn("degraded: connections were refused to tenant", daemon.get("/healthz")[1])
        for _ in range(32):  # kept for root, whoever came before
            self.assert_serves(daemon)
        code, out, error = daemon.tool("status")
        self.assertEqual(code, 0, error)
        self.assertIn("were refused to tenant", out)

    def test_idle_tools_lose_their_connections(self):
        daemon = self.start("--set", "daemon.idle_timeout_ms=200")
        engine = wire.Engine(daemon.socket, os.urandom(16))
        with wire.Peer(daemon.socket) as peer:
            peer.hello()
            self.assert_ends(peer, wire.TIMED_OUT, "idle_timeout_ms")
        self.assertEqual(daemon.metric("idle_timeouts_total"), 1)
        self.assertEqual(engine.request(wire.STAT).body, wire.STAT_REPLY)  # it may be silent
        engine.close()

    def sessions_until_refused(self, daemon, count):
        self.kept = []
        for index in range(count):
            peer = wire.Peer(daemon.socket)
            self.kept.append(peer)
            reply = peer.hello(wire.ENGINE, os.urandom(16), 0, 1)
            if reply.body != wire.HELLO_REPLY:
                return index, reply.text(2)
            reply.close()
        return count, ""

    def test_idle_sessions_of_one_user_do_not_keep_others_out(self):
        daemon = self.start()
        got, text = self.user(self.A, lambda: self.sessions_until_refused(daemon, 130)).answer
        self.assertEqual(got, 60)
        self.assertIn("tenant a has 60 of kvistd's 128 sessions", text)
        got, _ = self.user(self.B, lambda: self.sessions_until_refused(daemon, 130)).answer
        self.assertEqual(got, 30)
        with wire.Peer(daemon.socket) as peer:
            self.assertEqual(peer.hello(wire.ENGINE, os.urandom(16), 0, 1).body, wire.HELLO_REPLY)

    def pools_until_refused(self, daemon, count):
        self.kept = []
        for index in range(count):
            if index % 8 == 0:
                peer = wire.Peer(daemon.socket)
                self.kept.append(peer)
                peer.hello(wire.ENGINE, os.urandom(16), 0, 1).close()
            reply = peer.request(wire.OPEN_POOL, {1: {1: "model", 2: f"m{index}"}, 2: 65536})
            if reply.body != wire.POOL_REPLY:
                return index, reply.text(2)
            reply.close()
        return count, ""

    def test_empty_pools_of_one_user_do_not_keep_others_out(self):
        daemon = self.start(arena="256M")

        def store():
            with wire.Engine(daemon.socket, os.urandom(16)) as engine:
                for index in range(100):
                    engine.put(bytes([index]) * 32, b"x" * 65536)
                metrics, _ = engine.stat()
                return metrics["commits_total"] + metrics["commits_duplicate_total"]

        hoarder = self.user(self.A, lambda: self.pools_until_refused(daemon, 256))
        self.assertEqual(hoarder.answer[0], 120)
        self.assertIn("tenant a has 120 of kvistd's 256 pools", hoarder.answer[1])
        self.assertEqual(self.ask(self.B, lambda: self.pools_until_refused(daemon, 256))[0], 60)
        self.assertEqual(self.ask(self.B, store), 100)
        hoarder.close()
        # What it leaves behind is nobody's: the next ones get the places and the memory.
        wire.until(lambda: daemon.metric("sessions") == 0, "the hoarder is gone")
        self.assertEqual(self.ask(self.B, store), 200)


class Limits(Case):
    def start_with(self, limits, *flags, **options):
        """A daemon with a configuration file, whose lines of tenants can be changed."""
        self.write(limits)
        return harness.Case.start(self, "--set", "daemon.socket_mode=0666", *flags, **options)

    def write(self, limits, first="a"):
        daemon = os.path.join(self.directory, "k.sock")
        with open(os.path.join(self.directory, "kvistd.conf"), "w", encoding="utf-8") as file:
            file.write(f"[daemon]\nsocket = {daemon}\n[tenants]\n{first} = uid:{self.A} {limits}\n"
                       f"b = uid:{self.B}\n")

    def labelled(self, daemon, name, tenant):
        for line in daemon.get("/metrics")[1].splitlines():
            if line.startswith(f'kvist_{name}{{tenant="{tenant}"}} '):
                return int(line.split()[1])
        raise AssertionError(f"no metric {name} of {tenant}")

    def flood(self, daemon, count, first=0):
        with wire.Engine(daemon.socket, os.urandom(16)) as engine:
            for index in range(first, first + count):
                engine.put(index.to_bytes(32, "little"), b"x" * 65536)
            return engine.stat()[0]["commits_total"]

    def test_a_quota_of_memory_is_a_bound(self):
        daemon = self.start_with("dram:12M", arena="64M")
        self.assertEqual(self.ask(self.B, lambda: self.flood(daemon, 100)), 100)
        self.ask(self.A, lambda: self.flood(daemon, 600))
        self.assertLessEqual(self.labelled(daemon, "tenant_memory_bytes", "a"), 12 << 20)
        self.assertEqual(self.labelled(daemon, "tenant_memory_bytes_max", "a"), 12 << 20)
        self.assertGreater(self.labelled(daemon, "tenant_blocks", "a"), 40)
        self.assertEqual(self.labelled(daemon, "tenant_blocks", "b"), 100)
        self.write("dram:3M")
        self.reload(daemon)
        wire.until(lambda: self.labelled(daemon, "tenant_memory_bytes", "a") <= 3 << 20,
                   "what is over the quota goes")
        self.assertEqual(self.labelled(daemon, "tenant_blocks", "b"), 100)

    def test_a_flood_leaves_the_others_theirs(self):
        daemon = self.start_with("weight:2", arena="64M")
        self.assertEqual(self.ask(self.B, lambda: self.flood(daemon, 200)), 200)
        self.ask(self.A, lambda: self.flood(daemon, 1500))
        self.assertEqual(self.labelled(daemon, "tenant_blocks", "b"), 200)
        self.assertGreater(self.labelled(daemon, "tenant_blocks", "a"), 300)

    @harness.needs_nvme
    def test_a_quota_on_disk_is_a_bound(self):
        daemon = self.start_with("nvme:64M, dram:8M", "--nvme", f"{self.directory}/nvme",
                                 "--nvme-bytes", "256M", arena="64M")
        self.ask(self.B, lambda: self.flood(daemon, 300))
        self.ask(self.A, lambda: self.flood(daemon, 2500))
        self.assertLessEqual(self.labelled(daemon, "tenant_nvme_bytes", "a"), 64 << 20)
        self.assertGreater(self.labelled(daemon, "tenant_nvme_bytes", "a"), 16 << 20)
        blocks = [self.labelled(daemon, f"tenant_{kind}", "b") for kind in ("blocks", "nvme_blocks")]
        self.assertGreaterEqual(sum(blocks), 300)

    def test_who_may_only_read_cannot_write(self):
        daemon = self.start_with("")
        self.assertEqual(self.ask(self.A, lambda: self.flood(daemon, 4)), 4)
        self.write("read-only")
        self.reload(daemon)

        def read():
            with wire.Peer(daemon.socket) as peer:
                peer.hello(wire.ENGINE, os.urandom(16), 0, 1).close()
                refused = peer.request(wire.OPEN_POOL, {1: {1: "model", 2: "test"}, 2: 65536})
                reply = peer.request(wire.OPEN_POOL, {1: {1: "model", 2: "test"}, 2: 65536, 4: 1})
                fds = reply.fds + peer.pushed(wire.SEGMENT).fds
                for fd in fds:
                    with self.assertRaises(PermissionError):
                        mmap.mmap(fd, 4096)
                    with self.assertRaises(PermissionError):
                        os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
                    with self.assertRaises(PermissionError):
                        os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
                    mmap.mmap(fd, 4096, access=mmap.ACCESS_READ).close()
                    os.close(fd)
                return refused.number(1), refused.text(2), len(fds)

        status, text, count = self.ask(self.A, read)
        self.assertEqual((status, count), (wire.DENIED, 2))
        self.assertIn("tenant a may only read", text)
        self.assertEqual(self.ask(self.B, lambda: self.flood(daemon, 4, 100)), 8)

    def test_an_engine_whose_tenant_has_changed_is_told_and_logged(self):
        daemon = self.start_with("")
        session = os.urandom(16)

        def begin():
            self.kept = wire.Peer(daemon.socket)
            reply = self.kept.hello(wire.ENGINE, session, 0, 1)
            reply.close()
            return reply.body

        def again():
            with wire.Peer(daemon.socket) as peer:
                reply = peer.hello(wire.ENGINE, session, 0, 1)
                return reply.body, reply.number(1), reply.text(2)

        self.assertEqual(self.user(self.A, begin).answer, wire.HELLO_REPLY)
        self.write("", first="c")
        self.reload(daemon)
        body, status, text = self.ask(self.A, again)
        self.assertEqual((body, status), (wire.FAILURE, wire.DENIED))
        self.assertIn("its session began in tenant a", text)
        self.assertIn("into c since: restart the engine", text)
        self.assertIn(f"denied tenant=c uid={self.A} pid=", daemon.text())
        self.assertEqual(daemon.metric("denials_total"), 1)

    def reload(self, daemon):
        before = daemon.metric("reloads_total")
        daemon.process.send_signal(signal.SIGHUP)
        wire.until(lambda: daemon.metric("reloads_total") > before, "it is reloaded")


class Sockets(Case):
    def test_who_comes_through_a_tenants_socket_is_the_tenants(self):
        path = os.path.join(self.directory, "team.sock")
        daemon = self.start("--set", f"tenants.team=socket:{path}", "--set", "tenants.team=dram:2M")
        key = b"k" * 32

        def look(where):
            with wire.Engine(where, os.urandom(16)) as engine:
                return [engine.pool_id.hex(), engine.request(wire.ADMIN, {1: 1}).number(1)]

        with wire.Engine(path, os.urandom(16)) as mine, wire.Engine(daemon.socket,
                                                                   os.urandom(16)) as roots:
            mine.put(key, b"x" * 4096)
            self.assertNotEqual(mine.pool_id, roots.pool_id)
            # Root, and no more than the tenant's user there; uid a's tenant counts for nothing.
            self.assertEqual(mine.request(wire.ADMIN, {1: 1}).number(1), wire.DENIED)
            self.assertEqual(self.ask(self.A, lambda: look(path)),
                             [mine.pool_id.hex(), wire.DENIED])
            self.assertNotEqual(self.ask(self.A, lambda: look(daemon.socket))[0],
                                mine.pool_id.hex())
            roots.put(key, b"y" * 4096)
            with wire.Peer(path) as peer:
                peer.hello()
                self.assertEqual(peer.request(wire.CLEAR, {1: 1}).number(1), 1)
            self.assertEqual(daemon.metric("slots_ready"), 1)
        self.assertIn("cleared scope=tenant tenant=team", daemon.text())
        daemon.stop()
        self.assertFalse(os.path.exists(path))

    def test_a_session_is_told_of_another_socket_than_its_own(self):
        paths = [os.path.join(self.directory, f"{name}.sock") for name in ("one", "two")]
        daemon = self.start("--set", f"tenants.one=socket:{paths[0]}",
                            "--set", f"tenants.two=socket:{paths[1]}")
        for first, other, words in (
                (paths[0], paths[1], ("began in tenant one", "this socket is in two")),
                (paths[0], daemon.socket, ("began in tenant one", "this socket is in default")),
                (daemon.socket, paths[1], ("began in tenant default", "this socket is in two"))):
            session = os.urandom(16)
            with wire.Peer(first) as begun, wire.Peer(other) as peer:
                begun.hello(wire.ENGINE, session, 0, 1).close()
                reply = peer.hello(wire.ENGINE, session, 0, 1)
                self.assertEqual(reply.number(1), wire.DENIED)
                for word in (*words, "connect it to the socket that it began on"):
                    self.assertIn(word, reply.text(2))
                self.assertNotIn("[tenants]", reply.text(2))

    def test_a_tenants_socket_is_a_socket_like_the_other(self):
        missing = os.path.join(self.directory, "none", "team.sock")
        self.refuses("--set", f"tenants.team=socket:{missing}", words=("none", "socket"))
        path = os.path.join(self.directory, "team.sock")
        with open(path, "w", encoding="ascii"):
            pass
        self.refuses("--set", f"tenants.team=socket:{path}", words=("team.sock", "socket"))
        self.assertTrue(os.path.isfile(path))


class Privileged(Case):
    def test_peers_above_permissions_are_refused_when_told_to(self):
        daemon = self.start("--set", "daemon.privileged_peers=refuse")
        self.assertIn("privileged_peers", self.store(daemon))  # kvistd's own user
        self.assertIn("privileged_peers", self.ask(self.A, lambda: self.store(daemon), True))
        self.assert_serves(daemon)  # a tool gets no memory, and may be anybody's
        self.assertEqual(self.ask(self.A, lambda: self.store(daemon)), "stored")

    def test_sessions_that_began_under_trust_are_judged_by_a_reload(self):
        os.chmod(self.directory, 0o755)
        daemon = self.start()

        def begin():
            self.kept = wire.Engine(daemon.socket, os.urandom(16))
            self.kept.put(b"k" * 32, b"x" * 4096)
            return self.kept.request(wire.STAT).body

        other = self.user(self.A, begin)
        self.assertEqual(other.answer, wire.STAT_REPLY)
        engine = LoadEngine([LOAD_ENGINE, daemon.socket, "65536"])  # of kvistd's own user
        self.addCleanup(engine.kill)
        self.assertEqual(engine.ask("put", 0, 10), "ok")
        self.assertEqual(engine.ask("hold", 0), "ok")
        connects = engine.numbers("stats")["connects"]
        daemon.config(f"[daemon]\nsocket = {daemon.socket}\nprivileged_peers = refuse\n")
        daemon.process.send_signal(signal.SIGHUP)
        wire.until(lambda: daemon.metric("reloads_total") == 1, "it is reloaded")
        wire.until(lambda: engine.numbers("stats")["connects"] > connects, "it connects again")
        wire.until(lambda: engine.numbers("get", 0, 10)["miss"] == 10, "its pool is refused")
        self.assertEqual(engine.ask("held"), "right")  # what is leased stays mapped
        self.assertGreater(engine.numbers("stats")["mapped"], 0)
        self.assertEqual(engine.ask("release"), "ok")
        wire.until(lambda: engine.numbers("stats")["mapped"] == 0, "it has unmapped it")
        wire.until(lambda: daemon.metric("leased_slots") == 0, "nothing is leased")
        self.assertIn('denied tenant=default uid=0', daemon.text())
        self.assertIn("privileged_peers = refuse", daemon.text())
        self.assertNotIn(f"pid={other.pid} ", daemon.text())  # it was not ended, and not denied
        self.assertEqual(daemon.metric("sessions"), 2)
        self.assertEqual(engine.numbers("stats")["errors"], 0)
        self.assertEqual(engine.close(), 0)

    def test_root_without_capabilities_has_them_again_after_an_exec(self):
        os.chmod(self.directory, 0o777)
        daemon = self.start("--set", "daemon.privileged_peers=refuse", preexec_fn=self.become_a)

        def act():
            header = struct.pack("II", 0x20080522, 0)  # the third version, of this process
            assert ctypes.CDLL(None).capset(header, bytes(24)) == 0
            return self.store(daemon)

        self.assertIn("privileged_peers", self.ask(0, act))

    def become_a(self):
        os.chmod(os.path.join(self.directory, "notify"), 0o777)
        os.setgroups([])
        os.setgid(self.A)
        os.setuid(self.A)

    def test_they_are_trusted_if_not(self):
        daemon = self.start()
        self.assertEqual(self.store(daemon), "stored")
        self.assertEqual(self.ask(self.A, lambda: self.store(daemon), True), "stored")

    @staticmethod
    def store(daemon):
        """@return "stored", or why not"""
        try:
            with wire.Engine(daemon.socket, os.urandom(16)) as engine:
                engine.put(b"k" * 32, b"x" * 4096)
                return "stored"
        except AssertionError as refused:
            return str(refused)


class Operators(Case):
    def test_clear_all_is_of_the_callers_tenant_or_of_all_for_root(self):
        daemon = self.start()

        def store():
            self.kept = wire.Engine(daemon.socket, os.urandom(16))
            for index in range(4):
                self.kept.put(bytes([index]) * 32, b"x" * 4096)
            return self.kept.stat()[0]["slots_ready"]

        def clear():
            with wire.Peer(daemon.socket) as peer:
                peer.hello()
                return peer.request(wire.CLEAR, {1: 1}).number(1)

        self.user(self.A, store)
        self.user(self.B, store)
        self.assertEqual(daemon.metric("slots_ready"), 8)
        self.assertEqual(self.ask(self.A, clear), 4)
        self.assertIn("cleared scope=tenant tenant=a", daemon.text())
        code, out, error = daemon.tool("clear", "--all", "--yes")
        self.assertEqual((code, out), (0, "4 blocks dropped\n"), error)
        self.assertEqual(daemon.metric("slots_ready"), 0)
        self.assertIn("cleared scope=all", daemon.text())
        self.assertIn("of all tenants for root", daemon.tool("clear", "--help")[1])

    def test_a_name_cannot_command_a_terminal(self):
        daemon = self.start()
        for name in (b"\xc2\x9b31m\xff\xfe", b"\x1b[31m\x07", "ol\u202ea".encode()):
            with wire.Peer(daemon.socket) as peer:
                try:
                    reply = peer.hello(wire.ENGINE, os.urandom(16), 0, 1, values={8: name})
                except wire.Gone:
                    continue
                if reply.body != wire.HELLO_REPLY:
                    continue
                reply.close()
                for page in (daemon.tool("status")[1], daemon.text()):
                    self.assertTrue(page.replace("\n", "").isprintable() and page.isascii(), page)


if __name__ == "__main__":
    harness.main()
