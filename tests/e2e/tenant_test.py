#!/usr/bin/env python3
"""Several users and tenants on one kvistd: none takes what is the others'."""
import json
import os
import traceback
import unittest

import harness
import wire


class User:
    """A child that is another user: does something, answers, and lives until it is closed."""

    def __init__(self, uid, act):
        answer, self.answer_end = os.pipe()
        wait, self.end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.end)
                os.setgroups([])
                os.setgid(uid)
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

    def ask(self, uid, act):
        """What another user gets as an answer."""
        user = User(uid, act)
        user.close()
        return user.answer


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
