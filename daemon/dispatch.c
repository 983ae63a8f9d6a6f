#include "daemon/dispatch.h"

#include "daemon/daemon.h"
#include "proto/base/log.h"

#include <kvist/version.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POOLS_IN_REPLY 64U

/* --- Answers --------------------------------------------------------------------------------- */

/* A request failed: what only a faulty peer asks for ends its connection. */
static void
fail(struct kvist_connection *connection, uint64_t id, enum kvist_status status, const char *text)
{
    if (status == KVIST_INVALID || status == KVIST_PROTOCOL || status == KVIST_VERSION) {
        kvist_connection_refuse(connection, id, status, text);
    } else {
        kvist_connection_send_failure(connection, id, status, text);
    }
}

static ProtobufCBinaryData bytes_of(const void *data, size_t length)
{
    union { /* protobuf-c takes what it only reads as not const */
        const void *from;
        uint8_t *to;
    } pointer = {.from = data};
    return (ProtobufCBinaryData){.len = length, .data = pointer.to};
}

static char *text_of(const char *text)
{
    union {
        const char *from;
        char *to;
    } pointer = {.from = text};
    return pointer.to;
}

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
            fail(connection, envelope->id, status, err.text);
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
    reply.version = text_of(KVIST_RELEASE);
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
        status = kvist_sessions_check_pool(
            &daemon->sessions, connection, pool, open->read_only, &err);
    }
    if (status == KVIST_OK) {
        status = kvist_store_pool_open(daemon->store, &wanted, &pool, &err);
    }
    if (status == KVIST_OK) {
        status = kvist_store_attach(process->store, pool, open->read_only, &ordinal, &err);
    }
    if (status != KVIST_OK) {
        fail(connection, envelope->id, status, err.text);
        return;
    }
    Kvist__Wire__PoolReply reply = KVIST__WIRE__POOL_REPLY__INIT;
    reply.pool = ordinal;
    reply.pool_id = bytes_of(kvist_store_pool_id(pool), KVIST_KEY_BYTES);
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

/* --- Replies that come later ----------------------------------------------------------------- */

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
        fail(connection, id, KVIST_BUSY, "too many requests of this connection are not done yet");
        return NULL;
    }
    struct kvist_pending *pending = calloc(1, sizeof(*pending));
    if (pending == NULL) {
        fail(connection, id, KVIST_NO_MEMORY, "kvistd is out of memory");
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
        bool away = pending->status == KVIST_UNAVAILABLE; /* which to a peer means kvistd itself */
        kvist_connection_send_failure(
            connection,
            pending->id,
            away ? KVIST_SYSTEM : pending->status,
            away
                ? "the blocks in memory are dropped; those of the NVMe tier come back with it, for "
                  "its disk is in trouble (see kvistd's health): clear again then"
            : pending->status == KVIST_BUSY ? "the NVMe tier has yet to read its index, or to "
                                              "write down earlier clears: clear again soon"
            : pending->status == KVIST_NO_SPACE
                ? "the blocks are dropped, but the disk of nvme.path is too full to write this "
                  "down, and a restart would bring those on it back: free a few MiB there, and "
                  "clear again"
                : "the clear could not be made durable; see kvistd's health");
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
    reply.reason = text_of(saved->why);
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

static bool may_see(const struct kvist_connection *connection, const char *tenant)
{
    return connection->is_operator || strcmp(connection->tenant, tenant) == 0;
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
        if (pool == NULL || !may_see(pending->connection, info.tenant)) {
            continue;
        }
        pending->waiting++;
        enum kvist_status status = kvist_store_clear(daemon->store, pool, on_cleared, pending);
        if (status != KVIST_OK) {
            pending_refused(pending, status);
        }
    }
}

