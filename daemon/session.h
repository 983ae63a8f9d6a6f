/*
 * session - engines and their processes, as the daemon knows them.
 *
 * Role        joins processes to sessions by session id, watches each by its pidfd, and tells the
 *             store when one has ended. A connection may go and come again: what a process holds
 *             stays while it lives, and no timer ever takes it.
 * Ownership   the table owns sessions and processes; a connection borrows its process
 * Threads     loop
 * Limits      KVIST_SESSIONS_MAX, of which a peer has its share (share.h), as of open pools; ranks
 *             and one scheduler a session
 * Invariants  a session has at least one process; process->connection and connection->process name
 *             each other
 * Errors      DENIED: a session id of another user, a process that cannot be watched; INVALID: it
 *             does not fit its session; EXISTS: the place is taken by a process that lives; BUSY
 * Source      pidfd_open(2): readable once the process has ended, its mappings gone with it
 */
#ifndef KVIST_DAEMON_SESSION_H
#define KVIST_DAEMON_SESSION_H

#include "daemon/server.h"
#include "storage/store.h"

#define KVIST_SESSION_ID_BYTES 16U

struct kvist_session {
    struct kvist_sessions *table;
    struct kvist_session *next;
    struct kvist_store_session *store;
    struct kvist_process *processes;
    uint8_t id[KVIST_SESSION_ID_BYTES];
    uid_t uid;
    uint32_t rank_count;
    char tenant[KVIST_TENANT_BYTES_MAX + 1];
    char name[KVIST_NAME_BYTES_MAX + 1];
};

struct kvist_process {
    struct kvist_session *session;
    struct kvist_process *next;
    struct kvist_store_process *store;
    struct kvist_connection *connection; /* NULL: it lost its connection and lives */
    Kvist__Wire__Role role;
    uint32_t rank;
    pid_t pid;
    int pidfd;
    struct event *ended;
};

struct kvist_sessions {
    struct event_base *base;
    struct kvist_store *store;
    struct kvist_counters *counters;
    struct kvist_session *first;
};

/**
 * Make a connection's process part of its session, which is made when it is the first; or, when
 * the process was there before, give it this connection instead of the old one.
 *
 * @param hello  checked; any role but ROLE_TOOL
 */
KVIST_MUST_USE enum kvist_status kvist_sessions_join(struct kvist_sessions *sessions,
                                                     struct kvist_connection *connection,
                                                     const Kvist__Wire__Hello *hello,
                                                     struct kvist_error *err);

/** Take over the sessions that the store has adopted, and watch their processes. */
KVIST_MUST_USE enum kvist_status kvist_sessions_adopt(struct kvist_sessions *sessions,
                                                      struct kvist_error *err);

/**
 * Whether a peer may open a pool.
 *
 * @param pool  NULL: there is none yet
 * @return OK; BUSY: nobody has it open, and the peer has its share of pools; DENIED: its tenant may
 *         only read
 */
KVIST_MUST_USE enum kvist_status kvist_sessions_check_pool(const struct kvist_sessions *sessions,
                                                           struct kvist_connection *connection,
                                                           const struct kvist_store_pool *pool,
                                                           bool read_only,
                                                           struct kvist_error *err);

/**
 * daemon.privileged_peers is refuse now: end the connections of those that it is meant for. Their
 * processes connect again, and are refused their pools.
 */
void kvist_sessions_judge(const struct kvist_sessions *sessions);

/** The connection is gone; its process, if it has one, stays. */
void kvist_sessions_detach(struct kvist_connection *connection);

/** End all sessions, whether or not their processes live: the daemon stops. */
void kvist_sessions_clear(struct kvist_sessions *sessions);

static inline bool kvist_process_schedules(const struct kvist_process *process)
{
    return process->role != KVIST__WIRE__ROLE__ROLE_WORKER;
}

static inline bool kvist_process_maps(const struct kvist_process *process)
{
    return process->role != KVIST__WIRE__ROLE__ROLE_SCHEDULER;
}

#endif
