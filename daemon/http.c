#include "daemon/http.h"

#include "proto/base/log.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BACKLOG 128
/* Half of the places: a newcomer keeps its own until what it has sent was read. */
#define TURN_ACCEPTS_MAX (KVIST_HTTP_PEERS_MAX / 2)
#define HOST_BYTES_MAX   64
#define ACCEPT_PAUSE_US  100000
#define KEY              KVIST_HTTP_KEY

struct kvist_http_peer {
    struct kvist_http *http;
    struct kvist_http_peer *next;
    struct kvist_http_peer **link;
    struct bufferevent *stream;
    bool answered;
};

/* --- Address --------------------------------------------------------------------------------- */

static bool is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET) {
        struct sockaddr_in v4;
        memcpy(&v4, address, sizeof(v4));
        return ntohl(v4.sin_addr.s_addr) >> 24 == 127;
    }
    struct sockaddr_in6 v6;
    memcpy(&v6, address, sizeof(v6));
    return IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
}

/* HOST:PORT or [HOST]:PORT, host without its brackets. */
static bool split_host(const char *text, char host_out[HOST_BYTES_MAX], const char **port_out)
{
    const char *colon = strrchr(text, ':');
    if (colon == NULL || colon == text || colon[1] == '\0') {
        return false;
    }
    size_t length = (size_t)(colon - text);
    if (text[0] == '[' && text[length - 1] == ']') {
        text++;
        length -= 2;
    } else if (memchr(text, ':', length) != NULL) {
        return false;
    }
    size_t digits = strspn(colon + 1, "0123456789");
    if (length == 0 || length >= HOST_BYTES_MAX || colon[1 + digits] != '\0' || digits > 5 ||
        strtoul(colon + 1, NULL, 10) > UINT16_MAX) {
        return false;
    }
    (void)snprintf(host_out, HOST_BYTES_MAX, "%.*s", (int)length, text);
    *port_out = colon + 1;
    return true;
}

enum kvist_status kvist_http_address_parse(const char *text,
                                           bool allow_remote,
                                           struct kvist_http_address *address_out,
                                           struct kvist_error *err)
{
    struct kvist_http_address address = {.kind = KVIST_HTTP_OFF};
    if (strcmp(text, "off") == 0) {
        *address_out = address;
        return KVIST_OK;
    }
    if (strncmp(text, "unix:/", 6) == 0) {
        address.kind = KVIST_HTTP_UNIX;
        address.path = text + 5;
        *address_out = address;
        return KVIST_OK;
    }
    char host[HOST_BYTES_MAX];
    const char *port = NULL;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    if (split_host(text, host, &port)) {
        bool local = strcmp(host, "localhost") == 0; /* needs no resolver */
        hints.ai_flags |= AI_NUMERICHOST;
        if (getaddrinfo(local ? "127.0.0.1" : host, port, &hints, &found) != 0) {
            found = NULL;
        }
    }
    if (found == NULL) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "config",
                               KEY " = %s cannot be; allowed: ADDRESS:PORT with a numeric address, "
                                   "[IPV6]:PORT, unix:/PATH, off",
                               text);
    }
    address.kind = KVIST_HTTP_TCP;
    address.tcp_bytes = found->ai_addrlen;
    memcpy(&address.tcp, found->ai_addr, found->ai_addrlen);
    bool reachable = !is_loopback(found->ai_addr);
    freeaddrinfo(found);
    if (reachable && !allow_remote) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "config",
                               KEY " = %s can be reached by other hosts: use 127.0.0.1, or set "
                                   "daemon.metrics_allow_remote = yes",
                               text);
    }
    *address_out = address;
    return KVIST_OK;
}

/* --- Answers --------------------------------------------------------------------------------- */

static void peer_free(struct kvist_http_peer *peer)
{
    *peer->link = peer->next;
    if (peer->next != NULL) {
        peer->next->link = peer->link;
    }
    peer->http->peer_count--;
    bufferevent_free(peer->stream);
    free(peer);
}

static void
respond(struct kvist_http_peer *peer, const char *status, const char *body, size_t bytes, bool head)
{
    struct evbuffer *output = bufferevent_get_output(peer->stream);
    peer->answered = true;
    (void)bufferevent_disable(peer->stream, EV_READ);
    if (evbuffer_add_printf(output,
                            "HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4; "
                            "charset=utf-8\r\nContent-Length: %zu\r\nCache-Control: no-store\r\n"
                            "Connection: close\r\n\r\n",
                            status,
                            bytes) < 0 ||
        (!head && evbuffer_add(output, body, bytes) != 0)) {
        peer_free(peer);
    }
}

static void respond_text(struct kvist_http_peer *peer, const char *status, const char *text)
{
    peer->http->counters->http_rejected_total++;
    respond(peer, status, text, strlen(text), false);
}

