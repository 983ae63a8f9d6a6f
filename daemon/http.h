/*
 * http - /metrics, /healthz and /readyz.
 *
 * Role        answers GET and HEAD of three pages on one socket, one request a connection. Not a
 *             web server: libevent's evhttp has no bound on connections, this has one on all.
 * Pages       /metrics  Prometheus text
 *             /healthz  200 "ok" or "degraded: why": kvistd serves. No answer: it does not.
 *             /readyz   200 "ready"; 503 while it starts or stops
 * Threads     loop
 * Limits      KVIST_HTTP_PEERS_MAX connections, beyond which the oldest makes place;
 *             KVIST_HTTP_REQUEST_BYTES_MAX, KVIST_HTTP_TIMEOUT_S
 * Errors      INVALID: an address that is none, or that other hosts can reach; EXISTS: in use
 * Source      RFC 9112
 */
#ifndef KVIST_DAEMON_HTTP_H
#define KVIST_DAEMON_HTTP_H

#include "daemon/counters.h"
#include "daemon/listener.h"

#include <event2/event.h>

#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>

#define KVIST_HTTP_KEY               "daemon.metrics_listen"
#define KVIST_HTTP_PEERS_MAX         32U
#define KVIST_HTTP_REQUEST_BYTES_MAX 8192U
#define KVIST_HTTP_TIMEOUT_S         5

struct kvist_http_address {
    enum { KVIST_HTTP_OFF, KVIST_HTTP_TCP, KVIST_HTTP_UNIX } kind;
    struct sockaddr_storage tcp;
    socklen_t tcp_bytes;
    const char *path; /* borrowed from the text */
};

/**
 * Parse daemon.metrics_listen.
 *
 * @param allow_remote  whether it may be an address that is not loopback
 */
KVIST_MUST_USE enum kvist_status kvist_http_address_parse(const char *text,
                                                          bool allow_remote,
                                                          struct kvist_http_address *address_out,
                                                          struct kvist_error *err);

/** Whether a TCP address is this machine's, and may be listened on; not whether somebody does. */
KVIST_MUST_USE enum kvist_status kvist_http_check(const struct kvist_http_address *address,
                                                  struct kvist_error *err);

struct kvist_http_pages {
    void (*metrics)(void *ctx, FILE *file);
    /* Write the text. */
    void (*health)(void *ctx, FILE *file);
    bool (*ready)(void *ctx);
    void *ctx;
};

struct kvist_http_peer;

struct kvist_http {
    struct event_base *base;
    struct kvist_counters *counters;
    struct kvist_http_pages pages;
    struct kvist_listener listener;
    struct event *acceptable;
    struct event *accept_again;
    struct kvist_http_peer *peers;
    uint32_t peer_count;
};

/** Listen and answer; nothing when the address says off. */
KVIST_MUST_USE enum kvist_status kvist_http_start(struct kvist_http *http,
                                                  struct event_base *base,
                                                  const struct kvist_http_address *address,
                                                  struct kvist_counters *counters,
                                                  const struct kvist_http_pages *pages,
                                                  struct kvist_error *err);

/** Close everything; fine on one that was never started (zeroed). */
void kvist_http_stop(struct kvist_http *http);

#endif
