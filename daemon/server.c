#include "daemon/server.h"

#include "daemon/share.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/fault.h"
#include "proto/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

#define GREETING_EVICT_US  1000000ULL /* when all places are taken, who has not greeted for this */
#define ACCEPT_PAUSE_US    100000     /* when the system is out of fds or memory */
#define DRAIN_BYTES_MAX    ((size_t)16 << 20)
#define CLOSING_TIMEOUT_US 2000000ULL /* for the last Failure to be taken */

static const struct timeval at_once = {0, 0};

/* --- Output ---------------------------------------------------------------------------------- */

bool kvist_connection_may_log(struct kvist_connection *connection)
{
    return kvist_log_limit_take(
        &connection->server->log_limit, connection->uid, kvist_clock_now_us());
}

void kvist_connection_doom(struct kvist_connection *connection)
{
    connection->doomed = true;
    (void)event_add(connection->resume, &at_once);
}

static size_t pending_bytes(const struct kvist_connection *connection)
{
    return kvist_frame_writer_pending_bytes(connection->writer);
}

/* Nothing more is asked of a peer that does not take the answers. */
static bool output_is_full(const struct kvist_connection *connection)
{
    return !connection->output_dead && pending_bytes(connection) >= KVIST_OUTPUT_PAUSE_BYTES;
}

/* The peer takes nothing any more. What it sent before still counts, then it goes. */
static void output_ended(struct kvist_connection *connection)
{
    connection->output_dead = true;
    (void)event_del(connection->writable);
    if (connection->state == KVIST_CONNECTION_CLOSING) {
        kvist_connection_doom(connection);
    } else {
        (void)event_add(connection->resume, &at_once);
    }
}

void kvist_connection_send(struct kvist_connection *connection,
                           const Kvist__Wire__Envelope *envelope,
                           const int *fds,
                           size_t fd_count)
{
    if (connection->output_dead || connection->doomed ||
        connection->state == KVIST_CONNECTION_CLOSING) {
        return;
    }
    struct kvist_error err = KVIST_ERROR_INIT;
    enum kvist_status status = kvist_message_put(connection->writer, envelope, fds, fd_count, &err);
    if (status != KVIST_OK) {
        connection->server->counters->peers_dropped_total += status == KVIST_BUSY;
        if (kvist_connection_may_log(connection)) {
            kvist_log(KVIST_LOG_WARN,
                      "cannot send message=%s pid=%d uid=%u status=%s error=\"%s\" action=closed",
                      kvist_message_name(envelope),
                      (int)connection->pid,
                      (unsigned)connection->uid,
                      kvist_status_name(status),
                      err.text);
        }
        kvist_connection_doom(connection);
        return;
    }
    if (connection->stalled_us == 0) {
        connection->stalled_us = kvist_clock_now_us();
    }
    (void)event_add(connection->writable, NULL);
}

/* An engine that is denied lives on with misses: only the log and a figure show why. */
static void note_denial(struct kvist_connection *connection, const char *reason)
{
    connection->server->counters->denials_total++;
    if (kvist_connection_may_log(connection)) {
        kvist_log(KVIST_LOG_WARN,
                  "denied tenant=%s uid=%u pid=%d reason=\"%s\" action=refused",
                  connection->tenant,
                  (unsigned)connection->uid,
                  (int)connection->pid,
                  reason);
    }
}

void kvist_connection_send_failure(struct kvist_connection *connection,
                                   uint64_t id,
                                   enum kvist_status status,
                                   const char *text)
{
    char sentence[KVIST_ERROR_TEXT_BYTES];
    (void)snprintf(
        sentence, sizeof(sentence), "%s", text[0] != '\0' ? text : kvist_status_text(status));
    Kvist__Wire__Failure failure;
    kvist__wire__failure__init(&failure);
    failure.status = (uint32_t)status;
    failure.text = sentence;
    Kvist__Wire__Envelope envelope = KVIST__WIRE__ENVELOPE__INIT;
    envelope.id = id;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_FAILURE;
    envelope.failure = &failure;
    connection->server->counters->failures_total++;
    if (status == KVIST_DENIED) {
        note_denial(connection, sentence);
    }
    kvist_connection_send(connection, &envelope, NULL, 0);
}

