#!/usr/bin/env python3
"""kvistd that must not start: one sentence that says what is wrong, exit status > 0, nothing harmed."""
import grp
import json
import os
import resource
import shutil
import socket
import subprocess
import unittest

import harness
import wire


class Configuration(harness.Case):
    BAD = [
        ("[daemon]\nsockett = /x\n", ["kvistd.conf:2", "daemon.sockett", "daemon.socket?"]),
        ("[memory]\narena_byte = 1G\n", ["kvistd.conf:2", "memory.arena_bytes?"]),
        ("[nvme]\nsocket = /x\n", ["kvistd.conf:2", "nvme.socket"]),
        ("[deamon]\nsocket = /x\n", ["kvistd.conf:1", "[deamon]", "daemon"]),
        ("socket = /x\n", ["kvistd.conf:1", "before any [section]"]),
        ("[daemon\nsocket = /x\n", ["kvistd.conf:1", "[name]"]),
        ("[daemon]\nsocket\n", ["kvistd.conf:2", "name = value"]),
        ("[daemon]\n\n# x\nlog_level = loud\n", ["kvistd.conf:4", "error|warn|info|debug"]),
        ("[daemon]\nlog_level = info\nlog_level = warn\n", ["kvistd.conf:3", "line 2"]),
        ("[daemon]\nsocket_mode = 0999\n", ["socket_mode", "octal"]),
        ("[daemon]\nsocket_mode = 0000\n", ["socket_mode", "0600"]),
        ("[daemon]\nsocket = relative\n", ["absolute"]),
        ("[daemon]\nsocket = /" + "x" * 200 + "\n", ["daemon.socket", "107 bytes"]),
        ("[daemon]\nsocket =\n", ["daemon.socket", "1 to 107 bytes"]),
        ("[daemon]\nmetrics_listen = nowhere\n", ["metrics_listen", "ADDRESS:PORT"]),
        ("[daemon]\nmetrics_listen = 127.0.0.1:99999\n", ["metrics_listen"]),
        ("[daemon]\nmetrics_listen = 0.0.0.0:9347\n", ["other hosts", "metrics_allow_remote"]),
        ("[daemon]\nmetrics_listen = [::]:9347\n", ["other hosts"]),
        ("[daemon]\nmetrics_listen = example.org:80\n", ["numeric"]),
        ("[daemon]\nsocket_group = no-such-group\n", ["no such group"]),
        ("[memory]\narena_bytes = 1M\n", ["arena_bytes", "16M"]),
        ("[memory]\narena_bytes = lots\n", ["arena_bytes", "K, M, G, T"]),
        ("[memory]\narena_bytes = 18446744073709551615T\n", ["arena_bytes"]),
        ("[memory]\narena_bytes = -1\n", ["arena_bytes"]),
        ("[memory]\nchecksum_threads = 0\n", ["checksum_threads", "1 to 8"]),
        ("[memory]\nchecksum_threads = 1.5\n", ["checksum_threads", "1 to 8"]),
        ("[nvme]\npath = /tmp\n", ["nvme.bytes"]),
        ("[nvme]\nbytes = 1G\n", ["nvme.path"]),
        ("[nvme]\npath = relative\nbytes = 1G\n", ["absolute"]),
        ("[nvme]\npath = /tmp\nbytes = 1M\n", ["nvme.bytes", "64M"]),
        ("[nvme]\npath = /tmp\nbytes = 1000T\n", ["nvme.bytes", "file system"]),
        ("[nvme]\npath = /nonexistent/a/b\nbytes = 1G\n", ["/nonexistent/a", "create it"]),
        ("[nvme]\npath = /dev/null\nbytes = 64M\n", ["not a directory"]),
        ("[nvme]\nadmission = some\n", ["evicted|all"]),
        ("[nvme]\npath = /tmp\nbytes = 64M\nextent_bytes = 1G\n", ["extent_bytes", "8 MiB"]),
        ("[memory]\narena_bytes = 1G # a lot\n", ["comment needs a line of its own"]),
        ("[memory]\nfoo = 1\n", ["no setting memory.foo; see kvistd --help"]),
        ("[nvme]\nbyte = 64M\n", ["did you mean nvme.bytes?"]),
        ("[tenants]\nA = uid:1\n", ["kvistd.conf:2", "tenant"]),
        ("[tenants]\ndefault = uid:1\n", ["default"]),
        ("[tenants]\na = user:1\n", ["uid:N"]),
        ("[tenants]\na = uid:99999999999\n", ["uid:N"]),
        ("[daemon]\n" + "#" * 5000 + "\n", ["kvistd.conf:2", "line over"]),
        ("\0\0\0\n", ["kvistd.conf"]),
    ]

    def config_path(self, text):
        path = os.path.join(self.directory, "kvistd.conf")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def test_bad_files(self):
        for text, words in self.BAD:
            with self.subTest(text=text[:60]):
                path = self.config_path(text)
                for flag in ([], ["--check-config"]):
                    run = subprocess.run(
                        [harness.KVISTD, "--config", path, *flag,
                         *([] if "socket =" in text else
                           ["--socket", os.path.join(self.directory, "k.sock")]),
                         *([] if "metrics_listen" in text else ["--metrics", "off"])],
                        capture_output=True, text=True, timeout=60, check=False)
                    self.assertEqual(run.returncode, 2, run.stderr)
                    lines = run.stderr.strip().splitlines()
                    self.assertEqual(len(lines), 1, run.stderr)
                    for word in words:
                        self.assertIn(word, lines[0])
                self.assertFalse(os.path.exists(os.path.join(self.directory, "k.sock")))

    def test_bad_flags(self):
        for flags, word in ((["--nonsense"], "--help"), (["stray"], "stray"),
                            (["--set", "x"], "section.name=value"),
                            (["--set", "daemon.x=1"], "daemon.x"),
                            (["--arena", "7"], "--arena"), (["--config"], "--help"),
                            (["--log-level", "x"], "--log-level"),
                            (["--socket", "/" + "x" * 5000], "too long"),
                            (["--config", "/nonexistent.conf"], "/nonexistent.conf"),
                            (["--config", "/tmp"], "not a file"),
                            (["--set", "daemon.hello_timeout_ms=1"] * 65, "over 64")):
            with self.subTest(flags=flags[:2]):
                run = subprocess.run([harness.KVISTD, *flags], capture_output=True, text=True,
                                     timeout=60, check=False)
                self.assertEqual(run.returncode, 2, run.stderr)
                self.assertIn(word, run.stderr)

    def test_the_example_is_what_kvistd_prints(self):
        printed = subprocess.run([harness.KVISTD, "--print-config"], capture_output=True,
                                 text=True, check=True).stdout
        with open(os.path.join(harness.SOURCE, "deploy", "kvistd.conf"), encoding="utf-8") as file:
            self.assertEqual(file.read(), printed, "kvistd --print-config > deploy/kvistd.conf")
        # Every line of it, taken at its word, is a configuration.
        path = self.config_path("".join(
            line[1:] if line.startswith("#") and line[1:2] not in (" ", "\n") and
            not line.startswith("#bytes = off") else line
            for line in printed.splitlines(True)).replace("/run/kvist", self.directory))
        os.mkdir(os.path.join(self.directory, "team-c"))
        run = subprocess.run([harness.KVISTD, "--config", path, "--check-config"],
                             capture_output=True, text=True, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)

    def test_help_and_version(self):
        for flag, word in (("--help", "memory.arena_bytes"), ("-h", "SIGHUP"),
                           ("--version", "kvistd 0.")):
            run = subprocess.run([harness.KVISTD, flag], capture_output=True, text=True,
                                 check=False)
            self.assertEqual(run.returncode, 0)
            self.assertIn(word, run.stdout)

    def test_a_file_with_a_byte_order_mark(self):
        run = subprocess.run(
            [harness.KVISTD, "--check-config", "--socket", self.directory + "/k.sock", "--config",
             self.config_path("\ufeff[daemon]\nmetrics_listen = off\n")],
            capture_output=True, text=True, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("kvistd.conf;", run.stdout)

    def test_output_that_goes_nowhere(self):
        for flag in ("--help", "--version", "--print-config", "--check-config"):
            with self.subTest(flag=flag), open("/dev/full", "w", encoding="utf-8") as full:
                run = subprocess.run([harness.KVISTD, "--socket", self.directory + "/k.sock", flag],
                                     stdout=full, stderr=subprocess.PIPE, text=True, check=False)
                self.assertEqual(run.returncode, 1, run.stderr)
                self.assertIn("cannot write to stdout", run.stderr)

    def test_a_fault_that_is_none(self):
        self.refuses(env={"KVIST_FAULT": "nonsense"}, words=["KVIST_FAULT"], status=2)


class Machine(harness.Case):
    def test_too_little_memory(self):
        self.refuses(arena="60T", words=["memory.arena_bytes", "available memory", "lower"],
                     status=2)
        self.assertFalse(os.path.exists(os.path.join(self.directory, "k.sock")))

    def test_missing_directory(self):
        self.refuses("--socket", os.path.join(self.directory, "no", "k.sock"),
                     words=["daemon.socket", "does not exist", "create it"], status=2)

    def test_unwritable_directory(self):
        # /proc takes no files, not even root's.
        self.refuses("--socket", "/proc/self/k.sock", words=["daemon.socket"])
        self.refuses("--nvme", "/proc/self/nvme", "--nvme-bytes", "64M", words=["nvme"])

    @harness.needs_nvme
    def test_somebody_elses_directory(self):
        path = os.path.join(self.directory, "nvme")
        os.mkdir(path)
        precious = os.path.join(path, "thesis.txt")
        with open(precious, "w", encoding="utf-8") as file:
            file.write("precious")
        self.refuses("--nvme", path, "--nvme-bytes", "64M", words=[path])
        self.assertEqual(os.listdir(path), ["thesis.txt"])

    @harness.needs_nvme
    def test_one_nvme_directory_for_two(self):
        path = os.path.join(self.directory, "nvme")
        first = self.start("--nvme", path, "--nvme-bytes", "128M")
        other = os.path.join(self.directory, "other")
        os.mkdir(other)
        self.directory, kept = other, self.directory
        self.refuses("--nvme", path, "--nvme-bytes", "128M", words=[path], status=1)
        self.directory = kept
        self.assert_serves(first)

    def test_built_without_nvme(self):
        if os.environ.get("KVISTD_NVME", "1") == "1":
            self.skipTest("built with it")
        self.refuses("--nvme", os.path.join(self.directory, "nvme"), "--nvme-bytes", "64M",
                     words=["RocksDB"], status=1)

    def check(self, *flags, **options):
        """By --check-config, which makes nothing. @return exit status, its one line"""
        before = sorted(os.walk(self.directory))
        run = subprocess.run([harness.KVISTD, "--config", self.path("kvistd.conf"), "--metrics",
                              "off", "--check-config", *flags],
                             capture_output=True, text=True, timeout=60, check=False, **options)
        self.assertEqual(sorted(os.walk(self.directory)), before)
        self.assertEqual(run.returncode == 0, "good" in run.stdout, run.stdout)
        return run.returncode, run.stderr

    def path(self, *names):
        return os.path.join(self.directory, *names)

    def assert_both_refuse(self, *flags, words, status, **options):
        """What a start would refuse, a check refuses too, and in the same words."""
        line = self.refuses("--metrics", "off", *flags, words=words, status=status, http=False,
                            **options)
        code, told = self.check(*flags, **options)
        self.assertEqual(code, status, told)
        for word in words:
            self.assertIn(word, told)
        self.assertIn(told.removeprefix("kvistd: ").strip(), line)

    def write(self, text, *names):
        os.makedirs(os.path.dirname(self.path(*names)), exist_ok=True)
        with open(self.path(*names), "w", encoding="utf-8") as file:
            file.write(text)

    def test_a_check_refuses_what_a_start_refuses(self):
        self.write("precious", "file")
        at = ("--socket", self.path("k.sock"))
        for flags, words, status in (
                (("--socket", self.path("no", "k.sock")), ["does not exist", "create it"], 2),
                (("--socket", self.path("file", "k.sock")), ["daemon.socket", "irectory"], 2),
                (("--socket", self.path("file")), ["not a socket", "remove it"], 1),
                ((*at, "--set", "daemon.socket_group=no-such-group"), ["no such group"], 2),
                ((*at, "--set", "tenants.a=socket:" + self.path("no", "a.sock")),
                 ["the tenant's socket", "does not exist"], 2),
                ((*at, "--metrics", "192.0.2.1:1", "--set", "daemon.metrics_allow_remote=yes"),
                 ["metrics_listen: cannot listen", "assign"], 1)):
            with self.subTest(flags=flags):
                self.assert_both_refuse(*flags, words=words, status=status)

    def test_a_check_refuses_paths_in_each_others_way(self):
        os.mkdir(self.path("sub"))
        os.symlink(self.directory, self.path("link"))
        one = ("--socket", self.path("k.sock"))
        for flags, words in (
                ((*one, "--set", "tenants.a=socket:" + self.path("sub", "..", "k.sock")),
                 ["the tenant's socket", "where daemon.socket is"]),
                ((*one, "--set", "tenants.a=socket:" + self.path("link", "k.sock")),
                 ["the tenant's socket", "where daemon.socket is"]),
                ((*one, "--set", "tenants.a=socket:" + self.path("k.sock.lock")),
                 ["the tenant's socket", "the lock beside it"]),
                ((*one, "--set", "tenants.a=socket:" + self.path("a.sock"),
                  "--set", "tenants.b=socket:" + self.path("link", "a.sock")),
                 ["where the tenant's socket is"]),
                ((*one, "--metrics", "unix:" + self.path("link", "k.sock")),
                 ["daemon.metrics_listen", "where daemon.socket is"]),
                (("--socket", self.path("k.sock.lock"), "--metrics",
                  "unix:" + self.path("k.sock")), ["daemon.metrics_listen"])):
            with self.subTest(flags=flags):
                self.assert_both_refuse(*flags, words=[*words, "name another path"], status=2)
        self.assertFalse([name for name in os.listdir(self.directory) if "sock" in name])

    @harness.needs_nvme
    def test_a_check_refuses_a_socket_where_the_tier_is(self):
        os.mkdir(self.path("nvme"))
        os.symlink(self.path("nvme"), self.path("link"))
        nvme = ("--nvme", self.path("nvme"), "--nvme-bytes", "64M")
        for flags, words in (
                (("--socket", self.path("link", "k.sock"), *nvme), ["daemon.socket", "NVMe tier's own"]),
                (("--socket", self.path("k.sock"), *nvme, "--metrics",
                  "unix:" + self.path("nvme", "m.sock")), ["metrics_listen", "NVMe tier's own"]),
                (("--socket", self.path("k.sock"), "--nvme", self.path("k.sock"), "--nvme-bytes",
                  "64M"), ["where nvme.path is"])):
            with self.subTest(flags=flags):
                self.assert_both_refuse(*flags, words=[*words, "name another path"], status=2)
        self.assertEqual(os.listdir(self.path("nvme")), [])

    def test_a_check_refuses_what_is_in_the_way_of_a_socket(self):
        os.mkdir(self.path("k.sock.lock"))
        self.assert_both_refuse("--socket", self.path("k.sock"),
                                words=["daemon.socket", "the lock", "Is a directory"], status=1)
        at = ("--socket", self.path("other.sock"))
        self.assert_both_refuse(*at, "--metrics", "unix:" + self.path("none", "m.sock"),
                                words=["daemon.metrics_listen", "does not exist"], status=2)
        self.write("precious", "m.sock")
        self.assert_both_refuse(*at, "--metrics", "unix:" + self.path("m.sock"),
                                words=["not a socket", "metrics_listen"], status=1)

    @unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
    def test_a_check_refuses_a_group_that_its_user_cannot_give(self):
        os.chmod(self.directory, 0o777)
        self.assert_both_refuse("--socket", self.path("k.sock"), "--set", "daemon.socket_group=daemon",
                                words=["socket_group = daemon", "uid 65534", "is not in that group"],
                                status=2, user=65534, group=65534, extra_groups=[])
        self.write(f"[daemon]\nsocket = {self.path('k.sock')}\nsocket_group = daemon\n",
                   "kvistd.conf")
        gid = grp.getgrnam("daemon").gr_gid
        self.assertEqual(self.check(user=65534, group=65534, extra_groups=[gid]), (0, ""))

    def test_a_check_refuses_limits_that_a_start_refuses(self):
        at = ("--socket", self.path("k.sock"))
        for limit, value, words, status in (
                (resource.RLIMIT_NOFILE, 255, ["open files is 255", "LimitNOFILE", "ulimit -n"], 2),
                (resource.RLIMIT_FSIZE, 64 << 10, ["limit of file sizes", "LimitFSIZE"], 1)):
            with self.subTest(words=words):
                self.assert_both_refuse(
                    *at, words=words, status=status,
                    preexec_fn=lambda: resource.setrlimit(limit, (value, value)))

    @harness.needs_nvme
    def test_a_check_refuses_what_is_in_the_way_of_the_tier(self):
        flags = ("--socket", self.path("k.sock"), "--nvme", self.path("nvme"), "--nvme-bytes", "64M")
        self.assertEqual(self.start(*flags).stop(), 0)
        os.unlink(self.path("log"))
        for names in (("extents", "00000001"), ("index", "LOCK"), ("index", "MANIFEST-000099"),
                      ("index", "CURRENT")):
            with self.subTest(names=names):
                at = self.path("nvme", *names)
                kept = os.path.exists(at) and os.rename(at, self.path("kept")) is None
                os.mkdir(at)
                self.assert_both_refuse(*flags, status=2,
                                        words=["/".join(names) + " is no file of kvist's", "remove"])
                os.rmdir(at)
                if kept:
                    os.rename(self.path("kept"), at)
        # What is called otherwise is in nobody's way.
        self.write("precious", "nvme", "extents", "thesis.txt")
        self.write("precious", "nvme", "index", "thesis", "text")
        self.assertEqual(self.check(*flags), (0, ""))
        daemon = self.start(*flags)
        self.assertEqual(daemon.get("/healthz"), (200, "ok\n"))
        self.assertEqual(daemon.stop(), 0)
        self.assertTrue(os.path.exists(self.path("nvme", "index", "thesis", "text")))

    @harness.needs_nvme
    def test_a_check_refuses_a_directory_that_a_start_refuses(self):
        self.write("precious", "full", "thesis.txt")
        self.write("kvist tier 0\n", "other", "lock")
        self.write("kvist tier 1\n", "mixed", "lock")
        self.write("precious", "mixed", "index")
        for name, words in (("full", ["thesis.txt"]), ("other", ["not of this version"]),
                            ("mixed", ["index is not a directory"])):
            with self.subTest(name=name):
                self.assert_both_refuse("--socket", self.path("k.sock"), "--nvme", self.path(name),
                                        "--nvme-bytes", "64M", words=words, status=2)

    @harness.needs_nvme
    def test_a_check_beside_a_kvistd_that_serves(self):
        flags = ("--nvme", self.path("nvme"), "--nvme-bytes", "128M")
        self.write(f"[daemon]\nsocket = {self.path('k.sock')}\n", "kvistd.conf")
        self.assertEqual(self.check(*flags), (0, ""))
        daemon = self.start(*flags)
        self.assertEqual(self.check(*flags), (0, ""))
        self.assert_serves(daemon)

    def test_something_at_the_sockets_path(self):
        path = os.path.join(self.directory, "k.sock")
        with open(path, "w", encoding="utf-8") as file:
            file.write("precious")
        self.refuses(words=["not a socket", "remove it"], status=1)
        self.assertFalse(os.path.exists(path + ".lock"))
        with open(path, encoding="utf-8") as file:
            self.assertEqual(file.read(), "precious")

    def test_a_metrics_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = "127.0.0.1:%d" % taken.getsockname()[1]
            self.refuses("--metrics", address, http=False,
                         words=["metrics_listen", "another port"], status=1)
        self.assertFalse(os.path.exists(os.path.join(self.directory, "k.sock")))


class SecondInstance(harness.Case):
    def test_on_the_same_socket(self):
        first = self.start()
        run = subprocess.run([harness.KVISTD, "--socket", first.socket, "--metrics", "off",
                              "--arena", "64M"], capture_output=True, text=True, timeout=60,
                             check=False)
        self.assertEqual(run.returncode, 1)
        self.assertIn(f"pid {first.process.pid}", run.stderr)
        self.assertIn("stop it, or choose another daemon.socket", run.stderr)
        self.assert_serves(first)

    def test_on_a_socket_of_another_program(self):
        path = os.path.join(self.directory, "k.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.bind(path)
            other.listen()
            self.refuses(words=["somebody listens"], status=1)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.connect(path)

    def test_stale_socket(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.bind(os.path.join(self.directory, "k.sock"))
        self.assert_serves(self.start())

    def test_killed_and_started_again(self):
        for _ in range(5):
            daemon = self.start()
            self.assert_serves(daemon)
            daemon.kill()
            self.assertTrue(os.path.exists(daemon.socket))
            daemon.dispose()
        self.assertEqual(self.start().stop(), 0)

    def test_socket_from_systemd(self):
        path = os.path.join(self.directory, "k.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as passed:
            passed.bind(path)
            passed.listen()

            def pass_it():
                os.dup2(passed.fileno(), 3)

            wrap = ["sh", "-c", 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"', "sh"]
            daemon = self.start(wrap=wrap, preexec_fn=pass_it, pass_fds=[3])
            self.assert_serves(daemon)
            self.assertEqual(daemon.stop(), 0)
            self.assertTrue(os.path.exists(path), "the socket is systemd's")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.connect(path)  # waits for the next kvistd
            daemon.dispose()
            self.assert_serves(self.start(wrap=wrap, preexec_fn=pass_it, pass_fds=[3]))

    def test_a_wrong_socket_from_systemd(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as passed:
            passed.bind(os.path.join(self.directory, "k.sock"))
            wrap = ["sh", "-c", 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"', "sh"]
            daemon = self.launch(wrap=wrap, preexec_fn=lambda: os.dup2(passed.fileno(), 3),
                                 pass_fds=[3])
            self.assertIsNone(daemon.notified("READY=1"))
            self.assertEqual(daemon.ended(), 2)
            self.assertIn("ListenStream=", daemon.text())

    def test_a_stranger_from_systemd(self):
        for variables in ("LISTEN_FDS=1", "LISTEN_FDS=1 LISTEN_FDNAMES=a:b", "LISTEN_FDS=7"):
            with open(os.devnull, "rb") as stranger:
                wrap = ["sh", "-c", f'LISTEN_PID=$$ {variables} exec "$@"', "sh"]
                daemon = self.start(wrap=wrap, preexec_fn=lambda: os.dup2(stranger.fileno(), 3),
                                    pass_fds=[3])
            self.assert_serves(daemon)
            self.assertEqual(daemon.text().count("warn: "), 1, daemon.text())
            self.assertEqual(daemon.stop(), 0)
            daemon.dispose()
            os.unlink(daemon.log)


class Disk(harness.Case):
    """On a small file system of our own."""

    SIZE = "80m"

    def setUp(self):
        super().setUp()
        self.unshare = harness.may_mount()
        if self.unshare is None:
            self.skipTest("cannot have a mount namespace here")
        self.disk = os.path.join(self.directory, "disk")
        os.mkdir(self.disk)

    def wrap(self, before=":", access="rw"):
        script = (f'mount -t tmpfs -o {access},size={self.SIZE} none "{self.disk}" && {before} && '
                  'exec "$@"')
        return [*self.unshare, "sh", "-c", script, "sh"]

    def inside(self, daemon):
        return f"/proc/{daemon.process.pid}/root{self.disk}"

    @harness.needs_nvme
    def test_full_at_start(self):
        fill = f'(cat /dev/zero >"{self.disk}/fill" 2>/dev/null || true)'
        flags = ["--nvme", f"{self.disk}/nvme", "--nvme-bytes", "64M"]
        self.refuses(*flags, wrap=self.wrap(fill), words=["nvme", "free space there"], status=1)
        check = subprocess.run([*self.wrap(fill), harness.KVISTD, *flags, "--check-config",
                                "--socket", f"{self.directory}/k.sock"],
                               capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(check.returncode, 1, check.stderr)
        self.assertIn("free space there", check.stderr)
        self.assertNotIn("good", check.stdout)

    def test_read_only(self):
        self.refuses("--nvme", f"{self.disk}/nvme", "--nvme-bytes", "64M",
                     wrap=self.wrap(access="ro"),
                     words=["nvme.path", "Read-only"])

    def test_more_than_there_is(self):
        self.refuses("--nvme", f"{self.disk}/nvme", "--nvme-bytes", "100M", wrap=self.wrap(),
                     words=["nvme.bytes", "80 MiB in all"], status=2)

    def fill(self, daemon):
        """Somebody else takes all that is left."""
        with open(f"{self.inside(daemon)}/fill", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                pass

    def put(self, engine, first, count):
        for index in range(first, first + count):
            engine.put(index.to_bytes(32, "little"), os.urandom(65536))

    def save(self, daemon):
        """By the tool. @return (written, unsaved, reason)"""
        status, output, error = daemon.tool("--json", "save")
        told = json.loads(output)
        self.assertEqual(status, 1 if told["unsaved_blocks"] else 0, error)
        if told["unsaved_blocks"]:
            self.assertIn("%d of %d blocks could not be written" %
                          (told["unsaved_blocks"], told["blocks"] + told["unsaved_blocks"]), error)
            self.assertIn(told["reason"], error)
        return told["blocks"], told["unsaved_blocks"], told["reason"]

    @harness.needs_nvme
    def test_full_while_it_serves(self):
        daemon = self.start("--nvme", f"{self.disk}/nvme", "--nvme-bytes", "64M",
                            "--log-level", "warn", wrap=self.wrap())
        engine = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(engine.close)
        self.put(engine, 1, 10)
        wire.until(lambda: daemon.metric("slots_ready") == 10, "ten blocks")
        self.assertEqual(self.save(daemon), (10, 0, ""))
        self.fill(daemon)
        self.put(engine, 100, 200)
        wire.until(lambda: daemon.metric("slots_ready") == 210, "all are in memory")
        written, unsaved, reason = self.save(daemon)
        self.assertEqual(written + unsaved, 200)
        self.assertGreater(unsaved, 100)
        for words in (self.disk, "free space there", "No space left"):
            self.assertIn(words, reason)
        code, health = daemon.get("/healthz")
        health = health.strip()
        self.assertEqual((code, health), (200, f"degraded: {reason}"))
        wire.until(lambda: f'warn: health changed health="{health}"' in daemon.text(), "the log")
        self.assertGreater(daemon.metric("nvme_write_errors_total"), 0)
        self.assertEqual(daemon.metric("degraded"), 1)
        self.assert_serves(daemon)
        # There is room again: health says so by itself, and what was not saved can be.
        os.unlink(f"{self.inside(daemon)}/fill")
        wire.until(lambda: daemon.get("/healthz")[1] == "ok\n", "it is well again")
        wire.until(lambda: 'warn: health changed health="ok"' in daemon.text(), "the log says so")
        self.assertEqual(self.save(daemon), (unsaved, 0, ""))
        self.assertEqual(daemon.metric("nvme_blocks"), 210)
        self.put(engine, 500, 20)
        wire.until(lambda: daemon.metric("slots_ready") == 230, "twenty more")
        self.fill(daemon)
        daemon.stop()
        self.assertIn("warn: hot set not saved in full status=NO_SPACE", daemon.text())
        self.assertRegex(daemon.text(), r'unsaved_blocks=[1-9].* error="the disk of ')

    @harness.needs_nvme
    def test_a_clear_on_a_full_disk(self):
        daemon = self.start("--nvme", f"{self.disk}/nvme", "--nvme-bytes", "64M",
                            wrap=self.wrap())
        engine = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(engine.close)
        self.put(engine, 1, 10)
        wire.until(lambda: daemon.metric("slots_ready") == 10, "ten blocks")
        self.assertEqual(self.save(daemon), (10, 0, ""))
        self.fill(daemon)
        status, _, error = daemon.tool("clear", "--all", "--yes")
        self.assertEqual(status, 1)
        self.assertIn("nvme.path", error)
        self.assertIn("free a few MiB", error)
        self.assertEqual(daemon.metric("slots_ready"), 0)
        os.unlink(f"{self.inside(daemon)}/fill")
        wire.until(lambda: daemon.tool("clear", "--all", "--yes")[0] == 0, "a clear is durable")
        self.assertEqual(daemon.stop(), 0)

    @harness.needs_nvme
    def test_a_directory_that_is_removed_while_it_serves(self):
        daemon = self.start("--nvme", f"{self.disk}/nvme", "--nvme-bytes", "64M",
                            wrap=self.wrap())
        engine = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(engine.close)
        self.put(engine, 1, 10)
        wire.until(lambda: daemon.metric("slots_ready") == 10, "ten blocks")
        shutil.rmtree(f"{self.inside(daemon)}/nvme")
        written, unsaved, reason = self.save(daemon)
        self.assertEqual((written, unsaved), (0, 10))
        self.assertIn(f"{self.disk}/nvme", reason)
        self.assertIn("degraded: ", daemon.get("/healthz")[1])
        self.assert_serves(daemon)
        self.assertEqual(daemon.stop(), 0)
        self.assertIn("warn: hot set not saved in full", daemon.text())

    @harness.needs_nvme
    def test_a_disk_that_stalls(self):
        daemon = self.start("--nvme", f"{self.disk}/nvme", "--nvme-bytes", "64M",
                            "--set", "nvme.admission=all", "--set", "nvme.io_threads=4",
                            wrap=self.wrap(), env={"KVIST_FAULT": "tier.stall:1+"})
        engine = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(engine.close)
        self.put(engine, 1, 40)
        wire.until(lambda: daemon.metric("nvme_in_flight") > 0, "a write stalls")
        # Nobody else waits: what is asked and stored meanwhile is done before a write ends.
        answers = 0
        ended = daemon.metric("nvme_writes_total")
        while daemon.metric("nvme_writes_total") == ended:
            answers += 1
        ready = daemon.metric("slots_ready")
        ended = daemon.metric("nvme_writes_total")
        self.put(engine, 100, 10)
        wire.until(lambda: daemon.metric("slots_ready") == ready + 10, "ten more")
        self.assertGreater(answers, 5)
        self.assertLess(daemon.metric("nvme_writes_total"), ended + 8)
        self.assertEqual(daemon.get("/healthz")[1], "ok\n")
        self.assertEqual(self.save(daemon)[1:], (0, ""))
        self.assertEqual(daemon.stop(), 0)

    # -- a tier that has blocks, and whose disk is in trouble at the next start ------------------

    def hold(self):
        """The disk stays for as long as the test runs; wraps a command to have it."""
        script = f'mount -t tmpfs -o size={self.SIZE} none "{self.disk}" && echo && exec sleep 600'
        holder = subprocess.Popen([*self.unshare, "sh", "-c", script], stdout=subprocess.PIPE)
        self.addCleanup(holder.stdout.close)
        self.addCleanup(holder.wait)
        self.addCleanup(holder.kill)
        holder.stdout.readline()
        self.held = f"/proc/{holder.pid}/root{self.disk}"
        users = [] if os.geteuid() == 0 else ["-U", "--preserve-credentials"]
        return ["nsenter", "-t", str(holder.pid), "-m", *users]

    def flags(self):
        return ["--nvme", f"{self.disk}/nvme", "--nvme-bytes", "64M"]

    def engine(self, daemon):
        engine = wire.Engine(daemon.socket, os.urandom(16))
        self.addCleanup(engine.close)
        return engine

    def begin(self, inside):
        """A daemon that has saved ten blocks, and has ended."""
        daemon = self.start(*self.flags(), wrap=inside)
        with wire.Engine(daemon.socket, os.urandom(16)) as engine:
            self.put(engine, 1, 10)
            wire.until(lambda: daemon.metric("slots_ready") == 10, "ten blocks")
        self.assertEqual(daemon.stop(), 0)
        daemon.dispose()
        os.unlink(daemon.log)

    def serves_without(self, daemon, *words):
        """From DRAM; everything says what is wrong."""
        health = daemon.get("/healthz")[1]
        for word in ("degraded: no NVMe tier", "until its disk is well: ", self.disk, *words):
            self.assertIn(word, health)
        wire.until(lambda: 'warn: health changed health="degraded: no NVMe' in daemon.text(),
                   "the log says so")
        self.assertEqual((daemon.metric("nvme_present"), daemon.metric("degraded")), (0, 1))
        self.assertEqual(daemon.get("/readyz")[0], 200)
        self.put(self.engine(daemon), 100, 5)
        wire.until(lambda: daemon.metric("slots_ready") == 5, "five more")
        written, unsaved, reason = self.save(daemon)
        self.assertEqual((written, unsaved), (0, 5))
        self.assertIn(words[-1], reason)

    def comes_back(self, daemon):
        wire.until(lambda: daemon.get("/healthz")[1] == "ok\n", "the tier is taken up", 60)
        wire.until(lambda: daemon.metric("nvme_blocks") == 10, "with its blocks")
        self.assertEqual(daemon.metric("nvme_present"), 1)
        self.assertEqual(self.save(daemon), (5, 0, ""))
        self.assertEqual(daemon.metric("nvme_blocks"), 15)
        self.assertEqual(daemon.stop(), 0)

    @harness.needs_nvme
    def test_full_at_a_restart(self):
        inside = self.hold()
        self.begin(inside)
        with open(f"{self.held}/fill", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                pass
        check = subprocess.run([*inside, harness.KVISTD, *self.flags(), "--check-config",
                                "--socket", f"{self.directory}/k.sock"],
                               capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(check.returncode, 0, check.stderr)
        self.assertIn("would start without its NVMe tier", check.stderr)
        daemon = self.start(*self.flags(), wrap=inside)
        self.serves_without(daemon, "free space there", "No space left")
        os.unlink(f"{self.held}/fill")
        self.comes_back(daemon)

    @harness.needs_nvme
    def test_read_only_at_a_restart(self):
        inside = self.hold()
        self.begin(inside)
        subprocess.run([*inside, "mount", "-o", "remount,ro", self.disk], check=True)
        daemon = self.start(*self.flags(), wrap=inside)
        self.serves_without(daemon, "Read-only file system")
        subprocess.run([*inside, "mount", "-o", "remount,rw", self.disk], check=True)
        self.comes_back(daemon)

    @harness.needs_nvme
    def test_errors_at_a_restart(self):
        inside = self.hold()
        self.begin(inside)
        for fault, words in (("tier.open:1+", "Input/output error"),
                             ("tier.index.open:1+", "No space left")):
            daemon = self.start(*self.flags(), wrap=inside, env={"KVIST_FAULT": fault})
            self.serves_without(daemon, words)
            self.assertEqual(daemon.stop(), 0)
            daemon.dispose()
            os.unlink(daemon.log)
        daemon = self.start(*self.flags(), wrap=inside, env={"KVIST_FAULT": "tier.open:1"})
        self.serves_without(daemon, "Input/output error")
        self.comes_back(daemon)

    @harness.needs_nvme
    def test_an_index_that_was_removed(self):
        inside = self.hold()
        self.begin(inside)
        shutil.rmtree(f"{self.held}/nvme/index")
        daemon = self.start(*self.flags(), wrap=inside)
        wire.until(lambda: "warn: the index in" in daemon.text(), "the log says so")
        self.assertIn("was missing: its blocks are dropped", daemon.text())
        self.assertEqual(daemon.get("/healthz")[1], "ok\n")
        self.assertEqual(daemon.stop(), 0)

    @harness.needs_nvme
    def test_a_clear_while_the_tier_is_away(self):
        inside = self.hold()
        self.begin(inside)
        daemon = self.start(*self.flags(), wrap=inside, env={"KVIST_FAULT": "tier.open:1"})
        self.put(self.engine(daemon), 1, 3)
        wire.until(lambda: daemon.metric("slots_ready") == 3, "three blocks")
        status, _, error = daemon.tool("clear", "--all", "--yes")
        self.assertEqual(status, 1)
        self.assertIn("clear again", error)
        self.assertEqual(daemon.metric("slots_ready"), 0)
        # The pool was known, so its blocks do not come back with the tier.
        wire.until(lambda: daemon.get("/healthz")[1] == "ok\n", "the tier is taken up", 60)
        wire.until(lambda: daemon.metric("nvme_loading") == 0, "and read back")
        wire.until(lambda: daemon.metric("nvme_blocks") == 0, "nothing is there")
        self.assertEqual(daemon.tool("clear", "--all", "--yes")[0], 0)
        self.assertEqual(daemon.stop(), 0)


@unittest.skipUnless(os.geteuid() != 0 or shutil.which("setpriv"), "root may write everywhere")
class Locked(harness.Case):
    """A directory that kvistd may no longer write to. (A file system is not made read-only while
    files are open for writing.)"""

    put, save, engine = Disk.put, Disk.save, Disk.engine

    def setUp(self):
        super().setUp()
        os.chmod(self.directory, 0o777)
        self.disk = os.path.join(self.directory, "nvme")

    def wrap(self):
        user = 'setpriv --reuid 65534 --regid 65534 --clear-groups' if os.geteuid() == 0 else ""
        return ["sh", "-c", f'chmod 777 "$NOTIFY_SOCKET" && exec {user} "$@"', "sh"]

    def lock(self, mode):
        for folder, _, _ in os.walk(self.disk):
            os.chmod(folder, mode)

    def begin_locked(self):
        daemon = self.start("--nvme", self.disk, "--nvme-bytes", "128M", "--set",
                            "nvme.extent_bytes=8M", wrap=self.wrap())
        engine = self.engine(daemon)
        self.put(engine, 1, 10)
        wire.until(lambda: daemon.metric("slots_ready") == 10, "ten blocks")
        self.assertEqual(self.save(daemon), (10, 0, ""))
        self.lock(0o500)
        self.put(engine, 100, 300)
        wire.until(lambda: daemon.metric("slots_ready") == 310, "all are in memory")
        written, unsaved, reason = self.save(daemon)
        self.assertEqual(written + unsaved, 300)
        self.assertGreater(unsaved, 0)
        self.assertIn("Permission denied", reason)
        self.assertEqual(daemon.get("/healthz")[1], f"degraded: {reason}\n")
        self.assertEqual(daemon.metric("nvme_blocks"), 10 + written)
        self.assert_serves(daemon)
        return daemon, written, unsaved

    @harness.needs_nvme
    def test_locked_while_it_serves(self):
        daemon, _, unsaved = self.begin_locked()
        self.lock(0o700)
        wire.until(lambda: daemon.get("/healthz")[1] == "ok\n", "it is well again", 60)
        self.assertEqual(self.save(daemon), (unsaved, 0, ""))
        self.assertEqual(daemon.metric("nvme_blocks"), 310)
        self.assertEqual(daemon.stop(), 0)

    @harness.needs_nvme
    def test_what_was_written_before_it_was_locked_stays(self):
        daemon, written, _ = self.begin_locked()
        self.assertEqual(daemon.stop(), 0)
        self.assertIn("warn: hot set not saved in full", daemon.text())
        daemon.dispose()
        self.lock(0o700)
        daemon = self.start("--nvme", self.disk, "--nvme-bytes", "128M", wrap=self.wrap())
        wire.until(lambda: daemon.metric("nvme_loading") == 0, "it is read")
        self.assertEqual(daemon.metric("nvme_blocks"), 10 + written)
        self.assertEqual(daemon.stop(), 0)


if __name__ == "__main__":
    harness.main()
