/*
 * watch - what the log has to say without being asked.
 *
 * Role        tells operators what was taken over at start, when health changes, what the tier lost
 *             before it was opened, and that blocks were corrupt: how many, and the pool of the last,
 *             at most once in ten seconds for each tier. Never a key
 * Threads     loop
 */
#ifndef KVIST_DAEMON_WATCH_H
#define KVIST_DAEMON_WATCH_H

#include "daemon/daemon.h"

/** What a restart has cost, and what it has found. */
void kvist_watch_adoption(const struct kvist_daemon *daemon);

/** Forget what was cleared when the tier has dropped all of it. */
void kvist_watch_clears(struct kvist_daemon *daemon);

/** Look, once a second however often it is called. */
void kvist_watch_health(struct kvist_daemon *daemon, uint64_t now_us);

#endif
