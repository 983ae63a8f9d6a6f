#include "daemon/session.h"

#include "daemon/peer.h"
#include "daemon/share.h"
#include "proto/base/check.h"
#include "proto/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define PRIVILEGED                                                                                 \
    "kvistd opens no pool for peers that could write memory whatever its permissions say "         \
    "(daemon.privileged_peers = refuse): run as another user, without capabilities"
#define PIDFS_MAGIC 0x50494446 /* "PIDF": each pidfd's inode is its process's (Linux 6.9) */

/* --- Ending ---------------------------------------------------------------------------------- */

static void session_free(struct kvist_session *session)
{
    struct kvist_session **link = &session->table->first;
    while (*link != session) {
        link = &(*link)->next;
    }
    *link = session->next;
    kvist_log(KVIST_LOG_INFO,
              "session ended name=\"%s\" tenant=%s uid=%u",
              session->name,
              session->tenant,
              (unsigned)session->uid);
    kvist_store_session_close(&session->store);
    free(session);
}

/* Also a half-made one, which no session has yet. */
static void process_free(struct kvist_process *process)
{
    if (process->connection != NULL) {
        process->connection->process = NULL;
        kvist_connection_doom(process->connection);
    }
    if (process->store != NULL) {
        kvist_store_process_close(&process->store);
    }
    if (process->ended != NULL) {
        event_free(process->ended);
    }
    if (process->pidfd >= 0) {
        (void)close(process->pidfd);
    }
    free(process);
}

static void process_remove(struct kvist_process *process)
{
    struct kvist_process **link = &process->session->processes;
    while (*link != process) {
        link = &(*link)->next;
    }
    *link = process->next;
    process_free(process);
}

/* What it had sent before it ended still counts: its commits may be on the socket. */
static void process_ended(struct kvist_process *process)
{
    struct kvist_session *session = process->session;
    if (process->connection != NULL) {
        kvist_connection_drain(process->connection);
    }
    session->table->counters->processes_ended_total++;
    kvist_log(KVIST_LOG_INFO,
              "process ended pid=%d name=\"%s\" rank=%u",
              (int)process->pid,
              session->name,
              process->rank);
    process_remove(process);
    if (session->processes == NULL) {
        session_free(session);
    }
}

static void on_ended(evutil_socket_t fd, short what, void *ctx)
{
    (void)fd;
    (void)what;
    process_ended(ctx);
}

static bool has_ended(const struct kvist_process *process)
{
    struct pollfd ended = {.fd = process->pidfd, .events = POLLIN};
    return poll(&ended, 1, 0) == 1;
}

void kvist_sessions_detach(struct kvist_connection *connection)
{
    struct kvist_process *process = connection->process;
    if (process == NULL) {
        return;
    }
    connection->process = NULL;
    process->connection = NULL;
    kvist_store_process_set_ctx(process->store, NULL);
    kvist_log(KVIST_LOG_DEBUG,
              "process lost its connection pid=%d name=\"%s\"",
              (int)process->pid,
              process->session->name);
}

void kvist_sessions_clear(struct kvist_sessions *sessions)
{
    struct kvist_session *next_session = NULL;
    for (struct kvist_session *session = sessions->first; session != NULL; session = next_session) {
        next_session = session->next;
        struct kvist_process *next = NULL;
        for (struct kvist_process *process = session->processes; process != NULL; process = next) {
            next = process->next;
            process_remove(process);
        }
        session_free(session);
    }
}

/* --- Adopting -------------------------------------------------------------------------------- */

static enum kvist_status adopt_process(struct kvist_session *session,
                                       const struct kvist_store_adopted *adopted,
                                       size_t index,
                                       struct kvist_error *err)
{
    struct kvist_process *process = calloc(1, sizeof(*process));
    if (process == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, ENOMEM, "adopt", "no memory for a process");
    }
    bool schedules = adopted->processes[index].schedules;
    bool maps = adopted->processes[index].maps_segments;
    process->session = session;
    process->role =
        maps ? (schedules ? KVIST__WIRE__ROLE__ROLE_ENGINE : KVIST__WIRE__ROLE__ROLE_WORKER)
             : KVIST__WIRE__ROLE__ROLE_SCHEDULER;
    process->rank = adopted->processes[index].rank;
    process->pid = (pid_t)adopted->processes[index].pid;
    process->store = adopted->processes[index].process;
    process->next = session->processes;
    session->processes = process;
    process->pidfd = fcntl(adopted->processes[index].pidfd, F_DUPFD_CLOEXEC, 0);
    if (process->pidfd < 0) {
        return kvist_error_set_errno(err, errno, "dup", "cannot watch an adopted process");
    }
    process->ended = event_new(session->table->base, process->pidfd, EV_READ, on_ended, process);
    if (process->ended == NULL || event_add(process->ended, NULL) != 0) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "libevent", "cannot watch a process");
    }
    return KVIST_OK;
}

