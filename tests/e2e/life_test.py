#!/usr/bin/env python3
"""kvistd's life: stop, save, reload, watchdog; its pages."""
import os
import resource
import signal
import socket
import time

import harness
import wire


class Stop(harness.Case):
    def test_orderly(self):
        daemon = self.start()
        engine = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(engine.close)
        daemon.process.send_signal(signal.SIGTERM)
        self.assertIn("STATUS=", daemon.notified("STOPPING=1"))
        self.assertEqual(daemon.ended(), 0, daemon.text())
        engine.ends()
        self.assertFalse(os.path.exists(daemon.socket))
        self.assertIn("stopped", daemon.text())

    def test_interrupted(self):
        daemon = self.start()
        daemon.process.send_signal(signal.SIGINT)
        self.assertEqual(daemon.ended(), 0)

    @harness.needs_nvme
    def test_the_hot_set_comes_back(self):
        nvme = ("--nvme", os.path.join(self.directory, "nvme"), "--nvme-bytes", "256M")
        daemon = self.start(*nvme)
        engine = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(engine.close)
        contents = {os.urandom(32): os.urandom(65536) for _ in range(50)}
        for key, content in contents.items():
            engine.put(key, content)
        wire.until(lambda: daemon.metric("commits_total") == 50, "all are published")
        first = engine.instance
        self.assertEqual(daemon.stop(), 0)
        self.assertIn("hot set saved status=OK blocks=50", daemon.text())
        daemon.dispose()

        daemon = self.start(*nvme)
        wire.until(lambda: daemon.metric("nvme_loading") == 0, "the index is read back")
        self.assertEqual(daemon.metric("nvme_blocks"), 50)
        again = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(again.close)
        self.assertNotEqual(again.instance, first)
        for key in contents:
            place = wire.unpack(again.request(wire.INSPECT, {1: key}).fields[1][0])
            self.assertEqual(place[2][0], b"nvme")
        again.granted()  # what is promoted goes where all ranks have mapped
        again.send(wire.PREFETCH, {1: again.pool, 2: list(contents)})
        done = 0
        while done < 50:
            done += again.served(wire.PROMOTED).number(2)
        # As many as there were slots for: the engine's own grants are its own.
        promoted = daemon.metric("promotes_total")
        self.assertGreaterEqual(promoted, 8)
        self.assertEqual(promoted + daemon.metric("promote_refused_total"), 50)
        places = [wire.unpack(again.request(wire.INSPECT, {1: key}).fields[1][0])[2][0]
                  for key in contents]
        self.assertEqual(places.count(b"dram+nvme"), promoted)

    @harness.needs_nvme
    def test_save_and_clear(self):
        nvme = ("--nvme", os.path.join(self.directory, "nvme"), "--nvme-bytes", "256M")
        daemon = self.start(*nvme)
        engine = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(engine.close)
        for index in range(10):
            engine.put(bytes([index]) * 32, os.urandom(4096))
        wire.until(lambda: daemon.metric("commits_total") == 10, "all are published")
        with wire.Peer(daemon.socket) as tool:
            tool.hello()
            saved = tool.request(wire.ADMIN, {1: 2})
            self.assertEqual((saved.body, saved.number(1)), (wire.ADMIN_REPLY, 10))
            cleared = tool.request(wire.CLEAR, {1: 1})
            self.assertEqual(cleared.body, wire.CLEAR_REPLY)
            self.assertEqual(cleared.number(1), 10)
            self.assertEqual(tool.request(wire.INSPECT, {1: bytes(32)}).fields, {})
        daemon.kill()
        daemon.dispose()
        daemon = self.start(*nvme)
        wire.until(lambda: daemon.metric("nvme_loading") == 0, "the index is read back")
        self.assertEqual(daemon.metric("nvme_blocks"), 0)

    @harness.needs_nvme
    def test_what_is_cleared_while_the_tier_is_off_stays_cleared(self):
        nvme = ("--nvme", os.path.join(self.directory, "nvme"), "--nvme-bytes", "256M")
        state = os.path.join(self.directory, "state")
        os.mkdir(state)
        env = {"STATE_DIRECTORY": state}
        daemon = self.start(*nvme, env=env)
        engine = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(engine.close)
        for index in range(10):
            engine.put(bytes([index]) * 32, os.urandom(4096))
        wire.until(lambda: daemon.metric("commits_total") == 10, "all are published")
        self.assertEqual(daemon.stop(), 0)
        daemon.dispose()
        daemon = self.start(env=env)
        self.assertEqual(daemon.tool("clear", "--all", "--yes")[0], 0)
        self.assertEqual(os.listdir(state), ["cleared"])
        self.assertEqual(daemon.stop(), 0)
        daemon.dispose()
        for _ in range(2):
            daemon = self.start(*nvme, env=env)
            wire.until(lambda: daemon.metric("nvme_loading") == 0, "the index is read back")
            with wire.Peer(daemon.socket) as tool:
                tool.hello()
                self.assertEqual(tool.request(wire.INSPECT, {1: bytes(32)}).fields, {})
            wire.until(lambda: not os.listdir(state), "it is known")
            self.assertEqual(daemon.metric("nvme_blocks"), 0)
            daemon.kill()
            daemon.dispose()

    def test_a_save_without_a_tier_says_what_to_set(self):
        daemon = self.start()
        for flags in ((), ("--json",)):
            status, out, error = daemon.tool("save", *flags)
            self.assertEqual((status, out), (1, ""))
            self.assertIn("no NVMe tier", error)
            self.assertIn("nvme.path", error)

    @harness.needs_nvme
    def test_a_requester_that_does_not_wait(self):
        nvme = ("--nvme", os.path.join(self.directory, "nvme"), "--nvme-bytes", "256M")
        daemon = self.start(*nvme)
        engine = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(engine.close)
        for index in range(10):
            engine.put(bytes([index]) * 32, os.urandom(65536))
        for _ in range(20):
            tool = wire.Peer(daemon.socket)
            tool.hello()
            for ident in range(2, 40):
                tool.send(wire.ADMIN, {1: 2}, ident)
                tool.send(wire.CLEAR, {2: engine.pool_id}, 100 + ident)
            tool.close()
        self.assert_serves(daemon)
        self.assertEqual(daemon.stop(), 0)

    @harness.needs_nvme
    def test_without_a_save(self):
        daemon = self.start("--nvme", os.path.join(self.directory, "nvme"), "--nvme-bytes",
                            "256M", "--set", "daemon.stop_save_s=0")
        engine = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(engine.close)
        engine.put(bytes(32), os.urandom(4096))
        wire.until(lambda: daemon.metric("commits_total") == 1, "it is published")
        self.assertEqual(daemon.stop(), 0)
        self.assertNotIn("saved", daemon.text())


