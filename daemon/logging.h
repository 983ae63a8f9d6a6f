/*
 * logging - kvistd's log lines on stderr.
 *
 * Role        the sink behind kvist_log(): one write(2) a line; a priority prefix when stderr goes
 *             to the journal, a time stamp otherwise. Never waits: a line that stderr does not take
 *             now is dropped and counted. Bounds what peers can make it say.
 * Threads     the sink: any; the limit: loop
 * Source      sd-daemon(3) systemd.exec(5) $JOURNAL_STREAM
 */
#ifndef KVIST_DAEMON_LOGGING_H
#define KVIST_DAEMON_LOGGING_H

#include "proto/base/log.h"

#include <stdbool.h>
#include <stdint.h>

/** Log to stderr from here on. Before any thread is started. */
void kvist_logging_start(enum kvist_log_level level);

/** Lines that stderr did not take. Any thread. */
uint64_t kvist_logging_dropped_total(void);

#define KVIST_LOG_LIMIT_USERS 64U
#define KVIST_LOG_LIMIT_LINES 20U           /* of a user, */
#define KVIST_LOG_LIMIT_US    (10000000ULL) /* in such a time */

struct kvist_log_limit {
    struct {
        uint32_t lines;
        uint32_t uid;       /* whose lines were withheld last */
        uint64_t window_us; /* when the window began */
        uint64_t suppressed;
    } users[KVIST_LOG_LIMIT_USERS]; /* by uid, hashed: a collision only shares an allowance */
};

/** May a line about a peer of this user be written? */
bool kvist_log_limit_take(struct kvist_log_limit *limit, uint32_t uid, uint64_t now_us);

/** Say how many lines were withheld in the windows that have ended; every now and then. */
void kvist_log_limit_sum_up(struct kvist_log_limit *limit, uint64_t now_us);

#endif
