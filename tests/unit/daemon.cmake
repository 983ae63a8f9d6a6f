# daemon/
kvist_add_unit(config unit/config_test.c kvist_daemon_core)
kvist_add_unit(machine unit/machine_test.c kvist_daemon_core)
kvist_add_unit(cleared unit/cleared_test.c kvist_daemon_core)
kvist_add_unit(daemon_parts unit/daemon_parts_test.c kvist_daemon_core)
kvist_add_unit(notify unit/notify_test.c kvist_daemon_core)
