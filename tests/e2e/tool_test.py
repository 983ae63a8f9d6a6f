"""The kvist tool: what it says when kvistd does not answer, and when something else does."""
import json
import os
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


if __name__ == "__main__":
    unittest.main()
