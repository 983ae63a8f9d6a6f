#!/usr/bin/env python3
"""kvistd is killed again and again under a real systemd, and comes back each time."""
import machine
from machine import SERVICE, SOCKET

KILLS = 20
BLOCKS = 50


class Kills(machine.Case):
    def test_twenty_in_a_row(self):
        rig = self.machine
        self.drop_in("RestartSec=50ms", "RestartSteps=0")
        engine = self.engine()
        self.told(engine.ask("put", 0, BLOCKS, 60000), right=BLOCKS)
        inode = rig.path(SOCKET).stat().st_ino
        pids = set()
        for count in range(KILLS):
            # Every other time without waiting until it is ready.
            rig.wait(self.is_active if count % 2 else self.main_pid, "it runs")
            pids.add(self.main_pid())
            self.signal("KILL")
            rig.wait(lambda: int(rig.show(SERVICE, "NRestarts")) > count, "it is started again")
            self.assertNotEqual(rig.show(SERVICE, "ActiveState"), "failed")
            self.assertEqual(rig.path(SOCKET).stat().st_ino, inode)
        self.assertEqual(len(pids), KILLS)
        self.assertIn("health     ok", rig.run("kvist", "status"))
        self.assertEqual(rig.show(SERVICE, "NRestarts"), str(KILLS))
        self.told(engine.ask("put", 0, 2 * BLOCKS, 60000), right=2 * BLOCKS)


if __name__ == "__main__":
    machine.main()
