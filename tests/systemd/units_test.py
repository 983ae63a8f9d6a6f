#!/usr/bin/env python3
"""The shipped units under a real systemd: activation, restart, stop, reload, watchdog, upgrade."""
import os
import pathlib
import re
import unittest

import machine
from machine import SERVICE, SOCKET

BLOCKS = 50


class Rig(unittest.TestCase):
    def test_leaves_nothing_on_the_host(self):
        with machine.Machine() as rig:
            name = rig.directory.name
            rig.write("/tmp/x", "x")
            rig.write("/usr/bin/x", "x")
            rig.write("/run/x", "x")
            self.assertEqual(list(rig.directory.iterdir()), [], "the host sees its files")
            setting = "/proc/sys/kernel/pid_max"
            as_it_is = rig.try_run("sh", "-c", f"value=$(cat {setting}); echo $value >{setting}")
            self.assertIn("Read-only", as_it_is.stderr)
            inside = {name: os.readlink(f"/proc/{rig.pid}/ns/{name}")
                      for name in ("pid", "mnt", "cgroup", "ipc", "uts", "net")}
        for namespace, link in inside.items():
            self.assertNotEqual(link, os.readlink(f"/proc/self/ns/{namespace}"))
        self.assertFalse(rig.directory.exists() or rig.cgroup.exists())
        self.assertNotIn(name, pathlib.Path("/proc/self/mountinfo").read_text())
        self.assertFalse(os.path.exists("/usr/bin/x"))


class Start(machine.Case):
    def test_the_first_client_starts_it(self):
        rig = self.machine
        self.assertEqual(rig.show(SERVICE, "ActiveState"), "inactive")
        self.assertEqual(rig.show("kvistd.socket", "ActiveState"), "active")
        self.assertIn("health     ok", rig.run("kvist", "status"))
        self.assertTrue(self.is_active())
        self.assertEqual(rig.show(SERVICE, "NRestarts"), "0")
        self.assertEqual(rig.run("stat", "-c", "%U", f"/proc/{self.main_pid()}").strip(), "kvist")

    def test_start_returns_when_it_serves(self):
        rig = self.machine
        rig.run("systemctl", "start", SERVICE)
        page = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9347/readyz').status)"
        self.assertEqual(rig.run("/usr/bin/python3", "-c", page), "200\n")
        self.assertNotEqual(rig.show(SERVICE, "StatusText"), "")

    def test_who_may_connect(self):
        rig = self.machine
        stranger = ("setpriv", "--reuid=65534", "--regid=65534")
        self.assertIn("ermission", rig.try_run(*stranger, "--clear-groups", "kvist", "status").stderr)
        group = rig.run("stat", "-c", "%g", SOCKET).strip()
        rig.run(*stranger, f"--groups={group}", "kvist", "status")

    def test_a_mended_configuration_is_taken_by_itself(self):
        rig = self.machine
        rig.write("/etc/kvist/kvistd.conf", "[memory]\narena_bites = 1G\n")
        self.assertNotEqual(rig.try_run("systemctl", "start", SERVICE).returncode, 0)
        rig.wait(lambda: int(rig.show(SERVICE, "NRestarts")) >= 2, "it is tried again")
        self.assertIn("memory.arena_bytes?", rig.journal("-u", SERVICE))
        rig.write("/etc/kvist/kvistd.conf", self.CONFIG)
        rig.wait(self.is_active, "it has started")