static void on_clear(struct kvist_daemon *daemon,
                     struct kvist_connection *connection,
                     const Kvist__Wire__Envelope *envelope)
{
    const Kvist__Wire__Clear *clear = envelope->clear;
    struct kvist_store_pool *pool = NULL;
    bool all = clear->scope == KVIST__WIRE__CLEAR__SCOPE__SCOPE_ALL;
    if (!all) {
        pool = kvist_store_pool_lookup(daemon->store, clear->pool_id.data);
        if (pool == NULL || !may_see(connection, kvist_store_pool_tenant(pool))) {
            fail(connection, envelope->id, KVIST_NOT_FOUND, "no pool of this tenant has that id");
            return;
        }
    } else if (!connection->is_tool) {
        fail(connection, envelope->id, KVIST_DENIED, "an engine clears its own pools, one by one");
        return;
    }
    struct kvist_pending *pending = pending_create(connection, envelope->id);
    if (pending == NULL) {
        return;
    }
    enum kvist_status status = KVIST_OK;
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

static void on_admin(struct kvist_daemon *daemon,
                     struct kvist_connection *connection,
                     const Kvist__Wire__Envelope *envelope)
{
    if (!connection->is_operator) {
        fail(connection,
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
        kvist_connection_send_failure(
            connection, envelope->id, status, save_refused_text(status));
    }
}

/* --- For operators --------------------------------------------------------------------------- */

static void on_stat(struct kvist_daemon *daemon,
                    struct kvist_connection *connection,
                    const Kvist__Wire__Envelope *envelope)
{
    double values[KVIST_METRIC_COUNT];
    char health[KVIST_HEALTH_BYTES];
    Kvist__Wire__Metric metrics[KVIST_METRIC_COUNT];
    Kvist__Wire__Metric *pointers[KVIST_METRIC_COUNT];
    kvist_metrics_read(&daemon->metrics, values);
    kvist_metrics_health(&daemon->metrics, health);
    for (size_t index = 0; index < KVIST_METRIC_COUNT; index++) {
        const struct kvist_metric_row *row = &kvist_metric_rows[index];
        kvist__wire__metric__init(&metrics[index]);
        metrics[index].name = text_of(row->name);
        metrics[index].unit = text_of(row->unit);
        metrics[index].help = text_of(row->help);
        metrics[index].counter = row->kind == KVIST_METRIC_COUNTER;
        metrics[index].value = values[index];
        pointers[index] = &metrics[index];
    }
    Kvist__Wire__StatReply reply;
    kvist__wire__stat_reply__init(&reply);
    reply.metrics = pointers;
    reply.n_metrics = KVIST_METRIC_COUNT;
    reply.health = health;
    Kvist__Wire__Envelope answer = KVIST__WIRE__ENVELOPE__INIT;
    answer.id = envelope->id;
    answer.body_case = KVIST__WIRE__ENVELOPE__BODY_STAT_REPLY;
    answer.stat_reply = &reply;
    kvist_connection_send(connection, &answer, NULL, 0);
}

struct list_reply {
    struct kvist_store_pool_info infos[POOLS_IN_REPLY];
    Kvist__Wire__PoolInfo pools[POOLS_IN_REPLY];
    Kvist__Wire__PoolInfo *pool_pointers[POOLS_IN_REPLY];
    Kvist__Wire__SessionInfo sessions[KVIST_SESSIONS_MAX];
    Kvist__Wire__SessionInfo *session_pointers[KVIST_SESSIONS_MAX];
    uint32_t pids[KVIST_SESSIONS_MAX][KVIST_RANKS_MAX + 1];
};

/* Pools from `offset` on. @return where the next reply begins, 0 when there is nothing more */
static uint32_t list_pools(struct kvist_daemon *daemon,
                           const struct kvist_connection *connection,
                           uint32_t offset,
                           struct list_reply *list,
                           size_t *count_out)
{
    size_t count = 0;
    struct kvist_store_pool_info info;
    uint32_t index = offset;
    kvist_store_count_leases(daemon->store);
    for (; kvist_store_pool_info(daemon->store, index, &info); index++) {
        if (!may_see(connection, info.tenant)) {
            continue;
        }
        if (count == POOLS_IN_REPLY) {
            *count_out = count;
            return index;
        }
        list->infos[count] = info;
        const struct kvist_store_pool_info *from = &list->infos[count];
        Kvist__Wire__PoolInfo *to = &list->pools[count];
        kvist__wire__pool_info__init(to);
        to->pool_id = bytes_of(from->pool_id, KVIST_KEY_BYTES);
        to->tenant = text_of(from->tenant);
        to->description = text_of(from->description);
        to->slot_bytes = from->slot_bytes;
        to->segments = from->segments;
        to->dram_blocks = from->slots_ready;
        to->dram_bytes = from->block_bytes_ready;
        to->nvme_blocks = from->nvme_blocks;
        to->leased_slots = from->slots_leased;
        to->granted_slots = from->slots_granted;
        to->free_slots = from->slots_free;
        to->generation = from->generation;
        to->sessions = from->sessions;
        list->pool_pointers[count++] = to;
    }
    *count_out = count;
    return 0;
}

static size_t list_sessions(struct kvist_daemon *daemon,
                            const struct kvist_connection *connection,
                            struct list_reply *list)
{
    size_t count = 0;
    for (struct kvist_session *session = daemon->sessions.first;
         session != NULL && count < KVIST_SESSIONS_MAX;
         session = session->next) {
        if (!may_see(connection, session->tenant)) {
            continue;
        }
        struct kvist_store_session_info info;
        kvist_store_session_info(session->store, &info);
        Kvist__Wire__SessionInfo *to = &list->sessions[count];
        kvist__wire__session_info__init(to);
        to->session_id = bytes_of(session->id, sizeof(session->id));
        to->name = session->name;
        to->tenant = session->tenant;
        to->rank_count = session->rank_count;
        to->leased_slots = info.slots_leased;
        to->granted_slots = info.slots_granted;
        to->pids = list->pids[count];
        for (const struct kvist_process *process = session->processes;
             process != NULL && to->n_pids < KVIST_RANKS_MAX + 1;
             process = process->next) {
            to->pids[to->n_pids++] = (uint32_t)process->pid;
        }
        to->processes = (uint32_t)to->n_pids;
        list->session_pointers[count++] = to;
    }
    return count;
}

static void on_list(struct kvist_daemon *daemon,
                    struct kvist_connection *connection,
                    const Kvist__Wire__Envelope *envelope)
{
    struct list_reply *list = calloc(1, sizeof(*list));
    if (list == NULL) {
        fail(connection, envelope->id, KVIST_NO_MEMORY, "kvistd is out of memory");
        return;
    }
    uint32_t offset = envelope->list->offset;
    Kvist__Wire__ListReply reply = KVIST__WIRE__LIST_REPLY__INIT;
    reply.next_offset = list_pools(daemon, connection, offset, list, &reply.n_pools);
    reply.pools = list->pool_pointers;
    reply.n_sessions = offset == 0 ? list_sessions(daemon, connection, list) : 0;
    reply.sessions = list->session_pointers;
    Kvist__Wire__Envelope answer = KVIST__WIRE__ENVELOPE__INIT;
    answer.id = envelope->id;
    answer.body_case = KVIST__WIRE__ENVELOPE__BODY_LIST_REPLY;
    answer.list_reply = &reply;
    kvist_connection_send(connection, &answer, NULL, 0);
    free(list);
}

struct inspect_reply {
    Kvist__Wire__InspectReply__Place places[KVIST_POOLS_MAX];
    Kvist__Wire__InspectReply__Place *pointers[KVIST_POOLS_MAX];
    uint8_t pool_ids[KVIST_POOLS_MAX][KVIST_KEY_BYTES];
    uint8_t parent_tags[KVIST_POOLS_MAX][sizeof(uint64_t)];
};

static void add_place(struct inspect_reply *inspect,
                      size_t count,
                      const struct kvist_store_pool_info *pool,
                      const struct kvist_store_block_info *block)
{
    Kvist__Wire__InspectReply__Place *to = &inspect->places[count];
    kvist__wire__inspect_reply__place__init(to);
    memcpy(inspect->pool_ids[count], pool->pool_id, KVIST_KEY_BYTES);
    for (size_t byte = 0; byte < sizeof(uint64_t); byte++) {
        inspect->parent_tags[count][byte] = (uint8_t)(block->parent_tag >> (8 * byte));
    }
    to->pool_id = bytes_of(inspect->pool_ids[count], KVIST_KEY_BYTES);
    to->parent_tag = bytes_of(inspect->parent_tags[count], sizeof(uint64_t));
    to->tier = text_of(!block->in_dram ? "nvme" : block->on_nvme ? "dram+nvme" : "dram");
    to->block_bytes = block->block_bytes;
    to->generation = block->generation;
    to->checksum = block->checksum;
    to->checksummed = block->checksummed;
    to->leased = block->leased;
    inspect->pointers[count] = to;
}

static void on_inspect(struct kvist_daemon *daemon,
                       struct kvist_connection *connection,
                       const Kvist__Wire__Envelope *envelope)
{
    struct inspect_reply *inspect = calloc(1, sizeof(*inspect));
    if (inspect == NULL) {
        fail(connection, envelope->id, KVIST_NO_MEMORY, "kvistd is out of memory");
        return;
    }
    size_t count = 0;
    struct kvist_store_pool_info info;
    kvist_store_count_leases(daemon->store);
    for (uint32_t index = 0; kvist_store_pool_info(daemon->store, index, &info); index++) {
        struct kvist_store_pool *pool = kvist_store_pool_lookup(daemon->store, info.pool_id);
        struct kvist_store_block_info block;
        if (pool != NULL && may_see(connection, info.tenant) && count < KVIST_POOLS_MAX &&
            kvist_store_inspect(pool, envelope->inspect->key.data, &block) == KVIST_OK) {
            add_place(inspect, count++, &info, &block);
        }
    }
    Kvist__Wire__InspectReply reply = KVIST__WIRE__INSPECT_REPLY__INIT;
    reply.places = inspect->pointers;
    reply.n_places = count;
    Kvist__Wire__Envelope answer = KVIST__WIRE__ENVELOPE__INIT;
    answer.id = envelope->id;
    answer.body_case = KVIST__WIRE__ENVELOPE__BODY_INSPECT_REPLY;
    answer.inspect_reply = &reply;
    kvist_connection_send(connection, &answer, NULL, 0);
    free(inspect);
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
        on_clear(daemon, connection, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_STAT:
        on_stat(daemon, connection, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_LIST:
        on_list(daemon, connection, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_INSPECT:
        on_inspect(daemon, connection, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_ADMIN:
        on_admin(daemon, connection, envelope);
        break;
    default: /* of a newer peer */
        if (envelope->id != 0) {
            fail(connection, envelope->id, KVIST_UNSUPPORTED, "this kvistd does not know that");
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
