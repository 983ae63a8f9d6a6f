#!/usr/bin/env python3
"""The supervisor of tests/support does what systemd does, as seen by small services and kvistd."""
import os
import signal
import socket
import sys

import harness
import wire

sys.path.insert(0, os.path.join(harness.SOURCE, "tests", "support"))
from supervise import Supervisor  # noqa: E402

# What the services below have in common.
PREAMBLE = """
import os, select, signal, socket, sys
notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.connect(os.environ["NOTIFY_SOCKET"])
def tell(*words, fds=()):
    socket.send_fds(notify, ["\\n".join(words).encode()], fds)
def memfd(content):
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd
def barrier():
    mine, theirs = os.pipe()
    tell("BARRIER=1", fds=[theirs])
    os.close(theirs)
    assert os.read(mine, 1) == b""
names = [n for n in os.environ.get("LISTEN_FDNAMES", "").split(":") if n]
assert len(names) == int(os.environ.get("LISTEN_FDS", "0"))
assert int(os.environ["LISTEN_PID"]) == os.getpid() or not names
passed = {name: 3 + index for index, name in enumerate(names)}
def say(text):
    print(text, file=sys.stderr, flush=True)
"""


class Supervised(harness.Case):
    def service(self, script, **options):
        command = [sys.executable, "-S", "-c", PREAMBLE + script]
        service = Supervisor(command, self.directory, **options)
        self.addCleanup(service.close)
        return service.start()

    def said(self, service):
        return service.text().splitlines()


