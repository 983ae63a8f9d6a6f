#include "client/core.h"
#include "proto/base/clock.h"
#include "proto/base/fault.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define TURN_FRAMES_MAX 256U     /* handled before the pump looks at anything else */
#define STABLE_US       1000000U /* a link that held so long starts its back-off anew */

/* xorshift64: spreads clients that lost the same daemon; nothing secret. */
static uint64_t next_random(struct kvist_client *client)
{
    uint64_t value = client->random_state;
    value ^= value << 13;
    value ^= value >> 7;
    value ^= value << 17;
    client->random_state = value;
    return value;
}

/* Half of the back-off is certain, half is jitter. */
static void schedule_retry_locked(struct kvist_client *client, uint64_t now_us)
{
    uint64_t half_us = client->backoff_us / 2;
    client->retry_at_us = now_us + half_us + next_random(client) % (half_us + 1);
    client->backoff_us *= 2;
    if (client->backoff_us > KVIST_BACKOFF_US_MAX) {
        client->backoff_us = KVIST_BACKOFF_US_MAX;
    }
}

static void mark_down_locked(struct kvist_client *client, const struct kvist_error *why)
{
    uint64_t now_us = kvist_clock_now_us();
    bool stable = client->link == KVIST_LINK_UP && now_us - client->up_since_us >= STABLE_US;
    if (client->link == KVIST_LINK_UP) {
        client->down_since_us = now_us;
    }
    client->link = KVIST_LINK_DOWN;
    client->broken = false;
    client->wants_write = false;
    client->backoff_us = stable ? KVIST_BACKOFF_US_MIN : client->backoff_us;
    schedule_retry_locked(client, now_us);
    if (why->status != KVIST_OK) {
        client->last_error = *why;
    }
    for (uint32_t index = 0; index < KVIST_SESSION_POOLS_MAX; index++) {
        if (client->pools[index] != NULL) {
            client->pools[index]->state = KVIST_POOL_CLOSED;
            client->pools[index]->retry_at_us = 0;
        }
    }
}

void kvist_link_drop(struct kvist_client *client, const struct kvist_error *why)
{
    (void)pthread_mutex_lock(client->lock);
    mark_down_locked(client, why);
    int fd = client->socket_fd;
    struct kvist_frame_writer *writer = client->writer;
    client->socket_fd = -1;
    client->writer = NULL;
    (void)pthread_mutex_unlock(client->lock);
    kvist_frame_writer_destroy(&writer);
    kvist_frame_reader_destroy(&client->reader);
    if (fd >= 0) {
        (void)close(fd); /* epoll forgets it by itself */
    }
}

/* --- Sending ------------------------------------------------------------------------------- */

static void watch_locked(struct kvist_client *client)
{
    bool wants_write = kvist_frame_writer_pending_bytes(client->writer) > 0;
    if (wants_write == client->wants_write) {
        return;
    }
    struct epoll_event event = {
        .events = EPOLLIN | (wants_write ? (uint32_t)EPOLLOUT : 0U),
        .data.fd = client->socket_fd,
    };
    if (epoll_ctl(client->epoll_fd, EPOLL_CTL_MOD, client->socket_fd, &event) == 0) {
        client->wants_write = wants_write;
    }
}

static enum kvist_status flush_locked(struct kvist_client *client, struct kvist_error *err)
{
    enum kvist_status status = kvist_frame_writer_flush(client->writer, client->socket_fd, err);
    if (status == KVIST_OK) {
        watch_locked(client);
    }
    return status;
}

/* Queue and try to send at once. What fails for good leaves the link broken. */
static enum kvist_status send_locked(struct kvist_client *client,
                                     const Kvist__Wire__Envelope *envelope)
{
    enum kvist_status status = kvist_message_put(client->writer, envelope, NULL, 0, NULL);
    if (status == KVIST_BUSY) {
        return KVIST_BUSY;
    }
    if (status == KVIST_OK) {
        status = flush_locked(client, NULL);
    }
    if (status != KVIST_OK) {
        client->broken = true;
        kvist_client_wake(client);
        return KVIST_UNAVAILABLE;
    }
    return KVIST_OK;
}

enum kvist_status kvist_link_post_locked(struct kvist_client *client,
                                         const Kvist__Wire__Envelope *envelope)
{
    enum kvist_status status = KVIST_UNAVAILABLE;
    if (client->link == KVIST_LINK_UP && !client->broken) {
        status = send_locked(client, envelope);
    }
    if (status != KVIST_OK) {
        client->stats.dropped_messages++;
    }
    return status;
}

