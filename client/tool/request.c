#include "client/tool/request.h"

#include "proto/base/clock.h"

#include <kvist/version.h>

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct kvist_request {
    int fd;
    uint64_t id_last;
    struct kvist_frame_reader *reader;
    struct kvist_frame_writer *writer;
    Kvist__Wire__Envelope *hello; /* the daemon's reply */
};

static enum kvist_status
wait_ready(int fd, short events, uint64_t deadline_us, struct kvist_error *err)
{
    for (;;) {
        uint64_t now_us = kvist_clock_now_us();
        if (now_us >= deadline_us) {
            return kvist_error_set(err,
                                   KVIST_TIMED_OUT,
                                   0,
                                   "kvistd",
                                   "kvistd does not answer; it may be stopped or overloaded "
                                   "(try a longer --timeout, and look at its log)");
        }
        struct pollfd ready = {.fd = fd, .events = events};
        uint64_t left_ms = (deadline_us - now_us + 999) / 1000;
        int count = poll(&ready, 1, left_ms < 60000 ? (int)left_ms : 60000);
        if (count > 0) {
            return KVIST_OK;
        }
        if (count < 0 && errno != EINTR) {
            return kvist_error_set_errno(err, errno, "poll", "cannot wait for kvistd");
        }
    }
}

static enum kvist_status connect_to(const char *path, int *fd_out, struct kvist_error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof(address.sun_path)) {
        return kvist_error_set(err, KVIST_INVALID, 0, "kvist", "the socket path is over %zu bytes",
                               sizeof(address.sun_path) - 1);
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return kvist_error_set_errno(err, errno, "socket", "cannot make a socket");
    }
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        enum kvist_status status =
            kvist_error_set_errno(err, errno, "connect", "cannot connect to kvistd at %s", path);
        (void)close(fd);
        status = status == KVIST_DENIED ? KVIST_DENIED : KVIST_UNAVAILABLE;
        if (err != NULL) {
            err->status = status;
        }
        return status;
    }
    *fd_out = fd;
    return KVIST_OK;
}

/* --- Frames -------------------------------------------------------------------------------- */

static enum kvist_status send_all(struct kvist_request *request,
                                  const Kvist__Wire__Envelope *envelope,
                                  uint64_t deadline_us,
                                  struct kvist_error *err)
{
    enum kvist_status status = kvist_message_put(request->writer, envelope, NULL, 0, err);
    while (status == KVIST_OK) {
        status = kvist_frame_writer_flush(request->writer, request->fd, err);
        if (status != KVIST_OK || kvist_frame_writer_pending_bytes(request->writer) == 0) {
            break;
        }
        status = wait_ready(request->fd, POLLOUT, deadline_us, err);
    }
    return status;
}

static enum kvist_status receive_one(struct kvist_request *request,
                                     uint64_t deadline_us,
                                     Kvist__Wire__Envelope **envelope_out,
                                     struct kvist_error *err)
{
    for (;;) {
        struct kvist_frame frame;
        enum kvist_status status = kvist_frame_reader_next(request->reader, &frame, err);
        if (status == KVIST_OK) { /* no fds: the reader was made for none */
            return kvist_message_unpack(frame.bytes, frame.length, false, envelope_out, err);
        }
        if (status == KVIST_NOT_FOUND) {
            status = wait_ready(request->fd, POLLIN, deadline_us, err);
        }
        bool more = false;
        if (status == KVIST_OK) {
            status = kvist_frame_reader_fill(request->reader, request->fd, &more, err);
        }
        if (status == KVIST_CLOSED) {
            return kvist_error_set(
                err, KVIST_UNAVAILABLE, 0, "kvistd", "kvistd closed the connection");
        }
        if (status != KVIST_OK) {
            return status;
        }
    }
}