static enum kvist_status adopt_session(struct kvist_sessions *sessions,
                                       const struct kvist_store_adopted *adopted,
                                       struct kvist_error *err)
{
    struct kvist_session *session = calloc(1, sizeof(*session));
    if (session == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, ENOMEM, "adopt", "no memory for a session");
    }
    session->table = sessions;
    session->store = adopted->session;
    memcpy(session->id, adopted->id, sizeof(session->id));
    session->uid = (uid_t)adopted->about.uid;
    session->rank_count = adopted->rank_count;
    memcpy(session->tenant, adopted->about.tenant, sizeof(session->tenant));
    memcpy(session->name, adopted->about.name, sizeof(session->name));
    session->next = sessions->first;
    sessions->first = session;
    enum kvist_status status = KVIST_OK;
    for (size_t index = 0; index < adopted->process_count && status == KVIST_OK; index++) {
        status = adopt_process(session, adopted, index, err);
    }
    return status;
}

enum kvist_status kvist_sessions_adopt(struct kvist_sessions *sessions, struct kvist_error *err)
{
    struct kvist_store_adopted adopted;
    enum kvist_status status = KVIST_OK;
    for (uint32_t place = 0; place < KVIST_SESSIONS_MAX && status == KVIST_OK; place++) {
        if (kvist_store_adopted(sessions->store, place, &adopted)) {
            status = adopt_session(sessions, &adopted, err);
        }
    }
    return status;
}

/* --- Joining --------------------------------------------------------------------------------- */

/* Two pidfds of one process? pids say so unless they are not visible from here. */
static bool same_process(const struct kvist_process *process, pid_t pid, int pidfd)
{
    if (pid != 0 || process->pid != 0) {
        return pid == process->pid && !has_ended(process);
    }
    struct statfs system;
    struct stat before;
    struct stat now;
    return fstatfs(pidfd, &system) == 0 && system.f_type == PIDFS_MAGIC &&
           fstat(pidfd, &now) == 0 && fstat(process->pidfd, &before) == 0 &&
           now.st_ino == before.st_ino;
}

static struct kvist_session *find_session(struct kvist_sessions *sessions, const uint8_t *id)
{
    struct kvist_session *session = sessions->first;
    while (session != NULL && memcmp(session->id, id, KVIST_SESSION_ID_BYTES) != 0) {
        session = session->next;
    }
    return session;
}

/* Processes whose end the loop has not come to yet. May free the session. */
static void reap(struct kvist_session *session)
{
    struct kvist_process *process = session->processes;
    while (process != NULL) {
        struct kvist_process *next = process->next;
        if (has_ended(process)) {
            process_ended(process);
        }
        process = next;
    }
}

/* What came between: another socket, or another line in [tenants]. */
static enum kvist_status refuse_tenant(const struct kvist_session *session,
                                       const struct kvist_connection *connection,
                                       struct kvist_error *err)
{
    const struct kvist_tenant_limits *before =
        kvist_config_limits(connection->server->config, session->tenant);
    bool other_socket = connection->by_socket || (before != NULL && before->socket[0] != '\0');
    return kvist_error_set(
        err,
        KVIST_DENIED,
        0,
        "hello",
        other_socket ? "its session began in tenant %s, and who comes through this socket "
                       "is in %s: connect it to the socket that it began on"
                     : "its session began in tenant %s, and [tenants] has put its user "
                       "into %s since: restart the engine",
        session->tenant,
        connection->tenant);
}

static enum kvist_status check_session(const struct kvist_session *session,
                                       const struct kvist_connection *connection,
                                       const Kvist__Wire__Hello *hello,
                                       struct kvist_error *err)
{
    if (session->uid != connection->uid) {
        return kvist_error_set(
            err, KVIST_DENIED, 0, "hello", "this session id belongs to another user");
    }
    if (strcmp(session->tenant, connection->tenant) != 0) {
        return refuse_tenant(session, connection, err);
    }
    if (session->rank_count != hello->rank_count) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "hello",
                               "the session has %u ranks, this process says %u",
                               session->rank_count,
                               hello->rank_count);
    }
    return KVIST_OK;
}