static void respond_page(struct kvist_http_peer *peer, const char *page, bool head)
{
    const struct kvist_http_pages *pages = &peer->http->pages;
    char *body = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&body, &bytes);
    if (file == NULL) {
        respond_text(peer, "503 Service Unavailable", "out of memory\n");
        return;
    }
    const char *status = "200 OK";
    if (strcmp(page, "/metrics") == 0) {
        pages->metrics(pages->ctx, file);
    } else if (strcmp(page, "/healthz") == 0) {
        pages->health(pages->ctx, file);
        (void)fputc('\n', file);
    } else if (strcmp(page, "/readyz") == 0) {
        bool ready = pages->ready(pages->ctx);
        (void)fputs(ready ? "ready\n" : "not ready\n", file);
        status = ready ? status : "503 Service Unavailable";
    } else {
        (void)fputs("no such page; there are /metrics, /healthz, /readyz\n", file);
        status = "404 Not Found";
    }
    if (fclose(file) != 0) {
        free(body);
        respond_text(peer, "503 Service Unavailable", "out of memory\n");
        return;
    }
    respond(peer, status, body, bytes, head);
    free(body);
}

static void on_request(struct bufferevent *stream, void *ctx)
{
    struct kvist_http_peer *peer = ctx;
    struct evbuffer *input = bufferevent_get_input(stream);
    char request[KVIST_HTTP_REQUEST_BYTES_MAX + 1];
    ssize_t bytes = evbuffer_copyout(input, request, KVIST_HTTP_REQUEST_BYTES_MAX);
    if (peer->answered || bytes <= 0) {
        return;
    }
    request[bytes] = '\0';
    if (strstr(request, "\r\n\r\n") == NULL && strstr(request, "\n\n") == NULL) {
        if (bytes == KVIST_HTTP_REQUEST_BYTES_MAX) {
            respond_text(peer, "431 Request Header Fields Too Large", "request too large\n");
        }
        return;
    }
    peer->http->counters->http_requests_total++;
    (void)evbuffer_drain(input, evbuffer_get_length(input));
    bool head = strncmp(request, "HEAD ", 5) == 0;
    char *page = request + (head ? 5 : 4);
    if (!head && strncmp(request, "GET ", 4) != 0) {
        respond_text(peer, "405 Method Not Allowed", "GET and HEAD are answered\n");
        return;
    }
    page[strcspn(page, " ?\r\n")] = '\0';
    respond_page(peer, page, head);
}

/* All of an answer has been written. */
static void on_written(struct bufferevent *stream, void *ctx)
{
    (void)stream;
    struct kvist_http_peer *peer = ctx;
    if (peer->answered) {
        peer_free(peer);
    }
}

static void on_event(struct bufferevent *stream, short what, void *ctx)
{
    (void)stream;
    (void)what;
    peer_free(ctx);
}

/* --- Accept ---------------------------------------------------------------------------------- */

static void peer_create(struct kvist_http *http, int fd)
{
    const struct timeval timeout = {KVIST_HTTP_TIMEOUT_S, 0};
    struct kvist_http_peer *peer = calloc(1, sizeof(*peer));
    struct bufferevent *stream =
        peer != NULL ? bufferevent_socket_new(http->base, fd, BEV_OPT_CLOSE_ON_FREE) : NULL;
    if (stream == NULL) {
        free(peer);
        (void)close(fd);
        return;
    }
    peer->http = http;
    peer->stream = stream;
    peer->next = http->peers;
    peer->link = &http->peers;
    if (peer->next != NULL) {
        peer->next->link = &peer->next;
    }
    http->peers = peer;
    http->peer_count++;
    bufferevent_setcb(stream, on_request, on_written, on_event, peer);
    bufferevent_setwatermark(stream, EV_READ, 0, KVIST_HTTP_REQUEST_BYTES_MAX);
    bufferevent_set_timeouts(stream, &timeout, &timeout);
    if (bufferevent_enable(stream, EV_READ | EV_WRITE) != 0) {
        peer_free(peer);
    }
}

/* Who has had its place longest: half a request, or an answer that it does not take. */
static struct kvist_http_peer *find_oldest(const struct kvist_http *http)
{
    struct kvist_http_peer *oldest = http->peers;
    while (oldest->next != NULL) {
        oldest = oldest->next;
    }
    return oldest;
}

static void on_acceptable(evutil_socket_t fd, short what, void *ctx)
{
    (void)what;
    struct kvist_http *http = ctx;
    for (uint32_t count = 0; count < TURN_ACCEPTS_MAX; count++) {
        int peer = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (peer < 0) {
            if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
                const struct timeval pause = {0, ACCEPT_PAUSE_US};
                http->counters->accept_errors_total++;
                (void)event_del(http->acceptable);
                (void)event_add(http->accept_again, &pause);
            }
            return;
        }
        if (http->peer_count >= KVIST_HTTP_PEERS_MAX) {
            http->counters->http_rejected_total++;
            peer_free(find_oldest(http));
        }
        peer_create(http, peer);
    }
}