enum kvist_status kvist_request_call(struct kvist_request *request,
                                     Kvist__Wire__Envelope *envelope,
                                     Kvist__Wire__Envelope__BodyCase expected,
                                     uint64_t timeout_us,
                                     Kvist__Wire__Envelope **reply_out,
                                     struct kvist_error *err)
{
    uint64_t deadline_us = kvist_clock_now_us() + timeout_us;
    Kvist__Wire__Envelope *reply = NULL;
    envelope->id = ++request->id_last;
    enum kvist_status status = send_all(request, envelope, deadline_us, err);
    while (status == KVIST_OK) {
        status = receive_one(request, deadline_us, &reply, err);
        if (status != KVIST_OK || reply == NULL || reply->id == envelope->id ||
            reply->body_case == KVIST__WIRE__ENVELOPE__BODY_FAILURE) {
            break;
        }
        kvist_message_free(&reply); /* pushed, or late */
    }
    if (reply != NULL && reply->body_case == KVIST__WIRE__ENVELOPE__BODY_FAILURE) {
        status = kvist_status_from_wire(reply->failure->status);
        status = kvist_error_set(err,
                                 status == KVIST_OK ? KVIST_PROTOCOL : status,
                                 0,
                                 "kvistd",
                                 "%s",
                                 reply->failure->text);
    } else if (reply != NULL && reply->body_case != expected) {
        status = kvist_error_set(err, KVIST_PROTOCOL, 0, "kvistd", "kvistd answered nonsense");
    }
    if (status != KVIST_OK) {
        kvist_message_free(&reply);
        return status;
    }
    *reply_out = reply;
    return KVIST_OK;
}

/* --- Open and close ------------------------------------------------------------------------ */

static enum kvist_status
say_hello(struct kvist_request *request, uint64_t timeout_us, struct kvist_error *err)
{
    char name[] = "kvist";
    Kvist__Wire__Hello hello;
    kvist__wire__hello__init(&hello);
    hello.wire_major = KVIST_WIRE_MAJOR;
    hello.wire_minor = KVIST_WIRE_MINOR;
    hello.layout_version = KVIST_LAYOUT_VERSION;
    hello.role = KVIST__WIRE__ROLE__ROLE_TOOL;
    hello.name = name;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_HELLO;
    envelope.hello = &hello;
    enum kvist_status status = kvist_request_call(request,
                                                  &envelope,
                                                  KVIST__WIRE__ENVELOPE__BODY_HELLO_REPLY,
                                                  timeout_us,
                                                  &request->hello,
                                                  err);
    if (status == KVIST_INVALID || status == KVIST_PROTOCOL) {
        char text[KVIST_ERROR_TEXT_BYTES];
        (void)snprintf(text, sizeof(text), "%s", err != NULL ? err->text : "");
        return kvist_error_set(
            err, status, 0, "kvist", "what answers on that socket is no kvistd (%.60s)", text);
    }
    if (request->hello != NULL && request->hello->hello_reply->wire_major != KVIST_WIRE_MAJOR) {
        status = kvist_error_set(err,
                                 KVIST_VERSION,
                                 0,
                                 "kvistd",
                                 "kvistd speaks version %u of the protocol, this tool %u; use the "
                                 "kvist that came with that kvistd",
                                 request->hello->hello_reply->wire_major,
                                 KVIST_WIRE_MAJOR);
    }
    return status;
}

enum kvist_status kvist_request_open(const char *socket_path,
                                     uint64_t timeout_us,
                                     struct kvist_request **request_out,
                                     struct kvist_error *err)
{
    struct kvist_request *request = calloc(1, sizeof(*request));
    if (request == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "kvist", "out of memory");
    }
    request->fd = -1;
    enum kvist_status status = connect_to(socket_path, &request->fd, err);
    if (status == KVIST_OK && (kvist_frame_reader_create(0, &request->reader) != KVIST_OK ||
                               kvist_frame_writer_create(&request->writer) != KVIST_OK)) {
        status = kvist_error_set(err, KVIST_NO_MEMORY, 0, "kvist", "out of memory");
    }
    if (status == KVIST_OK) {
        status = say_hello(request, timeout_us, err);
    }
    if (status != KVIST_OK) {
        kvist_request_close(&request);
        return status;
    }
    *request_out = request;
    return KVIST_OK;
}

void kvist_request_close(struct kvist_request **request_ref)
{
    struct kvist_request *request = *request_ref;
    if (request == NULL) {
        return;
    }
    *request_ref = NULL;
    kvist_message_free(&request->hello);
    kvist_frame_reader_destroy(&request->reader);
    kvist_frame_writer_destroy(&request->writer);
    if (request->fd >= 0) {
        (void)close(request->fd);
    }
    free(request);
}

const Kvist__Wire__HelloReply *kvist_request_daemon(const struct kvist_request *request)
{
    return request->hello->hello_reply;
}