static enum kvist_status open_session(struct kvist_sessions *sessions,
                                      struct kvist_connection *connection,
                                      const Kvist__Wire__Hello *hello,
                                      struct kvist_session **session_out,
                                      struct kvist_error *err)
{
    uint32_t own = 0;
    uint32_t used = 0;
    for (const struct kvist_session *at = sessions->first; at != NULL; at = at->next) {
        own += kvist_share_is_one(connection->tenant, connection->uid, at->tenant, at->uid);
        used++;
    }
    enum kvist_status status =
        kvist_share_check(connection, "sessions", own, used, KVIST_SESSIONS_MAX, err);
    if (status != KVIST_OK) {
        return status;
    }
    struct kvist_session *session = calloc(1, sizeof(*session));
    if (session == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, ENOMEM, "hello", "no memory for a session");
    }
    status = kvist_store_session_open(
        sessions->store, hello->session_id.data, hello->rank_count, &session->store, err);
    if (status != KVIST_OK) {
        free(session);
        return status;
    }
    session->table = sessions;
    memcpy(session->id, hello->session_id.data, sizeof(session->id));
    session->uid = connection->uid;
    session->rank_count = hello->rank_count;
    (void)snprintf(session->tenant, sizeof(session->tenant), "%s", connection->tenant);
    (void)snprintf(session->name, sizeof(session->name), "%s", hello->name);
    /* It goes to logs and terminals, which some bytes command: ASCII alone is sure to be safe. */
    for (char *at = session->name; *at != '\0'; at++) {
        if (*at < 0x20 || *at > 0x7e || *at == '"') {
            *at = '_';
        }
    }
    struct kvist_store_about about = {.uid = (uint32_t)session->uid};
    memcpy(about.tenant, session->tenant, sizeof(about.tenant));
    memcpy(about.name, session->name, sizeof(about.name));
    kvist_store_session_describe(session->store, &about);
    session->next = sessions->first;
    sessions->first = session;
    kvist_log(KVIST_LOG_INFO,
              "session began name=\"%s\" tenant=%s uid=%u ranks=%u",
              session->name,
              session->tenant,
              (unsigned)session->uid,
              session->rank_count);
    *session_out = session;
    return KVIST_OK;
}

/* Takes pidfd over, also when it fails. */
static enum kvist_status open_process(struct kvist_session *session,
                                      struct kvist_connection *connection,
                                      const Kvist__Wire__Hello *hello,
                                      int pidfd,
                                      struct kvist_error *err)
{
    struct kvist_process *process = calloc(1, sizeof(*process));
    if (process == NULL) {
        (void)close(pidfd);
        return kvist_error_set(err, KVIST_NO_MEMORY, ENOMEM, "hello", "no memory for a process");
    }
    process->session = session;
    process->role = hello->role;
    process->rank = hello->rank;
    process->pid = connection->pid;
    process->pidfd = pidfd;
    process->ended = event_new(session->table->base, pidfd, EV_READ, on_ended, process);
    enum kvist_status status = KVIST_OK;
    if (process->ended == NULL || event_add(process->ended, NULL) != 0) {
        status = kvist_error_set(err, KVIST_NO_MEMORY, 0, "libevent", "cannot watch the process");
        goto free_process;
    }
    status = kvist_store_process_open(session->store,
                                      kvist_process_schedules(process),
                                      kvist_process_maps(process),
                                      process->rank,
                                      connection,
                                      &process->store,
                                      err);
    if (status != KVIST_OK) {
        goto free_process;
    }
    if (kvist_store_process_watch(process->store, (uint32_t)process->pid, pidfd) != KVIST_OK) {
        status = kvist_error_set(
            err, KVIST_BUSY, 0, "hello", "the service manager can keep no more processes");
        goto free_process;
    }
    process->next = session->processes;
    session->processes = process;
    process->connection = connection;
    connection->process = process;
    return KVIST_OK;

free_process:
    process_free(process);
    return status;
}