class Store(Supervised):
    KEEPS = """
for name, fd in passed.items():
    say(f"{name}={os.pread(fd, 99, 0).decode()}")
if not passed:
    tell("FDSTORE=1", "FDNAME=a", "FDPOLL=0", fds=[memfd(b"first")])
    tell("FDSTORE=1", "FDNAME=b", fds=[memfd(b"second")])
    tell("FDSTORE=1", "FDNAME=b", fds=[memfd(b"third")])
tell("READY=1")
signal.pause()
"""

    def test_descriptors_come_back(self):
        service = self.service(self.KEEPS)
        service.wait_ready()
        self.assertEqual(service.stored(), {"a": 1, "b": 2})
        for count in (2, 3, 4):
            run = service.kill()
            self.assertEqual(run.status, -signal.SIGKILL)
            self.assertEqual(service.wait_ready().passed, ["a", "b", "b"])
            self.assertEqual(len(service.runs), count)
        self.assertEqual(self.said(service), ["a=first", "b=third"] * 3)

    def test_sockets_go_before_the_store(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(os.path.join(self.directory, "l.sock"))
            listener.listen()
            service = self.service("""
passed_socket = socket.socket(fileno=passed.pop("kvistd.socket"))
say(passed_socket.getsockname().rsplit("/", 1)[1])
""" + self.KEEPS, listener=listener)
            self.assertEqual(service.wait_ready().passed, ["kvistd.socket"])
            service.kill()
            self.assertEqual(service.wait_ready().passed, ["kvistd.socket", "a", "b", "b"])
        self.assertEqual(self.said(service), ["l.sock", "l.sock", "a=first", "b=third"])

    def test_stop_empties_the_store(self):
        service = self.service(self.KEEPS)
        service.wait_ready()
        self.assertEqual(service.stop(), -signal.SIGTERM)
        self.assertIsNone(service.pid)
        self.assertEqual(service.stored(), {})
        service.start()
        self.assertEqual(service.wait_ready().passed, [])

    def test_removed(self):
        service = self.service("""
tell("FDSTORE=1", "FDNAME=gone", "FDPOLL=0", fds=[memfd(b"x"), memfd(b"y")])
tell("FDSTORE=1", "FDNAME=kept", "FDPOLL=0", fds=[memfd(b"z")])
tell("FDSTOREREMOVE=1", "FDNAME=gone")
tell("FDSTOREREMOVE=1", "FDNAME=unheard of")
tell("READY=1")
signal.pause()
""")
        service.wait_ready()
        self.assertEqual(service.stored(), {"kept": 1})

    def test_what_it_no_longer_stores_is_closed(self):
        # The reading end sees the end of file only when the store has closed the other one.
        service = self.service("""
mine, theirs = os.pipe()
tell("FDSTORE=1", "FDNAME=pipe", "FDPOLL=0", fds=[theirs])
os.close(theirs)
barrier()
assert not select.select([mine], [], [], 0)[0]
tell("FDSTOREREMOVE=1", "FDNAME=pipe")
assert os.read(mine, 1) == b""
tell("READY=1")
signal.pause()
""")
        service.wait_ready()

    def test_bounded(self):
        service = self.service("""
for index in range(5):
    tell("FDSTORE=1", f"FDNAME=n{index}", "FDPOLL=0", fds=[memfd(b"x")])
mine, theirs = os.pipe()
tell("FDSTORE=1", "FDNAME=over", "FDPOLL=0", fds=[theirs])
os.close(theirs)
assert os.read(mine, 1) == b""
assert os.environ["FDSTORE"] == "3"
tell("READY=1")
signal.pause()
""", store_max=3)
        service.wait_ready()
        self.assertEqual(list(service.stored()), ["n0", "n1", "n2"])
        self.assertEqual(service.lost, 3)

    def test_many(self):
        limit = harness.raise_files(4096)
        self.assertGreaterEqual(limit, 4096)
        service = self.service("""
for index in range(0 if passed else 1000):
    fd = memfd(b"%d" % index)
    tell("FDSTORE=1", f"FDNAME=s{index}", "FDPOLL=0", fds=[fd])
    os.close(fd)
for name, fd in passed.items():
    assert f"s{os.pread(fd, 9, 0).decode()}" == name
tell("READY=1")
signal.pause()
""")
        service.wait_ready()
        self.assertEqual(len(service.stored()), 1000)
        service.kill()
        self.assertEqual(len(service.wait_ready().passed), 1000)

    def test_the_same_file_is_kept_once(self):
        service = self.service("""
fd = memfd(b"x")
tell("FDSTORE=1", "FDNAME=one", "FDPOLL=0", fds=[fd])
tell("FDSTORE=1", "FDNAME=two", "FDPOLL=0", fds=[os.dup(fd)])
tell("FDSTORE=1", "FDNAME=ends", "FDPOLL=0", fds=[os.pidfd_open(os.getpid())])
tell("FDSTORE=1", "FDNAME=ends2", "FDPOLL=0", fds=[os.pidfd_open(os.getppid())])
tell("READY=1")
signal.pause()
""")
        service.wait_ready()
        self.assertEqual(service.stored(), {"one": 1, "ends": 1, "ends2": 1})

    def test_polled_ones_leave_when_they_hang_up(self):
        service = self.service("""
kept = []
for name, poll in (("polled", []), ("unpolled", ["FDPOLL=0"])):
    mine, theirs = os.pipe()
    tell("FDSTORE=1", f"FDNAME={name}", *poll, fds=[theirs])
    os.close(theirs)
    kept.append(mine)
tell("READY=1")
signal.pause()
""")
        service.wait_ready()
        self.assertEqual(service.stored(), {"polled": 1, "unpolled": 1})
        service.kill()
        service.wait_ready()
        service.wait(lambda: service.stored() == {"polled": 1, "unpolled": 2}, 60,
                     "the old polled pipe left, both unpolled ones stay")


class Messages(Supervised):
    def test_barrier_is_answered_in_turn(self):
        service = self.service("""
for index in range(20):
    tell(f"STATUS={index}")
barrier()
tell("READY=1")
signal.pause()
""")
        service.wait_ready()
        self.assertEqual(list(service.messages)[:20], [f"STATUS={index}" for index in range(20)])
        self.assertEqual(list(service.messages)[20:], ["BARRIER=1", "READY=1"])

    def test_the_last_words_count(self):
        service = self.service("""
if passed:
    tell("READY=1")
    signal.pause()
for index in range(50):
    tell("FDSTORE=1", f"FDNAME=n{index}", "FDPOLL=0", fds=[memfd(b"x")])
os.kill(os.getpid(), signal.SIGKILL)
""")
        self.assertEqual(len(service.wait_ready().passed), 50)

    def test_others_are_not_heard(self):
        service = self.service("""
if os.fork() == 0:
    tell("READY=1", "STATUS=stranger")
    tell("FDSTORE=1", "FDNAME=stranger", fds=[memfd(b"x")])
    os._exit(0)
os.wait()
tell("STATUS=mine")
barrier()
tell("READY=1")
signal.pause()
""")
        service.wait_ready()
        self.assertEqual(service.stored(), {})
        self.assertNotIn("stranger", "".join(service.messages))

    def test_watchdog_and_words(self):
        service = self.service("""
assert os.environ["WATCHDOG_USEC"] == "2500000"
assert os.environ["WATCHDOG_PID"] == str(os.getpid())
tell("READY=1")
tell("WATCHDOG=1")
tell("WATCHDOG=1")
tell("RELOADING=1", "MONOTONIC_USEC=1")
tell("STOPPING=1")
signal.pause()
""", watchdog_s=2.5)
        service.wait_message("STOPPING=1")
        service.wait_message("RELOADING=1")
        self.assertEqual(service.wait_ready().alive, 2)

    def test_no_end_before_ready_is_taken_for_ready(self):
        service = self.service("""
sys.exit(7)
""", restart_s=60)
        service.wait(lambda: service.runs[0].status is not None, 60, "it ends")
        self.assertEqual(service.runs[0].status, 7)
        with self.assertRaisesRegex(AssertionError, "ends: .7."):
            service.wait_ready(60)


class Kvistd(Supervised):
    def start_kvistd(self, **options):
        command = [harness.KVISTD, "--arena", "64M", "--metrics", "off",
                   "--socket", os.path.join(self.directory, "k.sock")]
        service = Supervisor(command, self.directory, **options)
        self.addCleanup(service.close)
        return service.start()

    def hello(self):
        with wire.Peer(os.path.join(self.directory, "k.sock")) as peer:
            self.assertEqual(peer.hello().body, wire.HELLO_REPLY)

    def test_killed_and_stopped(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(os.path.join(self.directory, "k.sock"))
            listener.listen()
            service = self.start_kvistd(listener=listener, watchdog_s=3)
            for _ in range(5):
                self.assertEqual(service.wait_ready().passed[0], "kvistd.socket")
                self.hello()
                service.kill()
            run = service.wait_ready()
            service.wait(lambda: run.alive > 0, 60, "WATCHDOG=1")
            signal.pidfd_send_signal(run.pidfd, signal.SIGHUP)
            service.wait_message("RELOADING=1")
            self.assertEqual(service.stop(), 0, service.text())
            service.wait_message("STOPPING=1")
            self.assertTrue(os.path.exists(os.path.join(self.directory, "k.sock")))


if __name__ == "__main__":
    harness.main()