void kvist_connection_turn_away(struct kvist_connection *connection,
                                uint64_t id,
                                enum kvist_status status,
                                const char *text)
{
    kvist_connection_send_failure(connection, id, status, text);
    connection->state = KVIST_CONNECTION_CLOSING;
    connection->stalled_us = kvist_clock_now_us();
    (void)event_del(connection->readable);
    if (connection->output_dead) {
        kvist_connection_doom(connection);
    }
}

void kvist_connection_refuse(struct kvist_connection *connection,
                             uint64_t id,
                             enum kvist_status status,
                             const char *text)
{
    if (connection->state == KVIST_CONNECTION_CLOSING || connection->doomed) {
        return;
    }
    connection->server->counters->protocol_errors_total++;
    if (kvist_connection_may_log(connection)) {
        kvist_log(KVIST_LOG_WARN,
                  "peer refused pid=%d uid=%u status=%s reason=\"%s\" action=closed",
                  (int)connection->pid,
                  (unsigned)connection->uid,
                  kvist_status_name(status),
                  text);
    }
    kvist_connection_turn_away(connection, id, status, text);
}

void kvist_connection_fail(struct kvist_connection *connection,
                           uint64_t id,
                           enum kvist_status status,
                           const char *text)
{
    if (status == KVIST_INVALID || status == KVIST_PROTOCOL || status == KVIST_VERSION) {
        kvist_connection_refuse(connection, id, status, text);
    } else {
        kvist_connection_send_failure(connection, id, status, text);
    }
}

bool kvist_connection_may_see(const struct kvist_connection *connection, const char *tenant)
{
    return connection->is_operator || strcmp(connection->tenant, tenant) == 0;
}

static void on_writable(evutil_socket_t fd, short what, void *ctx)
{
    (void)what;
    struct kvist_connection *connection = ctx;
    size_t before = pending_bytes(connection);
    if (kvist_frame_writer_flush(connection->writer, fd, NULL) != KVIST_OK) {
        output_ended(connection);
        return;
    }
    size_t after = pending_bytes(connection);
    bool closing = connection->state == KVIST_CONNECTION_CLOSING;
    if (after == 0) {
        (void)event_del(connection->writable);
        connection->stalled_us = closing ? connection->stalled_us : 0;
        if (closing) {
            kvist_connection_doom(connection);
        }
    } else if (!closing && after < before) {
        connection->stalled_us = kvist_clock_now_us();
    }
    if (after < KVIST_OUTPUT_PAUSE_BYTES / 2 && before >= KVIST_OUTPUT_PAUSE_BYTES / 2) {
        (void)event_add(connection->resume, &at_once);
    }
}

/* --- Input ----------------------------------------------------------------------------------- */

static void handle_frame(struct kvist_connection *connection, const struct kvist_frame *frame)
{
    struct kvist_server *server = connection->server;
    server->counters->messages_total++;
    server->counters->message_bytes_total += frame->length;
    connection->asked_us = kvist_clock_now_us();
    struct kvist_error err = KVIST_ERROR_INIT;
    Kvist__Wire__Envelope *envelope = NULL;
    enum kvist_status status =
        kvist_message_unpack(frame->bytes, frame->length, true, &envelope, &err);
    if (status != KVIST_OK) {
        kvist_connection_refuse(connection, 0, status, err.text);
        return;
    }
    server->handler.message(server->handler.ctx, connection, envelope);
    kvist_message_free(&envelope);
}

static bool takes_input(const struct kvist_connection *connection)
{
    return !connection->doomed && connection->state != KVIST_CONNECTION_CLOSING;
}

/* Handle frames that are in the reader. @return bytes handled */
static size_t
handle_frames(struct kvist_connection *connection, uint32_t message_max, size_t bytes_max)
{
    size_t bytes = 0;
    connection->backlog = true;
    connection->yields = false;
    for (uint32_t count = 0; count < message_max && bytes < bytes_max && !connection->yields;
         count++) {
        if (!takes_input(connection) || output_is_full(connection)) {
            return bytes;
        }
        struct kvist_frame frame;
        struct kvist_error err = KVIST_ERROR_INIT;
        enum kvist_status status = kvist_frame_reader_next(connection->reader, &frame, &err);
        if (status == KVIST_NOT_FOUND) {
            connection->backlog = false;
            return bytes;
        }
        if (status != KVIST_OK) {
            kvist_connection_refuse(connection, 0, status, err.text);
            return bytes;
        }
        bytes += frame.length;
        handle_frame(connection, &frame);
    }
    return bytes;
}

