/*
 * server - connections: accept, frames in and out, deadlines and bounds.
 *
 * Role        carries messages between peers and the dispatcher, whatever the peers do. Knows who a
 *             peer is, not what it means. A connection is not a process: see session.h.
 * Units       _us: monotonic
 * Ownership   the server owns its connections; others may keep a pointer until connection_gone
 * Threads     loop
 * Limits      KVIST_CONNECTIONS_MAX, of which a peer has its share (share.h); a connection's turn:
 *             KVIST_TURN_MESSAGES_MAX messages, KVIST_TURN_BYTES_MAX bytes, one request with a
 *             reply; what waits to be sent: KVIST_OUTPUT_BYTES_MAX, and above
 *             KVIST_OUTPUT_PAUSE_BYTES nothing more is read from that peer
 * States      GREETING -> OPEN [hello] -> CLOSING [a Failure is on its way out] -> gone
 * Errors      none come back: a connection that fails is logged, counted and closed
 * Source      unix(7) SO_PEERCRED, SO_PEERPIDFD (Linux 6.5), pidfd_open(2)
 */
#ifndef KVIST_DAEMON_SERVER_H
#define KVIST_DAEMON_SERVER_H

#include "daemon/config.h"
#include "daemon/counters.h"
#include "daemon/logging.h"
#include "proto/wire/message.h"

#include <event2/event.h>

#define KVIST_TURN_MESSAGES_MAX  64U
#define KVIST_TURN_BYTES_MAX     ((size_t)4 << 20)
#define KVIST_TURN_ACCEPTS_MAX   64U
#define KVIST_OUTPUT_PAUSE_BYTES ((size_t)1 << 20)
#define KVIST_PEER_GROUPS_MAX    64U

enum kvist_connection_state {
    KVIST_CONNECTION_GREETING,
    KVIST_CONNECTION_OPEN,
    KVIST_CONNECTION_CLOSING,
};

struct kvist_server;
struct kvist_process; /* session.h */
struct kvist_pending; /* admin.c */

struct kvist_connection {
    struct kvist_server *server;
    struct kvist_connection *next;
    struct kvist_connection **link; /* what points here */
    int fd;
    enum kvist_connection_state state;
    bool doomed;      /* to be closed as soon as the loop comes by */
    bool output_dead; /* the peer takes nothing any more; what it sent before is still read */
    bool input_ended;
    bool backlog; /* whole frames wait in the reader */
    bool yields;  /* set by a message that cost much: the others come first now */
    struct kvist_frame_reader *reader;
    struct kvist_frame_writer *writer;
    struct event *readable;
    struct event *writable;
    struct event *resume; /* a timer of 0: goes on in the next turn of the loop */
    uint64_t opened_us;
    uint64_t asked_us;   /* when its last message came */
    uint64_t stalled_us; /* since when the peer takes nothing; 0: it does */
    /* Who it is, as the kernel says. */
    uid_t uid;
    pid_t pid; /* 0: in a PID namespace that is not visible from here */
    char tenant[KVIST_TENANT_BYTES_MAX + 1];
    /* The dispatcher's. */
    bool by_socket;   /* its tenant is that of the socket that it came through */
    bool is_operator; /* root, or kvistd's own user, not through a tenant's socket */
    bool reads_only;  /* its tenant may not store */
    bool is_tool;
    struct kvist_process *process; /* NULL: none, or a tool */
    struct kvist_pending *pending; /* requests whose reply comes later */
    uint32_t pending_count;
};

struct kvist_server_handler {
    /* A checked message of a peer. */
    void (*message)(void *ctx,
                    struct kvist_connection *connection,
                    const Kvist__Wire__Envelope *envelope);
    /* A connection's turn has ended, in which it sent messages. */
    void (*turn_ended)(void *ctx);
    /* A peer of this tenant was refused something that it has its share of. */
    void (*refused)(void *ctx, const char *tenant);
    /* It is about to be freed: forget it. */
    void (*connection_gone)(void *ctx, struct kvist_connection *connection);
    void *ctx;
};