class Life(machine.Case):
    def keeps(self, engine):
        """What was in memory is still there, for engines old and new; the old one goes on."""
        self.assertIn(f"adopted what kvistd had left blocks={BLOCKS} ",
                      self.machine.journal("-u", SERVICE))
        self.all_right(engine, "get", 0, BLOCKS)
        self.all_right(self.engine(), "get", 0, BLOCKS)
        self.put(engine, BLOCKS, BLOCKS)
        self.assertEqual(engine.numbers("stats")["lost"], 0)

    def test_restart(self):
        rig = self.machine
        engine = self.engine()
        self.put(engine, 0, BLOCKS)
        before = self.main_pid()
        socket_inode = rig.path(SOCKET).stat().st_ino
        rig.run("systemctl", "restart", SERVICE)
        self.assertNotEqual(self.main_pid(), before)
        self.assertEqual(rig.path(SOCKET).stat().st_ino, socket_inode)
        self.assertEqual(rig.show(SERVICE, "Result"), "success")
        self.keeps(engine)

    def test_stop_saves(self):
        rig = self.machine
        engine = self.engine()
        self.put(engine, 0, BLOCKS)
        rig.run("systemctl", "stop", SERVICE, "kvistd.socket")
        self.assertEqual(rig.show(SERVICE, "Result"), "success")
        self.assertEqual(rig.show(SERVICE, "ActiveState"), "inactive")
        self.assertIn(f"hot set saved status=OK blocks={BLOCKS}", rig.journal("-u", SERVICE))
        self.assertFalse(rig.path(SOCKET).exists())
        self.assertTrue(rig.path("/run/kvist").is_dir(), "containers mount it")
        engine.close()
        rig.run("systemctl", "start", "kvistd.socket")
        again = self.engine()
        self.all_right(again, "fetch", 0, BLOCKS)

    def test_reload(self):
        rig = self.machine
        engine = self.engine()
        before = self.main_pid()
        rig.write("/etc/kvist/kvistd.conf", "[daemon]\nlog_level = debug\n" + self.CONFIG)
        rig.run("systemctl", "reload", SERVICE)
        rig.wait(lambda: "reloaded" in rig.journal("-u", SERVICE), "it has reloaded")
        rig.write("/etc/kvist/kvistd.conf", "nonsense")
        rig.run("systemctl", "reload", SERVICE)
        rig.wait(lambda: "kvistd.conf:1" in rig.journal("-u", SERVICE), "it has refused")
        self.assertEqual(self.main_pid(), before)
        self.assertTrue(self.is_active())
        self.put(engine, 0, BLOCKS)
        self.assertEqual(engine.numbers("stats")["connects"], 1)

    def test_watchdog(self):
        rig = self.machine
        self.drop_in("WatchdogSec=3")
        engine = self.engine()
        self.put(engine, 0, BLOCKS)
        before = self.main_pid()
        self.signal("STOP")
        # Hits go on meanwhile.
        self.all_right(engine, "get", 0, BLOCKS)
        rig.wait(lambda: self.main_pid() not in (0, before) and self.is_active(),
                 "another one serves")
        self.assertIn("Watchdog timeout", rig.journal("-u", SERVICE))
        self.keeps(engine)

    def test_upgrade(self):
        rig = self.machine
        engine = self.engine()
        self.put(engine, 0, BLOCKS)
        version = rig.run("kvistd", "--version").split()[1]
        newer = re.sub(r"\d$", lambda last: str((int(last[0]) + 1) % 10), version)
        program = rig.path("/usr/bin/kvistd")
        replacement = rig.path("/usr/bin/kvistd.new")
        replacement.write_bytes(program.read_bytes().replace(version.encode(), newer.encode()))
        replacement.chmod(0o755)
        replacement.rename(program)
        self.assertIn(f"kvistd     {version} ", rig.run("kvist", "status"))
        rig.run("systemctl", "restart", SERVICE)
        self.assertIn(f"kvistd     {newer} ", rig.run("kvist", "status"))
        self.keeps(engine)


class Units(machine.Case):
    # Settings that an older systemd does not know and says that it ignores.
    NEWER = {"RestartSteps": 254, "RestartMaxDelaySec": 254}

    def test_verify(self):
        rig = self.machine
        systemd = int(rig.run("systemctl", "--version").split()[1])
        done = rig.try_run("systemd-analyze", "verify", SERVICE, "kvistd.socket")
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in (done.stdout + done.stderr).splitlines():
            unknown = re.search(r"Unknown key '(\w+)' in section", line)
            self.assertTrue(unknown and systemd < self.NEWER.get(unknown[1], 0), line)

    def test_exposure(self):
        text = self.machine.run("systemd-analyze", "security", "--no-pager", SERVICE)
        level = re.search(r"Overall exposure level for kvistd.service: ([\d.]+)", text)
        print(level[0])
        self.assertLessEqual(float(level[1]), 2.0, text)


if __name__ == "__main__":
    machine.main()
