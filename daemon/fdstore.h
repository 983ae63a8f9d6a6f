/*
 * fdstore - the service manager's file descriptor store, as the store's keeper.
 *
 * Role        takes the fds that the manager passes at start; hands it those that are to outlive
 *             kvistd; learns by barriers which are safe. Knows nothing of what they are.
 * There is    a store when the manager says how many fds it takes: $FDSTORE (systemd 254 and newer
 *             set it, kvistd.service sets it for older ones). Without, every call does nothing.
 * Counting    what does not fit vanishes silently in systemd, so that it is counted here; what
 *             waits for the manager to read counts already
 * Ownership   fds passed at start are this object's until the store takes them over
 * Threads     loop; nothing waits for the manager
 * Limits      KVIST_FDSTORE_MAX fds, names of up to 12 bytes: 2,000 long names overflow
 *             LISTEN_FDNAMES, and the unit fails for good
 * Source      sd_pid_notify_with_fds(3), sd_notify_barrier(3), sd_listen_fds(3)
 */
#ifndef KVIST_DAEMON_FDSTORE_H
#define KVIST_DAEMON_FDSTORE_H

#include "daemon/notify.h"
#include "storage/store.h"

#include <event2/event.h>

#define KVIST_FDSTORE_MAX   1024U
#define KVIST_FDSTORE_SPARE 256U /* for pool maps, session pages and pidfds */

struct kvist_fdstore {
    struct kvist_notify *notify;
    uint32_t max;      /* 0: there is none */
    uint32_t count;    /* stored now */
    uint64_t keeps;    /* since the start */
    uint64_t asked;    /* keeps that the barrier under way stands behind */
    uint64_t safe;     /* keeps that a barrier has come back for */
    uint64_t asked_us; /* when */
    bool complained;
    int barrier_fd; /* -1: none under way */
    struct event *barrier;
    struct event_base *base;
    void (*kept)(void *ctx, uint64_t safe);
    void *ctx;
    struct kvist_kept_fd *passed; /* [passed_count] */
    size_t passed_count;
    uint64_t let_go_bytes; /* memory in passed fds that nobody knows */
};

/** Find out whether there is a store. @param notify  borrowed; the way to it */
void kvist_fdstore_init(struct kvist_fdstore *fdstore, struct kvist_notify *notify);

/** @return whether an fd that was passed at start came from the store; it is taken over then. */
bool kvist_fdstore_offer(struct kvist_fdstore *fdstore, const char *name, int fd);

/** Close an fd that was passed and is not known, and have the manager forget it. */
void kvist_fdstore_let_go(struct kvist_fdstore *fdstore, const char *name, int fd);

/** Take one of the passed fds out. @return it, owned by the caller; -1: there is none */
int kvist_fdstore_take(struct kvist_fdstore *fdstore, const char *name);

/** As kvist_fdstore_keep(), but nobody waits for it: it does not count among `kept`. */
KVIST_MUST_USE enum kvist_status
kvist_fdstore_put(struct kvist_fdstore *fdstore, const char *name, int fd);

/** Bytes of memory in the passed fds, also in those that were let go. */
uint64_t kvist_fdstore_passed_bytes(const struct kvist_fdstore *fdstore);

/** INVALID: so many segments do not fit. */
KVIST_MUST_USE enum kvist_status kvist_fdstore_fit(const struct kvist_fdstore *fdstore,
                                                   uint64_t segments,
                                                   struct kvist_error *err);

/** How many segments there are places for; 0: nothing is stored. */
uint32_t kvist_fdstore_segments(const struct kvist_fdstore *fdstore);

/** Begin to tell `kept` what is safe. */
void kvist_fdstore_start(struct kvist_fdstore *fdstore,
                         struct event_base *base,
                         void (*kept)(void *ctx, uint64_t safe),
                         void *ctx);

/** Store a duplicate of fd. NO_SPACE: it would not fit. */
KVIST_MUST_USE enum kvist_status
kvist_fdstore_keep(struct kvist_fdstore *fdstore, const char *name, int fd);
void kvist_fdstore_forget(struct kvist_fdstore *fdstore, const char *name);

/** Ask for a barrier when something was stored since the last. To be called after each turn. */
void kvist_fdstore_turn(struct kvist_fdstore *fdstore);

/** Close what is open here; what is stored stays. */
void kvist_fdstore_fini(struct kvist_fdstore *fdstore);

#endif
