"""The kvist tool: what it says when kvistd does not answer, and when something else does."""
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
import unittest

import harness

TOOL = os.environ.get("KVIST", "kvist")


def kvist(path, *arguments):
    return subprocess.run([TOOL, "--socket", path, *arguments], capture_output=True, text=True,
                          timeout=60, check=False)


class Answers(harness.Case):
    def test_a_stopped_daemon(self):
        daemon = self.start()
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            for command in (["status"], ["save"], ["clear", "--all", "--yes"]):
                with self.subTest(command=command):
                    start = time.monotonic()
                    run = kvist(daemon.socket, "--timeout", "0.3", *command)
                    self.assertLess(time.monotonic() - start, 20)
                    self.assertEqual(run.returncode, 3, run.stderr)
                    self.assertIn("does not answer", run.stderr)
        finally:
            daemon.process.send_signal(signal.SIGCONT)

    def test_a_daemon_that_stops_after_hello(self):
        """What waits for a disk waits no longer than it was told."""
        daemon = self.start()
        path = os.path.join(self.directory, "between")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen()
            silent = threading.Thread(target=self.answer_hello, args=(listener, daemon.socket))
            silent.start()
            start = time.monotonic()
            run = kvist(path, "--timeout", "1", "save")
            self.assertLess(time.monotonic() - start, 30)
            silent.join()
        self.assertEqual(run.returncode, 3, run.stderr)
        self.assertIn("does not answer", run.stderr)

    @staticmethod
    def answer_hello(listener, target):
        """Pass on what comes within half a second, then nothing; end with the tool."""
        peer, _ = listener.accept()
        with peer, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
            daemon.connect(target)
            daemon.sendall(peer.recv(65536))
            peer.sendall(daemon.recv(65536))
            while peer.recv(65536):
                pass

    def test_something_else(self):
        path = os.path.join(self.directory, "other")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen()

            def answer():
                peer, _ = listener.accept()
                with peer:
                    peer.recv(65536)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            other = threading.Thread(target=answer)
            other.start()
            run = kvist(path, "status")
            other.join()
        self.assertEqual(run.returncode, 1, run.stderr)
        self.assertIn("is no kvistd", run.stderr)

    def test_a_path_that_is_too_long(self):
        run = kvist("/" + "x" * 200, "status")
        self.assertNotEqual(run.returncode, 0)
        self.assertIn("over 107 bytes", run.stderr)

    def test_status_as_json(self):
        daemon = self.start()
        run = kvist(daemon.socket, "status", "--json")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIs(json.loads(run.stdout)["nvme_present"], False)

    def test_a_bench_in_too_little_memory(self):
        """Says so, and how much it takes, before it starts anything."""
        bench = ("bench", "--daemon", harness.KVISTD, "--runs", "1", "--seconds", "0.01")
        for arena, least in (("16M", "64.0 MiB"), ("24M", "64.0 MiB"), ("63M", "64.0 MiB"),
                             ("64M", None)):
            run = subprocess.run([TOOL, *bench, "--arena", arena, "--block-bytes", "64K,2M"],
                                 capture_output=True, text=True, timeout=60, check=False)
            if least is None:
                self.assertEqual(run.returncode, 0, run.stderr)
            else:
                self.assertEqual((run.returncode, run.stdout), (2, ""), run.stderr)
                self.assertIn(f"blocks of 2.0 MiB need an arena of {least} at least", run.stderr)
        daemon = self.start(arena="32M")
        run = kvist(daemon.socket, *bench[:1], *bench[3:], "--block-bytes", "2M")
        self.assertEqual(run.returncode, 1, run.stderr)
        self.assertIn("64.0 MiB at least, and this one has 32.0 MiB", run.stderr)


class Replay(unittest.TestCase):
    def replay(self, text, *arguments):
        """With little memory. @return exit status, stdout, stderr"""
        def limit():
            if not os.environ.get("KVIST_SANITIZE"):  # which takes terabytes, untouched
                resource.setrlimit(resource.RLIMIT_DATA, (256 << 20, 256 << 20))

        done = subprocess.run([TOOL, "replay", *arguments], input=text, timeout=60, text=True,
                              capture_output=True, check=False, preexec_fn=limit)
        return done.returncode, done.stdout, done.stderr

    TRACE = '{"hash_ids": [1, 2, 3]}\n' * 5

    def test_a_file_that_never_ends(self):
        self.assertEqual(self.replay(None, "--blocks", "4", "/dev/zero"),
                         (1, "", "kvist: /dev/zero: line 1: it is no text\n"))
        self.assertEqual(self.replay("x" * (65 << 20), "--blocks", "4", "-"),
                         (1, "", "kvist: -: line 1: it is too long\n"))

    def test_a_cache_of_any_size(self):
        for flags in ((), ("--headroom",), ("--policy", "min"), ("--policy", "lru")):
            for blocks in ("536870912", "200", "3"):
                if blocks == "3" and flags:
                    continue
                status, out, error = self.replay(self.TRACE, "--blocks", blocks, *flags, "-")
                self.assertEqual((status, error), (0, ""), out)
                self.assertIn(f"{blocks} blocks: 12 hits of 15 ", out)
        for blocks in ("536870913", "0", "-1", "", "18446744073709551617"):
            status, _, error = self.replay(self.TRACE, "--blocks", blocks, "-")
            self.assertEqual(status, 2, error)
            self.assertIn("say --blocks N, 1 to 536870912", error)

    def test_numbers_that_are_none(self):
        status, _, error = self.replay('{"x":-, "hash_ids": [1]}', "--blocks", "4", "-")
        self.assertEqual(status, 1)
        self.assertIn("line 1: a value is missing or is none of JSON's", error)


if __name__ == "__main__":
    unittest.main()