/* One recvmsg. */
static void fill(struct kvist_connection *connection, bool *more_out)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    *more_out = false;
    enum kvist_status status =
        kvist_frame_reader_fill(connection->reader, connection->fd, more_out, &err);
    if (status == KVIST_PROTOCOL) {
        kvist_connection_refuse(connection, 0, status, err.text);
    } else if (status != KVIST_OK) {
        connection->input_ended = true;
    }
}

/* A turn of a connection: bounded, so that no peer keeps the loop from the others. */
static void take_turn(struct kvist_connection *connection)
{
    size_t bytes = handle_frames(connection, KVIST_TURN_MESSAGES_MAX, KVIST_TURN_BYTES_MAX);
    if (bytes > 0) {
        connection->server->handler.turn_ended(connection->server->handler.ctx);
    }
    if (!takes_input(connection)) {
        return;
    }
    if (connection->backlog) {
        /* Read nothing on top; go on once the others had their turn, or the peer has read. */
        (void)event_del(connection->readable);
        if (!output_is_full(connection)) {
            (void)event_add(connection->resume, &at_once);
        }
    } else if (connection->input_ended) {
        kvist_connection_doom(connection);
    } else {
        (void)event_add(connection->readable, NULL);
    }
}

static void on_readable(evutil_socket_t fd, short what, void *ctx)
{
    (void)fd;
    (void)what;
    struct kvist_connection *connection = ctx;
    if (!takes_input(connection)) {
        return;
    }
    bool more = false;
    fill(connection, &more);
    take_turn(connection);
}

void kvist_connection_drain(struct kvist_connection *connection)
{
    size_t bytes = 0;
    bool more = true;
    connection->output_dead = true;
    while (takes_input(connection) && bytes < DRAIN_BYTES_MAX) {
        size_t handled = handle_frames(connection, UINT32_MAX, DRAIN_BYTES_MAX - bytes);
        bytes += handled;
        if (connection->backlog && handled > 0) {
            continue;
        }
        if (connection->backlog || connection->input_ended || !more) {
            return;
        }
        fill(connection, &more);
    }
}

/* --- Life ------------------------------------------------------------------------------------ */

static void connection_free(struct kvist_connection *connection)
{
    struct event *events[] = {connection->readable, connection->writable, connection->resume};
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(events); index++) {
        if (events[index] != NULL) {
            event_free(events[index]);
        }
    }
    kvist_frame_reader_destroy(&connection->reader);
    kvist_frame_writer_destroy(&connection->writer);
    (void)close(connection->fd);
    free(connection);
}

static void connection_close(struct kvist_connection *connection)
{
    struct kvist_server *server = connection->server;
    server->handler.connection_gone(server->handler.ctx, connection);
    *connection->link = connection->next;
    if (connection->next != NULL) {
        connection->next->link = connection->link;
    }
    server->connection_count--;
    connection_free(connection);
}

static void on_resume(evutil_socket_t fd, short what, void *ctx)
{
    (void)fd;
    (void)what;
    struct kvist_connection *connection = ctx;
    if (connection->doomed) {
        connection_close(connection);
    } else if (takes_input(connection)) {
        take_turn(connection);
    }
}