static void on_accept_again(evutil_socket_t fd, short what, void *ctx)
{
    (void)fd;
    (void)what;
    struct kvist_http *http = ctx;
    (void)event_add(http->acceptable, NULL);
}

/* @param listens  whether to: then another one that does is in the way */
static enum kvist_status bind_tcp(const struct kvist_http_address *address,
                                  bool listens,
                                  int *fd_out,
                                  struct kvist_error *err)
{
    const struct sockaddr *name = (const struct sockaddr *)&address->tcp;
    const int on = 1;
    int fd = socket(name->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return kvist_error_set_errno(err, errno, KEY, KEY ": cannot make a socket");
    }
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        bind(fd, name, address->tcp_bytes) != 0 || (listens && listen(fd, BACKLOG) != 0)) {
        int error_number = errno;
        (void)close(fd);
        return error_number == EADDRINUSE
                   ? kvist_error_set(err,
                                     KVIST_EXISTS,
                                     error_number,
                                     KEY,
                                     "another program listens on the address of " KEY
                                     ": choose another port, or off")
                   : kvist_error_set_errno(err, error_number, KEY, KEY ": cannot listen");
    }
    *fd_out = fd;
    return KVIST_OK;
}

enum kvist_status kvist_http_check(const struct kvist_http_address *address,
                                   struct kvist_error *err)
{
    int fd = -1;
    enum kvist_status status =
        address->kind == KVIST_HTTP_TCP ? bind_tcp(address, false, &fd, err) : KVIST_OK;
    if (fd >= 0) {
        (void)close(fd);
    }
    return status == KVIST_EXISTS ? KVIST_OK : status;
}

static enum kvist_status listen_tcp(struct kvist_http *http,
                                    const struct kvist_http_address *address,
                                    struct kvist_error *err)
{
    int fd = -1;
    enum kvist_status status = bind_tcp(address, true, &fd, err);
    if (status != KVIST_OK) {
        return status;
    }
    struct sockaddr_storage bound = address->tcp;
    socklen_t bound_bytes = sizeof(bound);
    char host[HOST_BYTES_MAX] = "";
    char port[8] = "";
    (void)getsockname(fd, (struct sockaddr *)&bound, &bound_bytes);
    (void)getnameinfo((struct sockaddr *)&bound,
                      bound_bytes,
                      host,
                      sizeof(host),
                      port,
                      sizeof(port),
                      NI_NUMERICHOST | NI_NUMERICSERV);
    kvist_log(KVIST_LOG_INFO, "metrics are served address=%s port=%s", host, port);
    http->listener.fd = fd;
    return KVIST_OK;
}

enum kvist_status kvist_http_start(struct kvist_http *http,
                                   struct event_base *base,
                                   const struct kvist_http_address *address,
                                   struct kvist_counters *counters,
                                   const struct kvist_http_pages *pages,
                                   struct kvist_error *err)
{
    if (address->kind == KVIST_HTTP_OFF) {
        return KVIST_OK;
    }
    http->base = base;
    http->counters = counters;
    http->pages = *pages;
    http->listener = (struct kvist_listener)KVIST_LISTENER_INIT;
    enum kvist_status status =
        address->kind == KVIST_HTTP_UNIX
            ? kvist_listener_open(KEY, address->path, 0660, "", &http->listener, err)
            : listen_tcp(http, address, err);
    if (status == KVIST_OK) {
        http->acceptable =
            event_new(base, http->listener.fd, EV_READ | EV_PERSIST, on_acceptable, http);
        http->accept_again = evtimer_new(base, on_accept_again, http);
        if (http->acceptable == NULL || http->accept_again == NULL ||
            event_add(http->acceptable, NULL) != 0) {
            status = kvist_error_set(err, KVIST_NO_MEMORY, 0, "libevent", "cannot watch " KEY);
        }
    }
    if (status != KVIST_OK) {
        kvist_http_stop(http);
    }
    return status;
}

void kvist_http_stop(struct kvist_http *http)
{
    if (http->base == NULL) {
        return;
    }
    struct kvist_http_peer *next = NULL;
    for (struct kvist_http_peer *at = http->peers; at != NULL; at = next) {
        next = at->next;
        peer_free(at);
    }
    if (http->acceptable != NULL) {
        event_free(http->acceptable);
    }
    if (http->accept_again != NULL) {
        event_free(http->accept_again);
    }
    kvist_listener_close(&http->listener);
    *http = (struct kvist_http){.base = NULL};
}
