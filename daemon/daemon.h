/*
 * daemon - kvistd: the parts, put together and run.
 *
 * Role        opens everything in order, runs the event loop, reloads, stops. Signals come through
 *             the loop: TERM, INT stop (a second one at once), HUP reloads.
 * Order       socket, metrics socket, store, then READY; so a second instance is refused before it
 *             touches anything. Down in reverse, after the hot set was saved.
 * Threads     all of it: loop; the store's workers never come here
 * Errors      kvist_daemon_run() logs what went wrong and returns the exit status
 */
#ifndef KVIST_DAEMON_DAEMON_H
#define KVIST_DAEMON_DAEMON_H

#include "daemon/cleared.h"
#include "daemon/http.h"
#include "daemon/metrics.h"
#include "daemon/pool.h"
#include "daemon/server.h"
#include "daemon/session.h"

#define KVIST_EXIT_OK      0
#define KVIST_EXIT_FAILURE 1
#define KVIST_EXIT_CONFIG  2

struct kvist_daemon_options {
    const char *config_path; /* as kvist_config_load() takes it */
    const struct kvist_config_override *overrides;
    size_t override_count;
};

/* Blocks that were found corrupt in one of the tiers. */
struct kvist_said_corrupt {
    uint64_t total;
    uint64_t us; /* when the log was last told; 0: never */
};

struct kvist_daemon {
    struct kvist_daemon_options options;
    struct kvist_config config; /* as configured: arena_bytes may be 0, auto */
    uint64_t arena_bytes;
    struct kvist_notify notify;
    struct kvist_fdstore fdstore;
    struct event_base *base;
    struct kvist_listener listener;
    struct kvist_tenant_socket {
        struct kvist_listener listener;
        char tenant[KVIST_TENANT_BYTES_MAX + 1];
    } tenant_sockets[KVIST_CONFIG_SOCKETS_MAX];
    size_t tenant_socket_count;
    struct kvist_http http;
    struct kvist_http_address http_address;
    struct kvist_store *store;
    struct kvist_server server;
    struct kvist_sessions sessions;
    struct kvist_shapes *shapes;
    struct kvist_counters counters;
    struct kvist_metrics metrics;
    struct event *signals[3];
    struct event *store_events[4];
    struct event *turn; /* a timer of 0: the store has more to do */
    struct event *tick;
    uint64_t tick_due_us;
    uint64_t alive_us;          /* when the watchdog was last told */
    uint64_t alive_interval_us; /* 0: there is none */
    uint64_t health_us;         /* when health was last looked at */
    char health[KVIST_HEALTH_BYTES];
    bool tier_noticed;
    struct kvist_said_corrupt corrupt_memory; /* what the log was told of corrupt blocks */
    struct kvist_said_corrupt corrupt_nvme;
    uint64_t said_resized; /* pools */
    struct kvist_cleared cleared;
    bool ready;
    bool stopping;
    uint64_t save_deadline_us; /* 0: not saving */
    uint64_t save_logged_us;
};

/** Run until told to stop. @return the exit status */
int kvist_daemon_run(const struct kvist_daemon_options *options);

/** Read the configuration again and take over what can change; on an error keep the old one. */
KVIST_MUST_USE enum kvist_status kvist_daemon_reload(struct kvist_daemon *daemon,
                                                     struct kvist_error *err);

/** What kvistd ends with when it cannot start. */
int kvist_daemon_exit_code(enum kvist_status status);

/**
 * Load and check against the machine, with what a start would begin with; makes nothing.
 *
 * @param config_out  arena_bytes settled
 */
KVIST_MUST_USE enum kvist_status kvist_daemon_check(const struct kvist_daemon_options *options,
                                                    struct kvist_config *config_out,
                                                    struct kvist_error *err);

#endif
