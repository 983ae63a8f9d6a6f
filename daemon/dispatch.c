#include "daemon/dispatch.h"

#include "daemon/daemon.h"
#include "proto/base/log.h"
#include "proto/wire/message.h"

#include <kvist/version.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- Hello ----------------------------------------------------------------------------------- */

/* Major and layout equal, minor at most one away. */
static bool version_fits(const Kvist__Wire__Hello *hello)
{
    int64_t minor_away = (int64_t)hello->wire_minor - (int64_t)KVIST_WIRE_MINOR;
    return hello->wire_major == KVIST_WIRE_MAJOR && minor_away >= -1 && minor_away <= 1 &&
           (hello->role == KVIST__WIRE__ROLE__ROLE_TOOL ||
            hello->layout_version == KVIST_LAYOUT_VERSION);
}

static void refuse_version(struct kvist_connection *connection,
                           const Kvist__Wire__Envelope *envelope)
{
    char text[KVIST_ERROR_TEXT_BYTES];
    (void)snprintf(text,
                   sizeof(text),
                   "kvistd %s speaks wire %u.%u with layout %u, the peer wire %u.%u with layout "
                   "%u: update the older of the two",
                   KVIST_RELEASE,
                   KVIST_WIRE_MAJOR,
                   KVIST_WIRE_MINOR,
                   KVIST_LAYOUT_VERSION,
                   envelope->hello->wire_major,
                   envelope->hello->wire_minor,
                   envelope->hello->layout_version);
    kvist_connection_refuse(connection, envelope->id, KVIST_VERSION, text);
}

static void on_hello(struct kvist_daemon *daemon,
                     struct kvist_connection *connection,
                     const Kvist__Wire__Envelope *envelope)
{
    const Kvist__Wire__Hello *hello = envelope->hello;
    if (!version_fits(hello)) {
        refuse_version(connection, envelope);
        return;
    }
    Kvist__Wire__HelloReply reply;
    kvist__wire__hello_reply__init(&reply);
    int page_fd = -1;
    if (hello->role == KVIST__WIRE__ROLE__ROLE_TOOL) {
        connection->is_tool = true;
    } else {
        struct kvist_error err = KVIST_ERROR_INIT;
        enum kvist_status status = kvist_sessions_join(&daemon->sessions, connection, hello, &err);
        if (status != KVIST_OK) {
            kvist_connection_fail(connection, envelope->id, status, err.text);
            return;
        }
        const struct kvist_store_session *session = connection->process->session->store;
        page_fd = kvist_store_session_page_fd(session);
        reply.page_bytes = kvist_store_session_page_bytes(session);
    }
    connection->state = KVIST_CONNECTION_OPEN;
    reply.wire_major = KVIST_WIRE_MAJOR;
    reply.wire_minor = KVIST_WIRE_MINOR;
    reply.instance = kvist_store_instance(daemon->store);
    reply.version = kvist_message_text(KVIST_RELEASE);
    Kvist__Wire__Envelope answer = KVIST__WIRE__ENVELOPE__INIT;
    answer.id = envelope->id;
    answer.body_case = KVIST__WIRE__ENVELOPE__BODY_HELLO_REPLY;
    answer.hello_reply = &reply;
    kvist_connection_send(connection, &answer, &page_fd, connection->is_tool ? 0 : 1);
}

/* --- Pools ----------------------------------------------------------------------------------- */

static void on_open_pool(struct kvist_daemon *daemon,
                         struct kvist_connection *connection,
                         const Kvist__Wire__Envelope *envelope)
{
    const Kvist__Wire__OpenPool *open = envelope->open_pool;
    struct kvist_process *process = connection->process;
    struct kvist_error err = KVIST_ERROR_INIT;
    struct kvist_tier_pool wanted;
    struct kvist_store_pool *pool = NULL;
    uint32_t ordinal = 0;
    enum kvist_status status = kvist_pool_describe(open, connection->tenant, &wanted, &err);
    if (status == KVIST_OK && kvist_process_maps(process)) {
        status =
            kvist_shapes_check(daemon->shapes, wanted.pool_id, process->rank, &open->shape, &err);
    }
    if (status == KVIST_OK) {
        pool = kvist_store_pool_lookup(daemon->store, wanted.pool_id);
        status =
            kvist_sessions_check_pool(&daemon->sessions, connection, pool, open->read_only, &err);
    }
    if (status == KVIST_OK) {
        status = kvist_store_pool_open(daemon->store, &wanted, &pool, &err);
    }
    if (status == KVIST_OK) {
        status = kvist_store_attach(process->store, pool, open->read_only, &ordinal, &err);
    }
    if (status != KVIST_OK) {
        kvist_connection_fail(connection, envelope->id, status, err.text);
        return;
    }
    Kvist__Wire__PoolReply reply = KVIST__WIRE__POOL_REPLY__INIT;
    reply.pool = ordinal;
    reply.pool_id = kvist_message_bytes(kvist_store_pool_id(pool), KVIST_KEY_BYTES);
    reply.map_bytes = kvist_store_pool_map_bytes(pool);
    reply.slot_bytes = kvist_store_pool_slot_bytes(pool);
    reply.slots_per_segment = kvist_store_pool_slots_per_segment(pool);
    Kvist__Wire__Envelope answer = KVIST__WIRE__ENVELOPE__INIT;
    answer.id = envelope->id;
    answer.body_case = KVIST__WIRE__ENVELOPE__BODY_POOL_REPLY;
    answer.pool_reply = &reply;
    int map_fd = kvist_store_pool_map_fd(pool);
    kvist_connection_send(connection, &answer, &map_fd, 1);
}

