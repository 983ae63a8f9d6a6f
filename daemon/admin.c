/*
 * admin - what changes the store for a tool or an engine and is answered when it is done: clear, save,
 * reload.
 */
#include "daemon/daemon.h"
#include "daemon/dispatch.h"
#include "proto/base/log.h"
#include "proto/wire/message.h"

#include <stdlib.h>

/* A request whose reply comes later. */
struct kvist_pending {
    struct kvist_connection *connection; /* NULL: it is gone */
    struct kvist_pending *next;
    uint64_t id;
    uint32_t waiting;
    enum kvist_status status;
    uint64_t blocks;
};

void kvist_dispatch_forget(struct kvist_connection *connection)
{
    for (struct kvist_pending *at = connection->pending; at != NULL; at = at->next) {
        at->connection = NULL;
    }
    connection->pending = NULL;
}

static struct kvist_pending *pending_create(struct kvist_connection *connection, uint64_t id)
{
    if (connection->pending_count >= KVIST_PENDING_MAX) {
        kvist_connection_fail(
            connection, id, KVIST_BUSY, "too many requests of this connection are not done yet");
        return NULL;
    }
    struct kvist_pending *pending = calloc(1, sizeof(*pending));
    if (pending == NULL) {
        kvist_connection_fail(connection, id, KVIST_NO_MEMORY, "kvistd is out of memory");
        return NULL;
    }
    pending->connection = connection;
    pending->id = id;
    pending->waiting = 1; /* the one who asks */
    pending->next = connection->pending;
    connection->pending = pending;
    connection->pending_count++;
    return pending;
}

/* Take it from its connection. @return which is NULL when it is gone */
static struct kvist_connection *pending_take(struct kvist_pending *pending)
{
    struct kvist_connection *connection = pending->connection;
    if (connection != NULL) {
        struct kvist_pending **link = &connection->pending;
        while (*link != pending) {
            link = &(*link)->next;
        }
        *link = pending->next;
        connection->pending_count--;
    }
    return connection;
}

static const char *clear_failed_text(enum kvist_status status)
{
    switch ((int)status) {
    case KVIST_UNAVAILABLE:
        return "the blocks in memory are dropped; those of the NVMe tier go when its disk, which is "
               "in trouble (see kvistd's health), is back: clear again then to see that they did";
    case KVIST_BUSY:
        return "the NVMe tier has yet to read its index, or to write down earlier clears: clear "
               "again soon";
    case KVIST_NO_SPACE:
        return "the blocks are dropped, but the disk of nvme.path is too full to write this down, "
               "and a restart would bring those on it back: free a few MiB there, and clear again";
    default:
        return "the blocks are dropped, but this could not be written down (see kvistd's health and "
               "log): clear again when its state directory and nvme.path can be written";
    }
}

static void on_cleared(void *ctx, enum kvist_status status, uint64_t blocks, uint64_t bytes)
{
    struct kvist_pending *pending = ctx;
    (void)bytes;
    pending->blocks += blocks;
    pending->status = pending->status == KVIST_OK ? status : pending->status;
    if (--pending->waiting > 0) {
        return;
    }
    struct kvist_connection *connection = pending_take(pending);
    if (connection != NULL && pending->status == KVIST_OK) {
        Kvist__Wire__Envelope answer = KVIST__WIRE__ENVELOPE__INIT;
        Kvist__Wire__ClearReply cleared = KVIST__WIRE__CLEAR_REPLY__INIT;
        cleared.blocks = pending->blocks;
        answer.id = pending->id;
        answer.body_case = KVIST__WIRE__ENVELOPE__BODY_CLEAR_REPLY;
        answer.clear_reply = &cleared;
        kvist_connection_send(connection, &answer, NULL, 0);
    } else if (connection != NULL) {
        kvist_connection_send_failure(connection,
                                      pending->id,
                                      /* To a peer UNAVAILABLE means kvistd itself. */
                                      pending->status == KVIST_UNAVAILABLE ? KVIST_SYSTEM
                                                                           : pending->status,
                                      clear_failed_text(pending->status));
    }
    free(pending);
}

static void send_admin_reply(struct kvist_connection *connection,
                             uint64_t id,
                             const struct kvist_store_saved *saved)
{
    Kvist__Wire__Envelope answer = KVIST__WIRE__ENVELOPE__INIT;
    Kvist__Wire__AdminReply reply;
    kvist__wire__admin_reply__init(&reply);
    reply.blocks = saved->blocks;
    reply.bytes = saved->bytes;
    reply.unsaved_blocks = saved->unsaved_blocks;
    reply.unsaved_bytes = saved->unsaved_bytes;
    reply.reason = kvist_message_text(saved->why);
    answer.id = id;
    answer.body_case = KVIST__WIRE__ENVELOPE__BODY_ADMIN_REPLY;
    answer.admin_reply = &reply;
    kvist_connection_send(connection, &answer, NULL, 0);
}

static void on_saved(void *ctx, const struct kvist_store_saved *saved)
{
    struct kvist_pending *pending = ctx;
    struct kvist_connection *connection = pending_take(pending);
    if (connection != NULL && (saved->status == KVIST_OK || saved->unsaved_blocks > 0)) {
        send_admin_reply(connection, pending->id, saved);
    } else if (connection != NULL) {
        kvist_connection_send_failure(connection, pending->id, saved->status, saved->why);
    }
    free(pending);
}

/* What was asked of the store is refused at once: `done` is not called. */
static void pending_refused(struct kvist_pending *pending, enum kvist_status status)
{
    pending->waiting--;
    pending->status = pending->status == KVIST_OK ? status : pending->status;
}

