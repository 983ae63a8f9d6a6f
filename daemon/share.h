/*
 * share - how much of what is counted one peer may take.
 *
 * Role        decides whether a peer may have one more connection, session or pool, and says so, in
 *             the log, the counters and health, when it may not.
 * Shares      who holds places is a tenant, and in the default tenant, which is everybody else,
 *             each user of its own. A holder may take one more as long as it has fewer than are
 *             left: alone it gets half, and however many come and take all they can, the next one
 *             still finds as many free as the last one took. A sixteenth is kept for root and
 *             kvistd's own user, who are bound by the limit alone.
 * Threads     loop
 * Source      Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet
 *             switches, 1998
 */
#ifndef KVIST_DAEMON_SHARE_H
#define KVIST_DAEMON_SHARE_H

#include "daemon/server.h"

#define KVIST_SHARE_KEPT 16U /* one place in so many */

/** Whether a holder of `own` places may have one more, of `max` of which `used` are taken. */
bool kvist_share_fits(bool is_operator, uint32_t own, uint32_t used, uint32_t max);

/** Whether two peers, named by tenant and user, are one holder. */
bool kvist_share_is_one(const char *tenant, uid_t uid, const char *other_tenant, uid_t other_uid);

/**
 * kvist_share_fits(), for a peer that is told when not.
 *
 * @param what  "connections": of what, for people
 * @return OK; BUSY, with a sentence
 */
KVIST_MUST_USE enum kvist_status kvist_share_check(struct kvist_connection *connection,
                                                   const char *what,
                                                   uint32_t own,
                                                   uint32_t used,
                                                   uint32_t max,
                                                   struct kvist_error *err);

#endif