class Reload(harness.Case):
    def test_live_settings(self):
        daemon = self.start()
        text = f"[daemon]\nsocket = {daemon.socket}\n"
        daemon.config(text + "log_level = debug\nhello_timeout_ms = 50\n")
        daemon.process.send_signal(signal.SIGHUP)
        self.assertIn("MONOTONIC_USEC=", daemon.notified("RELOADING=1"))
        daemon.notified("READY=1")
        with wire.Peer(daemon.socket) as peer:
            self.assert_ends(peer, wire.TIMED_OUT)
        daemon.config(text + "log_level = error\n")
        with wire.Peer(daemon.socket) as peer:
            peer.hello()
            self.assertEqual(peer.request(wire.ADMIN, {1: 1}).body, wire.ADMIN_REPLY)
        self.assertEqual(daemon.metric("reloads_total"), 2)
        self.assert_serves(daemon)

    def test_settings_that_need_a_restart(self):
        daemon = self.start()
        daemon.config(f"[daemon]\nsocket = {daemon.socket}\n"
                      "[memory]\nchecksum_threads = 2\n[limits]\nhold_ms = 3000\n")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.notified("READY=1")
        self.assertIn("needs a restart name=memory.checksum_threads", daemon.text())
        self.assertIn("needs a restart name=limits.hold_ms", daemon.text())

    def test_a_bad_file(self):
        daemon = self.start()
        for text in ("[daemon]\nlog_level = loud\n", "[nonsense]\n",
                     f"[daemon]\nsocket = {daemon.socket}\nmetrics_listen = x\n"):
            daemon.config(text)
            with wire.Peer(daemon.socket) as peer:
                peer.hello()
                reply = peer.request(wire.ADMIN, {1: 1})
                if "metrics" in text:
                    continue  # a flag goes over it
                self.assertEqual(reply.body, wire.FAILURE)
                self.assertIn("kvistd.conf:", reply.text(2))
                self.assertEqual(peer.request(wire.STAT).body, wire.STAT_REPLY)
        os.unlink(os.path.join(self.directory, "kvistd.conf"))
        daemon.process.send_signal(signal.SIGHUP)
        daemon.notified("READY=1")
        self.assertEqual(daemon.metric("reload_failures_total"), 3)
        self.assert_serves(daemon)
        self.assertEqual(daemon.stop(), 0)


