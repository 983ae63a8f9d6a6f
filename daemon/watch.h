/*
 * watch - what the log has to say without being asked.
 *
 * Role        tells operators when health changes, what the tier lost before it was opened, and that
 *             blocks were corrupt: how many, and the pool of the last, at most once in ten seconds
 *             for each tier. Never a key
 * Threads     loop
 */
#ifndef KVIST_DAEMON_WATCH_H
#define KVIST_DAEMON_WATCH_H

#include "daemon/daemon.h"

/** Look, once a second however often it is called. */
void kvist_watch_health(struct kvist_daemon *daemon, uint64_t now_us);

#endif