/* --- Posted ---------------------------------------------------------------------------------- */

static void on_commit(struct kvist_connection *connection, const Kvist__Wire__Commit *commit)
{
    struct kvist_store_session *session = connection->process->session->store;
    kvist_store_used(session, commit->pool, commit->used);
    for (size_t index = 0; index < commit->n_blocks; index++) {
        const Kvist__Wire__Commit__Block *from = commit->blocks[index];
        struct kvist_store_commit block = {
            .slot = from->slot,
            .ticket = from->ticket,
            .reservation = from->reservation,
            .parent_tag = from->parent_tag,
            .block_bytes = from->block_bytes,
        };
        memcpy(block.key, from->key.data, sizeof(block.key));
        if (kvist_store_commit(session, commit->pool, &block) == KVIST_INVALID) {
            kvist_connection_refuse(
                connection, 0, KVIST_INVALID, "commit of a slot that was not granted to it");
            return;
        }
    }
}

static void on_return(struct kvist_connection *connection, const Kvist__Wire__Return *back)
{
    struct kvist_store_session *session = connection->process->session->store;
    for (size_t index = 0; index < back->n_slots; index++) {
        const Kvist__Wire__Return__Slot *slot = back->slots[index];
        if (kvist_store_return(session, back->pool, slot->slot, slot->ticket, slot->reservation) ==
            KVIST_INVALID) {
            kvist_connection_refuse(connection,
                                    0,
                                    KVIST_INVALID,
                                    "return of a slot that was not granted to this session");
            return;
        }
    }
}

static void on_prefetch(struct kvist_connection *connection, const Kvist__Wire__Prefetch *prefetch)
{
    static uint8_t keys[KVIST_KEYS_MAX][KVIST_KEY_BYTES]; /* loop thread alone; 128 KiB */
    for (size_t index = 0; index < prefetch->n_keys; index++) {
        memcpy(keys[index], prefetch->keys[index].data, KVIST_KEY_BYTES);
    }
    enum kvist_status status = kvist_store_prefetch(connection->process->session->store,
                                                    prefetch->pool,
                                                    (const uint8_t(*)[KVIST_KEY_BYTES])keys,
                                                    prefetch->n_keys);
    if (status == KVIST_INVALID) {
        kvist_connection_refuse(
            connection, 0, status, "prefetch in a pool that the session has not opened");
    }
}

static void on_suspect(struct kvist_connection *connection, const Kvist__Wire__Suspect *suspect)
{
    uint8_t keys[KVIST_SUSPECT_KEYS_MAX][KVIST_KEY_BYTES];
    for (size_t index = 0; index < suspect->n_keys; index++) {
        memcpy(keys[index], suspect->keys[index].data, KVIST_KEY_BYTES);
    }
    enum kvist_status status = kvist_store_suspect(connection->process->store,
                                                   suspect->pool,
                                                   (const uint8_t(*)[KVIST_KEY_BYTES])keys,
                                                   suspect->n_keys);
    if (status == KVIST_INVALID) {
        kvist_connection_refuse(
            connection, 0, status, "suspects in a pool that the process has not opened");
    }
}

/* --- The table of messages ------------------------------------------------------------------- */