/* The same process in the same place: it reconnects. */
static bool take_back(struct kvist_session *session,
                      struct kvist_connection *connection,
                      const Kvist__Wire__Hello *hello,
                      int pidfd)
{
    for (struct kvist_process *at = session->processes; at != NULL; at = at->next) {
        if (at->role != hello->role || at->rank != hello->rank ||
            !same_process(at, connection->pid, pidfd)) {
            continue;
        }
        if (at->connection != NULL) {
            at->connection->process = NULL;
            kvist_connection_doom(at->connection);
        }
        at->connection = connection;
        connection->process = at;
        kvist_store_process_set_ctx(at->store, connection);
        kvist_log(KVIST_LOG_INFO,
                  "process connected again pid=%d name=\"%s\"",
                  (int)at->pid,
                  session->name);
        return true;
    }
    return false;
}

static bool is_refused(const struct kvist_connection *connection)
{
    return connection->server->config->daemon_privileged_peers != 0 &&
           kvist_peer_is_privileged(connection->uid, connection->pid);
}

void kvist_sessions_judge(const struct kvist_sessions *sessions)
{
    for (const struct kvist_session *session = sessions->first; session != NULL;
         session = session->next) {
        for (const struct kvist_process *at = session->processes; at != NULL; at = at->next) {
            if (at->connection != NULL && is_refused(at->connection)) {
                kvist_connection_turn_away(at->connection, 0, KVIST_DENIED, PRIVILEGED);
            }
        }
    }
}

enum kvist_status kvist_sessions_check_pool(const struct kvist_sessions *sessions,
                                            struct kvist_connection *connection,
                                            const struct kvist_store_pool *pool,
                                            bool read_only,
                                            struct kvist_error *err)
{
    if (connection->reads_only && !read_only) {
        return kvist_error_set(err,
                               KVIST_DENIED,
                               0,
                               "open_pool",
                               "tenant %s may only read (read-only in [tenants] of kvistd's "
                               "configuration): open the pool read-only",
                               connection->tenant);
    }
    if (is_refused(connection)) {
        return kvist_error_set(err, KVIST_DENIED, 0, "open_pool", "%s", PRIVILEGED);
    }
    bool open[KVIST_POOLS_MAX] = {false};
    bool own[KVIST_POOLS_MAX] = {false};
    for (const struct kvist_session *at = sessions->first; at != NULL; at = at->next) {
        kvist_store_session_pools(at->store, open);
        if (kvist_share_is_one(connection->tenant, connection->uid, at->tenant, at->uid)) {
            kvist_store_session_pools(at->store, own);
        }
    }
    uint32_t open_count = 0;
    uint32_t own_count = 0;
    for (uint32_t index = 0; index < KVIST_POOLS_MAX; index++) {
        open_count += open[index];
        own_count += own[index];
    }
    bool is_open = pool != NULL && open[kvist_store_pool_index(pool)];
    return is_open ? KVIST_OK
                   : kvist_share_check(
                         connection, "pools", own_count, open_count, KVIST_POOLS_MAX, err);
}

enum kvist_status kvist_sessions_join(struct kvist_sessions *sessions,
                                      struct kvist_connection *connection,
                                      const Kvist__Wire__Hello *hello,
                                      struct kvist_error *err)
{
    int pidfd = -1;
    enum kvist_status status = kvist_connection_pidfd(connection, &pidfd);
    if (status == KVIST_UNSUPPORTED) {
        return kvist_error_set(err,
                               KVIST_DENIED,
                               0,
                               "hello",
                               "kvistd cannot watch this process, which is in another PID "
                               "namespace: use Linux 6.5 or newer, or share the PID namespace");
    }
    if (status != KVIST_OK) {
        return kvist_error_set(err, status, 0, "hello", "the process has ended already");
    }
    struct kvist_session *session = find_session(sessions, hello->session_id.data);
    if (session != NULL) {
        reap(session);
        session = find_session(sessions, hello->session_id.data);
    }
    status = session != NULL ? check_session(session, connection, hello, err)
                             : open_session(sessions, connection, hello, &session, err);
    if (status != KVIST_OK) {
        (void)close(pidfd);
        return status;
    }
    KVIST_CHECK(session != NULL);
    if (take_back(session, connection, hello, pidfd)) {
        (void)close(pidfd);
        return KVIST_OK;
    }
    status = open_process(session, connection, hello, pidfd, err);
    if (session->processes == NULL) {
        session_free(session);
    }
    return status;
}