static void clear_all(struct kvist_daemon *daemon, struct kvist_pending *pending)
{
    struct kvist_store_pool_info info;
    struct kvist_store_stats stats;
    kvist_store_stats(daemon->store, &stats);
    if (stats.tier_is_away || stats.tier.loading) { /* with pools that are not known here */
        pending->status = stats.tier_is_away ? KVIST_UNAVAILABLE : KVIST_BUSY;
    }
    kvist_store_clear_rest(daemon->store,
                           pending->connection->is_operator ? "" : pending->connection->tenant);
    for (uint32_t index = 0; kvist_store_pool_info(daemon->store, index, &info); index++) {
        struct kvist_store_pool *pool = kvist_store_pool_lookup(daemon->store, info.pool_id);
        if (pool == NULL || !kvist_connection_may_see(pending->connection, info.tenant)) {
            continue;
        }
        pending->waiting++;
        enum kvist_status status = kvist_store_clear(daemon->store, pool, on_cleared, pending);
        if (status != KVIST_OK) {
            pending_refused(pending, status);
        }
    }
}

/* For a tier that does not hear of it. */
static enum kvist_status
note(struct kvist_daemon *daemon, struct kvist_connection *connection, const char *tenant)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    if (kvist_store_tier_hears(daemon->store)) {
        return KVIST_OK;
    }
    enum kvist_status status = kvist_cleared_note(&daemon->cleared, tenant, &err);
    if (status != KVIST_OK && kvist_connection_may_log(connection)) {
        kvist_log(KVIST_LOG_WARN, "a clear is not durable error=\"%s\"", err.text);
    }
    return status == KVIST_OK ? KVIST_OK : KVIST_SYSTEM; /* not a trouble of the tier's disk */
}

void kvist_dispatch_clear(struct kvist_daemon *daemon,
                          struct kvist_connection *connection,
                          const Kvist__Wire__Envelope *envelope)
{
    const Kvist__Wire__Clear *clear = envelope->clear;
    struct kvist_store_pool *pool = NULL;
    bool all = clear->scope == KVIST__WIRE__CLEAR__SCOPE__SCOPE_ALL;
    if (!all) {
        pool = kvist_store_pool_lookup(daemon->store, clear->pool_id.data);
        if (pool == NULL || !kvist_connection_may_see(connection, kvist_store_pool_tenant(pool))) {
            kvist_connection_fail(
                connection, envelope->id, KVIST_NOT_FOUND, "no pool of this tenant has that id");
            return;
        }
    } else if (!connection->is_tool) {
        kvist_connection_fail(
            connection, envelope->id, KVIST_DENIED, "an engine clears its own pools, one by one");
        return;
    }
    struct kvist_pending *pending = pending_create(connection, envelope->id);
    if (pending == NULL) {
        return;
    }
    const char *of = connection->is_operator ? "" : connection->tenant;
    enum kvist_status status = note(daemon, connection, all ? of : kvist_store_pool_tenant(pool));
    pending->status = status;
    if (all) {
        clear_all(daemon, pending);
    } else {
        pending->waiting++;
        status = kvist_store_clear(daemon->store, pool, on_cleared, pending);
        if (status != KVIST_OK) {
            pending_refused(pending, status);
        }
    }
    if (kvist_connection_may_log(connection)) {
        const char *of_all = connection->is_operator ? "all" : "tenant";
        kvist_log(KVIST_LOG_INFO,
                  "cleared scope=%s tenant=%s pid=%d uid=%u",
                  all ? of_all : "pool",
                  connection->tenant,
                  (int)connection->pid,
                  (unsigned)connection->uid);
    }
    on_cleared(pending, KVIST_OK, 0, 0);
}

static const char *save_refused_text(enum kvist_status status)
{
    return status == KVIST_UNSUPPORTED
               ? "there is no NVMe tier to save to: set nvme.path and nvme.bytes in kvistd's "
                 "configuration and restart it"
           : status == KVIST_BUSY ? "a save is running already: wait for it"
                                  : kvist_status_text(status);
}

void kvist_dispatch_admin(struct kvist_daemon *daemon,
                          struct kvist_connection *connection,
                          const Kvist__Wire__Envelope *envelope)
{
    if (!connection->is_operator) {
        kvist_connection_fail(
            connection,
            envelope->id,
            KVIST_DENIED,
            "for root and kvistd's user alone, and not through a tenant's socket: use sudo");
        return;
    }
    if (envelope->admin->action == KVIST__WIRE__ADMIN__ACTION__ACTION_RELOAD) {
        struct kvist_error err = KVIST_ERROR_INIT;
        enum kvist_status status = kvist_daemon_reload(daemon, &err);
        if (status == KVIST_OK) {
            send_admin_reply(
                connection, envelope->id, &(const struct kvist_store_saved){.why = ""});
        } else { /* the file is to blame, not the peer */
            status = status == KVIST_DENIED ? KVIST_SYSTEM : status;
            kvist_connection_send_failure(connection, envelope->id, status, err.text);
        }
        return;
    }
    struct kvist_pending *pending = pending_create(connection, envelope->id);
    if (pending == NULL) {
        return;
    }
    enum kvist_status status = kvist_store_save(daemon->store, on_saved, pending);
    if (status != KVIST_OK) {
        (void)pending_take(pending);
        free(pending);
        kvist_connection_send_failure(connection, envelope->id, status, save_refused_text(status));
    }
}