class Manager(harness.Case):
    def test_watchdog(self):
        daemon = self.start(env={"WATCHDOG_USEC": "300000", "WATCHDOG_PID": ""},
                            wrap=["env", "-u", "WATCHDOG_PID"])
        for _ in range(3):
            self.assertIsNotNone(daemon.notified("WATCHDOG=1", 10))

    def test_no_manager(self):
        daemon = self.launch(wrap=["env", "-u", "NOTIFY_SOCKET"])
        wire.until(lambda: "serving" in daemon.text(), "it serves")
        self.assert_serves(daemon)
        self.assertEqual(daemon.stop(), 0)

    def test_a_log_that_nobody_reads(self):
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        try:
            while True:
                os.write(write_end, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(write_end, True)
        daemon = self.start(wrap=["sh", "-c", f'exec "$@" 2>&{write_end}', "sh"],
                            pass_fds=[write_end])
        self.assert_serves(daemon)
        self.assertGreater(daemon.metric("log_lines_dropped_total"), 0)
        self.assertEqual(daemon.stop(), 0)
        os.close(read_end)
        os.close(write_end)


class Trouble(harness.Case):
    """What operators have to hear of."""

    def test_a_limit_of_file_sizes(self):
        def limit(file_bytes):
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        self.refuses(preexec_fn=lambda: limit(64 << 10), words=["limit of file sizes", "LimitFSIZE"],
                     status=1)
        daemon = self.start(preexec_fn=lambda: limit(1000 << 10))  # less than a segment
        self.assertIn("warn: files may have no more than 1000K", daemon.text())
        with wire.Engine(daemon.socket, os.urandom(16)):
            wire.until(lambda: daemon.metric("populate_failures_total") > 0, "no segment")
        self.assert_serves(daemon)
        self.assertEqual(daemon.stop(), 0)

    def assert_one_line(self, daemon, where, pool_id, keys):
        """How many blocks, and of which pool, but no key; no line each."""
        self.until_told(daemon)
        time.sleep(1.5)
        lines = [line for line in daemon.text().splitlines() if "blocks were corrupt" in line]
        self.assertEqual(len(lines), 1, lines)
        self.assertRegex(lines[0], f"warn: .* where={where} blocks=[1-5] "
                         f"last_pool={pool_id.hex()} action=dropped$")
        for key in keys:
            self.assertNotIn(key.hex()[:16], daemon.text())

    def until_told(self, daemon):
        wire.until(lambda: "blocks were corrupt" in daemon.text(), "the log says so")

    def test_blocks_that_rot_in_memory(self):
        daemon = self.start("--log-level", "warn")
        keys = [os.urandom(32) for _ in range(5)]
        with wire.Engine(daemon.socket, os.urandom(16)) as engine:
            for key in keys:
                engine.put(key, os.urandom(engine.SLOT_BYTES))
            wire.until(lambda: daemon.metric("checksums_total") == 5, "all have checksums")
            for segment in engine.maps.values():
                for start in range(0, len(segment), engine.SLOT_BYTES):
                    segment[start] ^= 1
            engine.send(wire.SUSPECT, {1: engine.pool, 2: keys[:4]})
            self.until_told(daemon)
            engine.send(wire.SUSPECT, {1: engine.pool, 2: keys[4:]})
            wire.until(lambda: daemon.metric("suspects_confirmed_total") == 5, "all are found")
            self.assert_one_line(daemon, "memory", engine.pool_id, keys)
        self.assertEqual(daemon.stop(), 0)

    @harness.needs_nvme
    def test_blocks_that_rot_on_disk(self):
        path = os.path.join(self.directory, "nvme")
        flags = ("--log-level", "warn", "--nvme", path, "--nvme-bytes", "256M")
        daemon = self.start(*flags)
        keys = [os.urandom(32) for _ in range(5)]
        with wire.Engine(daemon.socket, os.urandom(16)) as engine:
            for key in keys:
                engine.put(key, b"block" * 10000)
            wire.until(lambda: daemon.metric("slots_ready") == 5, "all are published")
        self.assertEqual(daemon.stop(), 0)
        daemon.dispose()
        self.rot(path, b"block" * 10)
        daemon = self.start(*flags)
        wire.until(lambda: daemon.metric("nvme_loading") == 0, "the index is read back")
        with wire.Engine(daemon.socket, os.urandom(16)) as engine:
            engine.granted()  # what is promoted goes where all ranks have mapped
            engine.send(wire.PREFETCH, {1: engine.pool, 2: keys})
            told = 0
            while told < 5:
                told += engine.served(wire.PROMOTED).number(2)
            self.assertEqual(daemon.metric("nvme_corrupt_total"), 5)
            self.assert_one_line(daemon, "nvme", engine.pool_id, keys)
        self.assertEqual(daemon.stop(), 0)

    def rot(self, directory, content):
        """Change all that begins like a block, in every file."""
        for folder, _, names in os.walk(directory):
            for name in names:
                with open(os.path.join(folder, name), "r+b") as file:
                    data = file.read()
                    if content in data:
                        file.seek(0)
                        file.write(data.replace(content, b"X" + content[1:]))


class Pages(harness.Case):
    def test_pages(self):
        daemon = self.start()
        self.assertEqual(daemon.get("/healthz"), (200, "ok\n"))
        self.assertEqual(daemon.get("/readyz"), (200, "ready\n"))
        self.assertEqual(daemon.get("/healthz", "HEAD"), (200, ""))
        self.assertEqual(daemon.get("/metrics?x=y")[0], 200)
        self.assertEqual(daemon.get("/")[0], 404)
        self.assertEqual(daemon.get("/metrics", "POST")[0], 405)
        self.assertEqual(daemon.get("/" + "x" * 9000)[0], 431)
        self.assert_prometheus(daemon.get("/metrics")[1])

    def assert_prometheus(self, text):
        kinds = {}
        for line in text.splitlines():
            word = line.split(" ")
            if word[1] == "TYPE":
                kinds[word[2]] = word[3]
            elif word[0] != "#":
                name = word[0].partition("{")[0]
                float(word[1])
                self.assertEqual(kinds[name] == "counter", name.endswith("_total"), name)
        self.assertGreater(len(kinds), 70)
        rows = []
        for name in ("metrics.def", "tenants.def"):
            with open(os.path.join(harness.SOURCE, "daemon", name), encoding="utf-8") as file:
                rows += [line.split("(")[1].split(",")[0] for line in file
                         if line.startswith(("KVIST_METRIC(", "KVIST_TENANT_METRIC("))]
        self.assertEqual(sorted(["kvist_" + row for row in rows] + ["kvist_build_info"]),
                         sorted(kinds))

    def test_the_same_figures_by_stat(self):
        daemon = self.start()
        with wire.Peer(daemon.socket) as peer:
            peer.hello()
            metrics, health = peer.stat()
        self.assertEqual(health, "ok")
        self.assertEqual(metrics["arena_bytes"], 64 << 20)
        self.assertEqual(metrics["connections"], 1)
        self.assertGreater(metrics["process_resident_bytes"], 0)

    def test_on_tcp(self):
        daemon = self.start("--metrics", "127.0.0.1:0", http=False)
        port = int(daemon.text().partition(" port=")[2].split()[0])
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            answer = b""
            while part := peer.recv(4096):
                answer += part
        self.assertTrue(answer.endswith(b"\r\n\r\nready\n"), answer)

    def test_visitors_that_say_nothing(self):
        daemon = self.start()
        visitors = []
        for _ in range(200):
            visitor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            visitor.connect(daemon.http)
            visitors.append(visitor)
        self.assert_serves(daemon)
        with wire.Peer(daemon.socket) as peer:
            peer.hello()
            wire.until(lambda: peer.stat()[0]["http_rejected_total"] == 168, "32 are let in")
        for visitor in visitors[100:]:
            visitor.close()
        for visitor in visitors[:100]:
            visitor.settimeout(wire.DEADLINE_S)
            self.assertEqual(visitor.recv(1), b"")  # none stays longer than its time
            visitor.close()
        self.assertEqual(daemon.get("/healthz"), (200, "ok\n"))

    def test_garbage(self):
        daemon = self.start()
        for garbage in (b"\0" * 8192, b"GET", b"\r\n\r\n", b"GET \r\n\r\n", os.urandom(5000)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
                visitor.connect(daemon.http)
                visitor.sendall(garbage)
        self.assertEqual(daemon.get("/healthz"), (200, "ok\n"))


if __name__ == "__main__":
    harness.main()