void kvist_link_open_pool_locked(struct kvist_client *client, struct kvist_pool *pool)
{
    Kvist__Wire__OpenPool__Field fields[KVIST_IDENTITY_FIELDS_MAX];
    Kvist__Wire__OpenPool__Field *field_list[KVIST_IDENTITY_FIELDS_MAX];
    pool->retry_at_us = 0;
    if (client->link != KVIST_LINK_UP || client->broken) {
        return;
    }
    for (size_t index = 0; index < pool->field_count; index++) {
        kvist__wire__open_pool__field__init(&fields[index]);
        /* protobuf-c has no const strings; packing only reads. */
        memcpy(&fields[index].name, &pool->fields[index].name, sizeof(fields[index].name));
        memcpy(&fields[index].value.data, &pool->fields[index].value, sizeof(void *));
        fields[index].value.len = pool->fields[index].value_bytes;
        field_list[index] = &fields[index];
    }
    Kvist__Wire__OpenPool open;
    kvist__wire__open_pool__init(&open);
    open.n_fields = pool->field_count;
    open.fields = field_list;
    open.slot_bytes = pool->slot_bytes;
    open.sparse = pool->sparse;
    open.read_only = pool->read_only;
    open.shape.data = pool->shape;
    open.shape.len = pool->shape_bytes;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.id = ++client->request_id_last;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_OPEN_POOL;
    envelope.open_pool = &open;
    if (kvist_link_post_locked(client, &envelope) == KVIST_OK) {
        pool->state = KVIST_POOL_ASKED;
        pool->request_id = envelope.id;
    }
}

void kvist_link_close_pools_locked(struct kvist_client *client)
{
    if (client->link != KVIST_LINK_UP || client->broken) {
        return; /* the next hello begins anew */
    }
    for (uint32_t index = 0; index < KVIST_SESSION_POOLS_MAX; index++) {
        if (client->pools[index] != NULL && client->pools[index]->state == KVIST_POOL_ASKED) {
            return;
        }
    }
    for (uint32_t ordinal = 0; client->closing != 0 && ordinal < KVIST_SESSION_POOLS_MAX;
         ordinal++) {
        Kvist__Wire__ClosePool close_pool;
        kvist__wire__close_pool__init(&close_pool);
        close_pool.pool = ordinal;
        Kvist__Wire__Envelope envelope;
        kvist__wire__envelope__init(&envelope);
        envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_CLOSE_POOL;
        envelope.close_pool = &close_pool;
        if ((client->closing & (1U << ordinal)) != 0 &&
            kvist_link_post_locked(client, &envelope) == KVIST_OK) {
            client->closing &= ~(1U << ordinal);
        }
    }
}

void kvist_link_post_unmapped_locked(struct kvist_client *client,
                                     uint32_t ordinal,
                                     uint32_t segment,
                                     uint32_t serial)
{
    Kvist__Wire__Unmapped unmapped;
    kvist__wire__unmapped__init(&unmapped);
    unmapped.pool = ordinal;
    unmapped.segment = segment;
    unmapped.serial = serial;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_UNMAPPED;
    envelope.unmapped = &unmapped;
    (void)kvist_link_post_locked(client, &envelope);
}

/* --- Connecting ---------------------------------------------------------------------------- */

static int open_socket(const struct kvist_client *client, struct kvist_error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, client->socket_path, strlen(client->socket_path) + 1);
    int fd = kvist_fault_point("client.socket")
                 ? (errno = EMFILE, -1)
                 : socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        (void)kvist_error_set_errno(err, errno, "socket", "cannot make a socket");
        return -1;
    }
    /* A Unix socket connects at once or not at all; EAGAIN: the daemon's backlog is full. */
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        enum kvist_status status = kvist_error_set_errno(
            err, errno, "connect", "cannot connect to kvistd at %s", client->socket_path);
        err->status = status == KVIST_DENIED ? KVIST_DENIED : KVIST_UNAVAILABLE;
        (void)close(fd);
        return -1;
    }
    return fd;
}