/* Who may send it: nobody but these. */
static const char *check_sender(const struct kvist_connection *connection,
                                Kvist__Wire__Envelope__BodyCase body)
{
    const struct kvist_process *process = connection->process;
    switch ((int)body) {
    case KVIST__WIRE__ENVELOPE__BODY_HELLO:
        return connection->state == KVIST_CONNECTION_GREETING ? NULL : "a second hello";
    case KVIST__WIRE__ENVELOPE__BODY_OPEN_POOL:
    case KVIST__WIRE__ENVELOPE__BODY_CLOSE_POOL:
    case KVIST__WIRE__ENVELOPE__BODY_SUSPECT:
        return process != NULL ? NULL : "a tool opens no pools";
    case KVIST__WIRE__ENVELOPE__BODY_COMMIT:
    case KVIST__WIRE__ENVELOPE__BODY_RETURN_SLOTS:
    case KVIST__WIRE__ENVELOPE__BODY_PREFETCH:
        return process != NULL && kvist_process_schedules(process)
                   ? NULL
                   : "only a session's scheduler sends this";
    case KVIST__WIRE__ENVELOPE__BODY_MAPPED:
    case KVIST__WIRE__ENVELOPE__BODY_UNMAPPED:
        return process != NULL && kvist_process_maps(process) ? NULL : "only a rank maps segments";
    default:
        return NULL;
    }
}

static void dispatch_posted(struct kvist_connection *connection,
                            const Kvist__Wire__Envelope *envelope)
{
    struct kvist_store_process *process = connection->process->store;
    switch ((int)envelope->body_case) {
    case KVIST__WIRE__ENVELOPE__BODY_MAPPED:
        kvist_store_segment_mapped(
            process, envelope->mapped->pool, envelope->mapped->segment, envelope->mapped->serial);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_UNMAPPED:
        kvist_store_segment_unmapped(process,
                                     envelope->unmapped->pool,
                                     envelope->unmapped->segment,
                                     envelope->unmapped->serial);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_COMMIT:
        on_commit(connection, envelope->commit);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_RETURN_SLOTS:
        on_return(connection, envelope->return_slots);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_CLOSE_POOL:
        kvist_store_detach(process, envelope->close_pool->pool);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_SUSPECT:
        on_suspect(connection, envelope->suspect);
        break;
    default:
        on_prefetch(connection, envelope->prefetch);
        break;
    }
}

static void dispatch_request(struct kvist_daemon *daemon,
                             struct kvist_connection *connection,
                             const Kvist__Wire__Envelope *envelope)
{
    connection->yields = true;
    switch ((int)envelope->body_case) {
    case KVIST__WIRE__ENVELOPE__BODY_HELLO:
        on_hello(daemon, connection, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_OPEN_POOL:
        on_open_pool(daemon, connection, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_CLEAR:
        kvist_dispatch_clear(daemon, connection, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_STAT:
        kvist_dispatch_stat(daemon, connection, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_LIST:
        kvist_dispatch_list(daemon, connection, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_INSPECT:
        kvist_dispatch_inspect(daemon, connection, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_ADMIN:
        kvist_dispatch_admin(daemon, connection, envelope);
        break;
    default: /* of a newer peer */
        if (envelope->id != 0) {
            kvist_connection_fail(
                connection, envelope->id, KVIST_UNSUPPORTED, "this kvistd does not know that");
        }
        break;
    }
}

void kvist_dispatch_message(void *ctx,
                            struct kvist_connection *connection,
                            const Kvist__Wire__Envelope *envelope)
{
    if (connection->state == KVIST_CONNECTION_GREETING &&
        envelope->body_case != KVIST__WIRE__ENVELOPE__BODY_HELLO) {
        kvist_connection_refuse(
            connection, envelope->id, KVIST_PROTOCOL, "the first message must be a hello");
        return;
    }
    const char *reason = check_sender(connection, envelope->body_case);
    if (reason != NULL) {
        kvist_connection_refuse(connection, envelope->id, KVIST_PROTOCOL, reason);
        return;
    }
    switch ((int)envelope->body_case) {
    case KVIST__WIRE__ENVELOPE__BODY_MAPPED:
    case KVIST__WIRE__ENVELOPE__BODY_UNMAPPED:
    case KVIST__WIRE__ENVELOPE__BODY_COMMIT:
    case KVIST__WIRE__ENVELOPE__BODY_RETURN_SLOTS:
    case KVIST__WIRE__ENVELOPE__BODY_PREFETCH:
    case KVIST__WIRE__ENVELOPE__BODY_CLOSE_POOL:
    case KVIST__WIRE__ENVELOPE__BODY_SUSPECT:
        dispatch_posted(connection, envelope);
        break;
    default:
        dispatch_request(ctx, connection, envelope);
        break;
    }
}
