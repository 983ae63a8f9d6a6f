"""A real kvistd in a temporary directory."""
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

import wire

KVISTD = os.environ.get("KVISTD", "kvistd")
KVIST = os.environ.get("KVIST", "kvist")
SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
START_S = 60

# Built without RocksDB, kvistd has no NVMe tier.
NVME = os.environ.get("KVISTD_NVME", "1") == "1"
needs_nvme = unittest.skipUnless(NVME, "built without NVMe")


class Daemon:
    """A kvistd process: started, watched through its notify socket, stopped."""

    def __init__(self, directory, *flags, arena="64M", env=None, wrap=(), http=True, **popen):
        self.directory = directory
        self.socket = os.path.join(directory, "k.sock")
        self.http = os.path.join(directory, "http.sock")
        self.log = os.path.join(directory, "log")
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify_path = os.path.join(directory, "notify")
        if os.path.exists(notify_path):
            os.unlink(notify_path)
        self.notify.bind(notify_path)
        arguments = [*wrap, KVISTD, "--config", self.config(), "--arena", arena, *flags]
        if http:
            arguments += ["--metrics", f"unix:{self.http}"]
        environment = dict(os.environ, NOTIFY_SOCKET=notify_path, **(env or {}))
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(arguments, stderr=log, stdin=subprocess.DEVNULL,
                                            env=environment, **popen)
        self.pidfd = os.pidfd_open(self.process.pid)

    def tool(self, *arguments):
        """Run the kvist tool. @return exit status, stdout, stderr"""
        done = subprocess.run([KVIST, *arguments, "--socket", self.socket], timeout=60, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def config(self, text=None):
        """The configuration file; text replaces it."""
        path = os.path.join(self.directory, "kvistd.conf")
        if text is not None or not os.path.exists(path):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text if text is not None
                           else f"[daemon]\nsocket = {self.socket}\n")
        return path

    def notified(self, word, seconds=START_S):
        """Wait for a notification that contains a word; None when the daemon ended before."""
        while True:
            ready = select.select([self.notify, self.pidfd], [], [], seconds)[0]
            if self.notify in ready:
                text = self.notify.recv(4096).decode()
                if word in text:
                    return text
            elif ready:
                return None
            else:
                raise AssertionError(f"no {word} within {seconds} s\n{self.text()}")

    def ready(self):
        if self.notified("READY=1") is None:
            raise AssertionError(f"kvistd ended: {self.process.wait()}\n{self.text()}")
        return self

    def text(self):
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def ended(self, seconds=START_S):
        """Wait for its end. @return the exit status"""
        return self.process.wait(seconds)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def dispose(self):
        self.kill()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.notify.close()
            self.pidfd = -1

    def files_at_rest(self):
        """Open files when all memory that is made ahead is there, a quarter of the arena."""
        wire.until(lambda: 4 * self.metric("spare_bytes") >= self.metric("arena_bytes"),
                   "memory is made ahead")
        return self.open_files()

    def open_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def get(self, page, method="GET"):
        """@return (status, body) of a page"""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(wire.DEADLINE_S)
            peer.connect(self.http)
            peer.sendall(f"{method} {page} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            answer = b""
            try:
                while part := peer.recv(65536):
                    answer += part
            except ConnectionResetError:
                pass  # it did not read all that was sent
        head, _, body = answer.decode().partition("\r\n\r\n")
        return int(head.split()[1]), body

    def metric(self, name):
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"kvist_{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")


class Case(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="kvist-")
        self.addCleanup(shutil.rmtree, self.directory, True)

    def start(self, *flags, **options):
        """A daemon that is ready; ends with the test."""
        daemon = self.launch(*flags, **options)
        return daemon.ready()

    def launch(self, *flags, **options):
        daemon = Daemon(self.directory, *flags, **options)
        self.addCleanup(daemon.dispose)
        return daemon

    def refuses(self, *flags, words, status=None, **options):
        """It must not start, and say why in one line that has these words."""
        daemon = self.launch(*flags, **options)
        self.assertIsNone(daemon.notified("READY=1"), "it started")
        code = daemon.ended()
        text = daemon.text()
        self.assertGreater(code, 0, f"not an orderly refusal: {code}\n{text}")
        if status is not None:
            self.assertEqual(code, status, text)
        errors = [line for line in text.splitlines() if " error: " in line or "kvistd: " in line]
        self.assertEqual(len(errors), 1, text)
        for word in words:
            self.assertIn(word, errors[0])
        daemon.dispose()
        os.unlink(daemon.log)
        return errors[0]

    def assert_serves(self, daemon):
        with wire.Peer(daemon.socket) as peer:
            self.assertEqual(peer.hello().body, wire.HELLO_REPLY)
            metrics, _ = peer.stat()
            self.assertGreater(metrics["arena_bytes"], 0)

    def assert_ends(self, peer, status, word=""):
        """The daemon has answered with a Failure and closed."""
        failure = peer.ends()
        self.assertIsNotNone(failure, "closed without a word")
        self.assertEqual(failure[0], status, failure[1])
        self.assertIn(word, failure[1])
        self.assertGreater(len(failure[1]), 10)


def may_mount():
    """Whether a mount namespace of our own can be had, and how."""
    command = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    try:
        probe = subprocess.run([*command, "mount", "-t", "tmpfs", "none", "/mnt"],
                               stderr=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return None
    return command if probe.returncode == 0 else None


def raise_files(wanted):
    """Open files for this process. @return how many it may have"""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    return count


def main():
    unittest.main(verbosity=2, argv=[sys.argv[0], *sys.argv[1:]])