static void identify(struct kvist_connection *connection, const char *tenant)
{
    struct ucred peer = {.uid = (uid_t)-1, .gid = (gid_t)-1};
    socklen_t length = sizeof(peer);
    if (getsockopt(connection->fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
        peer.pid = 0;
    }
    gid_t groups[KVIST_PEER_GROUPS_MAX + 1];
    socklen_t group_bytes = KVIST_PEER_GROUPS_MAX * sizeof(gid_t);
    if (getsockopt(connection->fd, SOL_SOCKET, SO_PEERGROUPS, groups, &group_bytes) != 0) {
        group_bytes = 0;
    }
    size_t group_count = group_bytes / sizeof(gid_t);
    groups[group_count++] = peer.gid;
    connection->uid = peer.uid;
    connection->pid = peer.pid > 0 ? peer.pid : 0;
    connection->by_socket = tenant != NULL;
    connection->is_operator = tenant == NULL && (peer.uid == 0 || peer.uid == geteuid());
    const struct kvist_config *config = connection->server->config;
    if (tenant == NULL) {
        tenant = kvist_config_tenant(config, peer.uid, groups, group_count);
    }
    (void)snprintf(connection->tenant, sizeof(connection->tenant), "%s", tenant);
    const struct kvist_tenant_limits *limits = kvist_config_limits(config, tenant);
    connection->reads_only = limits != NULL && limits->read_only;
}

/* A peer that was identified. Frees it when it fails. */
static void connection_open(struct kvist_connection *connection)
{
    struct kvist_server *server = connection->server;
    connection->readable =
        event_new(server->base, connection->fd, EV_READ | EV_PERSIST, on_readable, connection);
    connection->writable =
        event_new(server->base, connection->fd, EV_WRITE | EV_PERSIST, on_writable, connection);
    connection->resume = evtimer_new(server->base, on_resume, connection);
    if (connection->readable == NULL || connection->writable == NULL ||
        connection->resume == NULL ||
        kvist_frame_reader_create(0, &connection->reader) != KVIST_OK ||
        kvist_frame_writer_create(&connection->writer) != KVIST_OK ||
        event_add(connection->readable, NULL) != 0) {
        server->counters->accept_errors_total++;
        connection_free(connection);
        return;
    }
    connection->next = server->connections;
    connection->link = &server->connections;
    if (connection->next != NULL) {
        connection->next->link = &connection->next;
    }
    server->connections = connection;
    server->connection_count++;
}

enum kvist_status kvist_connection_pidfd(const struct kvist_connection *connection, int *fd_out)
{
    int fd = -1;
    socklen_t length = sizeof(fd);
    bool by_socket = !kvist_fault_point("peer.pidfd") &&
                     getsockopt(connection->fd, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0;
    if (!by_socket && connection->pid > 0 && !kvist_fault_point("peer.pidfd")) {
        fd = (int)syscall(SYS_pidfd_open, connection->pid, 0);
        struct pollfd hung = {.fd = connection->fd, .events = 0};
        /* The pid is the peer's only as long as somebody holds the socket's other end. */
        if (fd >= 0 && (poll(&hung, 1, 0) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)) {
            (void)close(fd);
            return KVIST_CLOSED;
        }
        if (fd < 0 && errno == ESRCH) {
            return KVIST_CLOSED;
        }
    }
    if (fd < 0) {
        return KVIST_UNSUPPORTED;
    }
    *fd_out = fd;
    return KVIST_OK;
}

/* --- Accept ---------------------------------------------------------------------------------- */

/* Tell a peer that there is no room, without giving it one. */
static void reject(struct kvist_server *server, int fd, const char *text)
{
    server->counters->connections_rejected_total++;
    struct kvist_frame_writer *writer = NULL;
    if (kvist_frame_writer_create(&writer) == KVIST_OK) {
        char sentence[KVIST_ERROR_TEXT_BYTES];
        (void)snprintf(sentence, sizeof(sentence), "%s", text);
        Kvist__Wire__Failure failure;
        kvist__wire__failure__init(&failure);
        failure.status = KVIST_BUSY;
        failure.text = sentence;
        Kvist__Wire__Envelope envelope = KVIST__WIRE__ENVELOPE__INIT;
        envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_FAILURE;
        envelope.failure = &failure;
        if (kvist_message_put(writer, &envelope, NULL, 0, NULL) == KVIST_OK &&
            kvist_frame_writer_flush(writer, fd, NULL) != KVIST_OK) {
            server->counters->accept_errors_total++;
        }
        kvist_frame_writer_destroy(&writer);
    }
}

static bool is_own(const struct kvist_connection *connection, const struct kvist_connection *other)
{
    return kvist_share_is_one(connection->tenant, connection->uid, other->tenant, other->uid);
}

/* The longest silent stranger goes, if it had time enough to greet. @param of  whose; NULL: any */
static bool make_place(struct kvist_server *server, const struct kvist_connection *of)
{
    struct kvist_connection *oldest = NULL;
    for (struct kvist_connection *at = server->connections; at != NULL; at = at->next) {
        if (at->state != KVIST_CONNECTION_OPEN && (of == NULL || is_own(of, at)) &&
            (oldest == NULL || at->opened_us < oldest->opened_us)) {
            oldest = at;
        }
    }
    if (oldest == NULL || kvist_clock_now_us() - oldest->opened_us < GREETING_EVICT_US) {
        return false;
    }
    server->counters->hello_timeouts_total++;
    connection_close(oldest);
    return true;
}

static enum kvist_status find_place(struct kvist_connection *connection, struct kvist_error *err)
{
    struct kvist_server *server = connection->server;
    uint32_t own = 0;
    for (const struct kvist_connection *at = server->connections; at != NULL; at = at->next) {
        own += is_own(connection, at);
    }
    bool is_operator = connection->is_operator;
    if (!kvist_share_fits(is_operator, own, server->connection_count, KVIST_CONNECTIONS_MAX) &&
        make_place(server, is_operator || own == 0 ? NULL : connection)) {
        own -= !is_operator && own > 0;
    }
    return kvist_share_check(
        connection, "connections", own, server->connection_count, KVIST_CONNECTIONS_MAX, err);
}

static void accept_peer(const struct kvist_server_socket *from, int fd)
{
    struct kvist_server *server = from->server;
    struct kvist_connection *connection = calloc(1, sizeof(*connection));
    if (connection == NULL) {
        server->counters->accept_errors_total++;
        (void)close(fd);
        return;
    }
    struct kvist_error err = KVIST_ERROR_INIT;
    connection->server = server;
    connection->fd = fd;
    connection->opened_us = kvist_clock_now_us();
    connection->asked_us = connection->opened_us;
    identify(connection, from->tenant);
    if (find_place(connection, &err) == KVIST_OK) {
        connection_open(connection);
    } else {
        reject(server, fd, err.text);
        connection_free(connection);
    }
}

/* Out of fds: with the spare one the next peer is let in and out, so that it need not wait. */
static void accept_failed(const struct kvist_server_socket *from, int error_number)
{
    struct kvist_server *server = from->server;
    server->counters->accept_errors_total++;
    if (error_number == EMFILE && server->spare_fd >= 0) {
        (void)close(server->spare_fd);
        int fd = accept4(from->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            reject(server, fd, "kvistd is out of file descriptors: try again later");
            (void)close(fd);
        }
        server->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
    if (kvist_log_limit_take(&server->log_limit, 0, kvist_clock_now_us())) {
        kvist_log(KVIST_LOG_WARN,
                  "cannot accept errno=%d error=\"%s\" action=retried",
                  error_number,
                  strerrordesc_np(error_number));
    }
    const struct timeval pause = {0, ACCEPT_PAUSE_US};
    for (size_t index = 0; index < server->socket_count; index++) {
        (void)event_del(server->sockets[index].acceptable);
    }
    (void)event_add(server->accept_again, &pause);
}

static bool accept_error_is_transient(int error_number)
{
    return error_number == EINTR || error_number == ECONNABORTED || error_number == EPROTO;
}

static void on_acceptable(evutil_socket_t fd, short what, void *ctx)
{
    (void)what;
    const struct kvist_server_socket *from = ctx;
    for (uint32_t count = 0; count < KVIST_TURN_ACCEPTS_MAX; count++) {
        int peer = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (peer < 0) {
            if (errno != EAGAIN && !accept_error_is_transient(errno)) {
                accept_failed(from, errno);
            }
            return;
        }
        from->server->counters->connections_total++;
        accept_peer(from, peer);
    }
}

static void on_accept_again(evutil_socket_t fd, short what, void *ctx)
{
    (void)fd;
    (void)what;
    struct kvist_server *server = ctx;
    for (size_t index = 0; index < server->socket_count; index++) {
        (void)event_add(server->sockets[index].acceptable, NULL);
    }
}

/* A tool that waits for nothing; an engine may be silent for as long as it likes. */
static bool is_idle(const struct kvist_connection *connection)
{
    return connection->state == KVIST_CONNECTION_OPEN && connection->is_tool &&
           connection->pending == NULL && connection->stalled_us == 0 && !connection->doomed;
}

void kvist_server_tick(struct kvist_server *server, uint64_t now_us)
{
    uint64_t hello_us = server->config->daemon_hello_timeout_ms * 1000;
    uint64_t send_us = server->config->daemon_send_timeout_ms * 1000;
    uint64_t idle_us = server->config->daemon_idle_timeout_ms * 1000;
    kvist_log_limit_sum_up(&server->log_limit, now_us);
    struct kvist_connection *next = NULL;
    for (struct kvist_connection *at = server->connections; at != NULL; at = next) {
        next = at->next;
        uint64_t limit_us = at->state == KVIST_CONNECTION_CLOSING ? CLOSING_TIMEOUT_US : send_us;
        if (at->state == KVIST_CONNECTION_GREETING && now_us - at->opened_us > hello_us) {
            server->counters->hello_timeouts_total++;
            kvist_connection_refuse(
                at, 0, KVIST_TIMED_OUT, "no hello came in time (daemon.hello_timeout_ms)");
        } else if (is_idle(at) && now_us > at->asked_us + idle_us) {
            server->counters->idle_timeouts_total++;
            kvist_connection_turn_away(
                at, 0, KVIST_TIMED_OUT, "nothing was asked (daemon.idle_timeout_ms)");
        } else if (at->stalled_us != 0 && now_us > at->stalled_us + limit_us && !at->doomed) {
            server->counters->peers_dropped_total++;
            if (kvist_connection_may_log(at)) {
                kvist_log(KVIST_LOG_WARN,
                          "peer does not read pid=%d uid=%u waiting_bytes=%zu action=closed",
                          (int)at->pid,
                          (unsigned)at->uid,
                          pending_bytes(at));
            }
            kvist_connection_doom(at);
        }
    }
}

void kvist_server_add_socket(struct kvist_server *server, int listen_fd, const char *tenant)
{
    KVIST_CHECK(server->base == NULL && server->socket_count < KVIST_SERVER_SOCKETS_MAX);
    server->sockets[server->socket_count++] =
        (struct kvist_server_socket){.server = server, .listen_fd = listen_fd, .tenant = tenant};
}

enum kvist_status kvist_server_start(struct kvist_server *server,
                                     struct event_base *base,
                                     const struct kvist_config *config,
                                     struct kvist_counters *counters,
                                     const struct kvist_server_handler *handler,
                                     struct kvist_error *err)
{
    server->base = base;
    server->config = config;
    server->counters = counters;
    server->handler = *handler;
    server->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    server->accept_again = evtimer_new(base, on_accept_again, server);
    bool good = server->accept_again != NULL;
    for (size_t index = 0; index < server->socket_count && good; index++) {
        struct kvist_server_socket *from = &server->sockets[index];
        from->acceptable =
            event_new(base, from->listen_fd, EV_READ | EV_PERSIST, on_acceptable, from);
        good = from->acceptable != NULL && event_add(from->acceptable, NULL) == 0;
    }
    if (!good) {
        kvist_server_stop(server);
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "libevent", "cannot watch the socket");
    }
    return KVIST_OK;
}

void kvist_server_stop_accepting(struct kvist_server *server)
{
    for (size_t index = 0; index < server->socket_count; index++) {
        if (server->sockets[index].acceptable != NULL) {
            event_free(server->sockets[index].acceptable);
            server->sockets[index].acceptable = NULL;
        }
    }
    if (server->accept_again != NULL) {
        event_free(server->accept_again);
        server->accept_again = NULL;
    }
}

void kvist_server_stop(struct kvist_server *server)
{
    if (server->base == NULL) {
        return;
    }
    kvist_server_stop_accepting(server);
    struct kvist_connection *next = NULL;
    for (struct kvist_connection *at = server->connections; at != NULL; at = next) {
        next = at->next;
        connection_close(at);
    }
    if (server->spare_fd >= 0) {
        (void)close(server->spare_fd);
    }
    server->base = NULL;
}