static enum kvist_status send_hello_locked(struct kvist_client *client)
{
    Kvist__Wire__Hello hello;
    kvist__wire__hello__init(&hello);
    hello.wire_major = KVIST_WIRE_MAJOR;
    hello.wire_minor = KVIST_WIRE_MINOR;
    hello.layout_version = KVIST_LAYOUT_VERSION;
    hello.role = (Kvist__Wire__Role)client->role;
    if (client->role != KVIST_ROLE_TOOL) {
        hello.session_id.data = client->session_id;
        hello.session_id.len = sizeof(client->session_id);
        hello.rank = client->rank;
        hello.rank_count = client->rank_count;
    }
    hello.name = client->name;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.id = ++client->request_id_last;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_HELLO;
    envelope.hello = &hello;
    client->hello_id = envelope.id;
    return send_locked(client, &envelope);
}

void kvist_link_connect(struct kvist_client *client)
{
    struct kvist_error why = KVIST_ERROR_INIT;
    struct kvist_frame_writer *writer = NULL;
    int fd = open_socket(client, &why);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    if (fd < 0) {
        goto drop;
    }
    if (kvist_frame_reader_create(1, &client->reader) != KVIST_OK ||
        kvist_frame_writer_create(&writer) != KVIST_OK) {
        (void)kvist_error_set(&why, KVIST_NO_MEMORY, 0, "client", "no memory for a connection");
        goto close_socket;
    }
    if (epoll_ctl(client->epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
        (void)kvist_error_set_errno(&why, errno, "epoll_ctl", "cannot watch a connection");
        goto close_socket;
    }
    (void)pthread_mutex_lock(client->lock);
    client->socket_fd = fd;
    client->writer = writer;
    client->link = KVIST_LINK_HELLO;
    enum kvist_status status = send_hello_locked(client); /* a failure leaves it broken */
    (void)status;
    (void)pthread_mutex_unlock(client->lock);
    return;

close_socket:
    kvist_frame_writer_destroy(&writer);
    (void)close(fd);
drop:
    kvist_link_drop(client, &why);
}

/* --- Receiving ----------------------------------------------------------------------------- */

static enum kvist_status
handle_frame(struct kvist_client *client, struct kvist_frame *frame, struct kvist_error *err)
{
    Kvist__Wire__Envelope *envelope = NULL;
    enum kvist_status status =
        kvist_message_unpack(frame->bytes, frame->length, false, &envelope, err);
    if (status == KVIST_OK && kvist_message_fd_count(envelope) != frame->fd_count &&
        envelope->body_case != KVIST__WIRE__ENVELOPE__BODY__NOT_SET) {
        status = kvist_error_set(err,
                                 KVIST_PROTOCOL,
                                 0,
                                 "peer",
                                 "%s came with %zu file descriptors",
                                 kvist_message_name(envelope),
                                 frame->fd_count);
    }
    if (status != KVIST_OK || envelope->body_case == KVIST__WIRE__ENVELOPE__BODY__NOT_SET) {
        /* Garbage, or what a newer daemon pushes. */
        for (size_t index = 0; index < frame->fd_count; index++) {
            (void)close(frame->fds[index]);
        }
    } else {
        status = kvist_receive(client, envelope, frame->fd_count > 0 ? frame->fds[0] : -1, err);
    }
    kvist_message_free(&envelope);
    return status;
}

static enum kvist_status receive(struct kvist_client *client, struct kvist_error *err)
{
    bool more = true;
    for (uint32_t frames = 0; frames < TURN_FRAMES_MAX;) {
        struct kvist_frame frame;
        enum kvist_status status = kvist_frame_reader_next(client->reader, &frame, err);
        if (status == KVIST_OK) {
            status = handle_frame(client, &frame, err);
            frames++;
        } else if (status == KVIST_NOT_FOUND && more) {
            status = kvist_frame_reader_fill(client->reader, client->socket_fd, &more, err);
        } else if (status == KVIST_NOT_FOUND) {
            return KVIST_OK;
        }
        if (status != KVIST_OK) {
            return status;
        }
    }
    kvist_client_wake(client); /* whole frames may wait in the reader */
    return KVIST_OK;
}

void kvist_link_turn(struct kvist_client *client)
{
    struct kvist_error why = KVIST_ERROR_INIT;
    enum kvist_status status = receive(client, &why);
    if (status == KVIST_OK) {
        (void)pthread_mutex_lock(client->lock);
        status = client->broken ? kvist_error_set(&why, KVIST_CLOSED, 0, "peer", "cannot send")
                                : flush_locked(client, &why);
        (void)pthread_mutex_unlock(client->lock);
    }
    if (status != KVIST_OK) {
        if (why.status == KVIST_OK) {
            (void)kvist_error_set(&why, status, 0, "peer", "%s", kvist_status_text(status));
        }
        kvist_link_drop(client, &why);
    }
}