/* A socket that is listened on. */
struct kvist_server_socket {
    struct kvist_server *server;
    int listen_fd;      /* borrowed */
    const char *tenant; /* borrowed: of whoever comes through it; NULL: as [tenants] says */
    struct event *acceptable;
};

#define KVIST_SERVER_SOCKETS_MAX (1 + KVIST_CONFIG_SOCKETS_MAX)

struct kvist_server {
    struct event_base *base;
    const struct kvist_config *config; /* borrowed; changes by reload */
    struct kvist_counters *counters;   /* borrowed */
    struct kvist_server_handler handler;
    struct kvist_log_limit log_limit;
    int spare_fd; /* given up for a moment when fds run out */
    struct kvist_server_socket sockets[KVIST_SERVER_SOCKETS_MAX];
    size_t socket_count;
    struct event *accept_again;
    struct kvist_connection *connections;
    uint32_t connection_count;
};

/**
 * Add a socket to listen on, before the start.
 *
 * @param listen_fd  borrowed
 * @param tenant     borrowed: of whoever comes through it; NULL: as [tenants] says
 */
void kvist_server_add_socket(struct kvist_server *server, int listen_fd, const char *tenant);

/** Start accepting. */
KVIST_MUST_USE enum kvist_status kvist_server_start(struct kvist_server *server,
                                                    struct event_base *base,
                                                    const struct kvist_config *config,
                                                    struct kvist_counters *counters,
                                                    const struct kvist_server_handler *handler,
                                                    struct kvist_error *err);

/** Accept no more. */
void kvist_server_stop_accepting(struct kvist_server *server);

/** Close everything; fine on a server that was never started (zeroed). */
void kvist_server_stop(struct kvist_server *server);

/** Deadlines; every few tens of milliseconds. */
void kvist_server_tick(struct kvist_server *server, uint64_t now_us);

/** Queue a message. A peer that cannot take it loses its connection, in a later turn. */
void kvist_connection_send(struct kvist_connection *connection,
                           const Kvist__Wire__Envelope *envelope,
                           const int *fds,
                           size_t fd_count);

/** Queue a Failure. @param id  of the request; 0: about the connection */
void kvist_connection_send_failure(struct kvist_connection *connection,
                                   uint64_t id,
                                   enum kvist_status status,
                                   const char *text);

/** A request failed: Failure; what only a faulty peer asks for (INVALID, PROTOCOL, VERSION) ends its
    connection as well. */
void kvist_connection_fail(struct kvist_connection *connection,
                           uint64_t id,
                           enum kvist_status status,
                           const char *text);

/** Whether it may know of what is this tenant's. */
bool kvist_connection_may_see(const struct kvist_connection *connection, const char *tenant);

/** Queue a Failure, and end the connection when it has been sent. */
void kvist_connection_turn_away(struct kvist_connection *connection,
                                uint64_t id,
                                enum kvist_status status,
                                const char *text);

/** The peer broke the rules: Failure, then the end of its connection. Logged and counted. */
void kvist_connection_refuse(struct kvist_connection *connection,
                             uint64_t id,
                             enum kvist_status status,
                             const char *text);

/** Whether a line about this peer may be logged; what is withheld is counted. */
bool kvist_connection_may_log(struct kvist_connection *connection);

/** Close in a later turn, silently. */
void kvist_connection_doom(struct kvist_connection *connection);

/** The peer has ended: take what it had sent, within bounds. It stays open until doomed. */
void kvist_connection_drain(struct kvist_connection *connection);

/**
 * A pidfd of the peer.
 *
 * @param fd_out  owned by the caller
 * @return OK; UNSUPPORTED: it cannot be watched from here; CLOSED: it has ended
 */
KVIST_MUST_USE enum kvist_status kvist_connection_pidfd(const struct kvist_connection *connection,
                                                        int *fd_out);

#endif
