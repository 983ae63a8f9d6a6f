#include "proto/wire/message.h"

#include "proto/base/check.h"
#include "proto/base/fault.h"

#include <kvist/version.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SESSION_ID_BYTES   16U
#define PARENT_TAG_BYTES   8U
#define SMALL_BYTES        1024U
#define UNPACK_HEADER      16U /* what malloc itself takes for an allocation */
#define SLOTS_MAX          (KVIST_SEGMENTS_MAX * (KVIST_SEGMENT_BYTES_MAX / KVIST_BLOCK_BYTES_MIN))
#define PROCESSES_MAX      (KVIST_RANKS_MAX + 1U)
#define IDENTITY_SHAPE_MAX KVIST_KEY_BYTES

/* Return PROTOCOL with a sentence from the function around it unless the condition holds. */
#define REQUIRE(condition, ...)                                                                    \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            return kvist_error_set(err, KVIST_PROTOCOL, 0, "peer", __VA_ARGS__);                   \
        }                                                                                          \
    } while (0)

/* Hand a failure on. */
#define TRY(expression)                                                                            \
    do {                                                                                           \
        enum kvist_status try_status = (expression);                                               \
        if (try_status != KVIST_OK) {                                                              \
            return try_status;                                                                     \
        }                                                                                          \
    } while (0)

/* --- Checks of parts ------------------------------------------------------------------------ */

static enum kvist_status check_length(const ProtobufCBinaryData *data,
                                      size_t expected,
                                      const char *what,
                                      struct kvist_error *err)
{
    REQUIRE(data->len == expected, "%s has %zu bytes, not %zu", what, data->len, expected);
    return KVIST_OK;
}

static enum kvist_status
check_text(const char *text, size_t bytes_max, const char *what, struct kvist_error *err)
{
    REQUIRE(strnlen(text, bytes_max + 1) <= bytes_max, "%s is over %zu bytes", what, bytes_max);
    return KVIST_OK;
}

static enum kvist_status
check_count(size_t count, size_t count_max, const char *what, struct kvist_error *err)
{
    REQUIRE(count <= count_max, "%zu %s in a message; %zu are allowed", count, what, count_max);
    return KVIST_OK;
}

static enum kvist_status check_pool(uint32_t pool, struct kvist_error *err)
{
    REQUIRE(pool < KVIST_SESSION_POOLS_MAX, "no session has a pool %u", pool);
    return KVIST_OK;
}

static enum kvist_status
check_segment(uint32_t pool, uint32_t segment, uint32_t serial, struct kvist_error *err)
{
    TRY(check_pool(pool, err));
    REQUIRE(segment < KVIST_SEGMENTS_MAX, "no pool has a segment %u", segment);
    REQUIRE(serial != 0, "segment without a serial");
    return KVIST_OK;
}

static enum kvist_status
check_slot(uint32_t slot, uint32_t ticket, uint64_t reservation, struct kvist_error *err)
{
    REQUIRE(slot < SLOTS_MAX, "no pool has a slot %u", slot);
    REQUIRE(ticket < KVIST_GRANTS_MAX, "no session has a ticket %u", ticket);
    REQUIRE(reservation != 0, "slot without a reservation");
    return KVIST_OK;
}

static enum kvist_status check_slot_bytes(uint64_t bytes, struct kvist_error *err)
{
    REQUIRE(bytes >= KVIST_BLOCK_BYTES_MIN && bytes <= KVIST_BLOCK_BYTES_MAX &&
                bytes % KVIST_SLOT_ALIGN_BYTES == 0,
            "slots of %llu bytes; %llu to %llu in steps of %llu are allowed",
            (unsigned long long)bytes,
            KVIST_BLOCK_BYTES_MIN,
            KVIST_BLOCK_BYTES_MAX,
            KVIST_SLOT_ALIGN_BYTES);
    return KVIST_OK;
}

static enum kvist_status check_map_bytes(uint64_t bytes, struct kvist_error *err)
{
    REQUIRE(bytes != 0 && bytes % KVIST_SLOT_ALIGN_BYTES == 0 && bytes <= INT64_MAX,
            "shared memory of %llu bytes",
            (unsigned long long)bytes);
    return KVIST_OK;
}

/* --- Checks of bodies ----------------------------------------------------------------------- */

static enum kvist_status check_nothing(const Kvist__Wire__Envelope *envelope,
                                       struct kvist_error *err)
{
    (void)envelope;
    (void)err;
    return KVIST_OK;
}

static enum kvist_status check_hello(const Kvist__Wire__Envelope *envelope, struct kvist_error *err)
{
    const Kvist__Wire__Hello *hello = envelope->hello;
    if (hello->wire_major != KVIST_WIRE_MAJOR) {
        return KVIST_OK; /* the fields may mean something else there */
    }
    TRY(check_text(hello->name, KVIST_NAME_BYTES_MAX, "name", err));
    switch ((int)hello->role) {
    case KVIST__WIRE__ROLE__ROLE_TOOL:
        return check_length(&hello->session_id, 0, "session id of a tool", err);
    case KVIST__WIRE__ROLE__ROLE_SCHEDULER:
    case KVIST__WIRE__ROLE__ROLE_WORKER:
    case KVIST__WIRE__ROLE__ROLE_ENGINE:
        break;
    default:
        REQUIRE(false, "role %d does not exist", (int)hello->role);
    }
    TRY(check_length(&hello->session_id, SESSION_ID_BYTES, "session id", err));
    REQUIRE(hello->rank_count > 0 && hello->rank_count <= KVIST_RANKS_MAX,
            "%u ranks; 1 to %u are allowed",
            hello->rank_count,
            KVIST_RANKS_MAX);
    REQUIRE(hello->rank < hello->rank_count,
            "rank %u of %u does not exist",
            hello->rank,
            hello->rank_count);
    REQUIRE(hello->role != KVIST__WIRE__ROLE__ROLE_ENGINE || hello->rank_count == 1,
            "an engine in one process has one rank, not %u",
            hello->rank_count);
    return KVIST_OK;
}

static enum kvist_status check_hello_reply(const Kvist__Wire__Envelope *envelope,
                                           struct kvist_error *err)
{
    const Kvist__Wire__HelloReply *reply = envelope->hello_reply;
    if (reply->wire_major != KVIST_WIRE_MAJOR) {
        return KVIST_OK;
    }
    TRY(check_text(reply->version, KVIST_NAME_BYTES_MAX, "version", err));
    return reply->page_bytes != 0 ? check_map_bytes(reply->page_bytes, err) : KVIST_OK;
}

static enum kvist_status check_open_pool(const Kvist__Wire__Envelope *envelope,
                                         struct kvist_error *err)
{
    const Kvist__Wire__OpenPool *open = envelope->open_pool;
    REQUIRE(open->n_fields > 0, "pool without an identity");
    TRY(check_count(open->n_fields, KVIST_IDENTITY_FIELDS_MAX, "identity fields", err));
    size_t room = KVIST_IDENTITY_BYTES_MAX;
    for (size_t index = 0; index < open->n_fields; index++) {
        const Kvist__Wire__OpenPool__Field *field = open->fields[index];
        size_t name_bytes = strnlen(field->name, room + 1);
        REQUIRE(name_bytes > 0, "identity field %zu has no name", index);
        REQUIRE(name_bytes <= room && field->value.len <= room - name_bytes,
                "identity is over %u bytes",
                KVIST_IDENTITY_BYTES_MAX);
        room -= name_bytes + field->value.len;
    }
    REQUIRE(open->shape.len <= IDENTITY_SHAPE_MAX, "shape of %zu bytes", open->shape.len);
    return check_slot_bytes(open->slot_bytes, err);
}

static enum kvist_status check_pool_reply(const Kvist__Wire__Envelope *envelope,
                                          struct kvist_error *err)
{
    const Kvist__Wire__PoolReply *reply = envelope->pool_reply;
    TRY(check_pool(reply->pool, err));
    TRY(check_length(&reply->pool_id, KVIST_KEY_BYTES, "pool id", err));
    TRY(check_map_bytes(reply->map_bytes, err));
    TRY(check_slot_bytes(reply->slot_bytes, err));
    REQUIRE(reply->slots_per_segment > 0 &&
                reply->slots_per_segment <= KVIST_SEGMENT_BYTES_MAX / reply->slot_bytes,
            "segments of %u slots",
            reply->slots_per_segment);
    return KVIST_OK;
}

static enum kvist_status check_clear(const Kvist__Wire__Envelope *envelope, struct kvist_error *err)
{
    const Kvist__Wire__Clear *clear = envelope->clear;
    switch ((int)clear->scope) {
    case KVIST__WIRE__CLEAR__SCOPE__SCOPE_POOL:
        return check_length(&clear->pool_id, KVIST_KEY_BYTES, "pool id", err);
    case KVIST__WIRE__CLEAR__SCOPE__SCOPE_ALL:
        return check_length(&clear->pool_id, 0, "pool id of a clear of all pools", err);
    default:
        REQUIRE(false, "scope %d does not exist", (int)clear->scope);
    }
}

static enum kvist_status check_stat_reply(const Kvist__Wire__Envelope *envelope,
                                          struct kvist_error *err)
{
    const Kvist__Wire__StatReply *reply = envelope->stat_reply;
    TRY(check_text(reply->health, KVIST_TEXT_BYTES_MAX, "health", err));
    TRY(check_count(reply->n_metrics, KVIST_METRICS_MAX, "metrics", err));
    for (size_t index = 0; index < reply->n_metrics; index++) {
        const Kvist__Wire__Metric *metric = reply->metrics[index];
        TRY(check_text(metric->name, KVIST_TEXT_BYTES_MAX, "metric name", err));
        TRY(check_text(metric->unit, KVIST_NAME_BYTES_MAX, "metric unit", err));
        TRY(check_text(metric->help, KVIST_TEXT_BYTES_MAX, "metric help", err));
    }
    return KVIST_OK;
}

static enum kvist_status check_list_reply(const Kvist__Wire__Envelope *envelope,
                                          struct kvist_error *err)
{
    const Kvist__Wire__ListReply *reply = envelope->list_reply;
    TRY(check_count(reply->n_pools, KVIST_POOLS_MAX, "pools", err));
    TRY(check_count(reply->n_sessions, KVIST_SESSIONS_MAX, "sessions", err));
    for (size_t index = 0; index < reply->n_pools; index++) {
        const Kvist__Wire__PoolInfo *pool = reply->pools[index];
        TRY(check_length(&pool->pool_id, KVIST_KEY_BYTES, "pool id", err));
        TRY(check_text(pool->tenant, KVIST_TENANT_BYTES_MAX, "tenant", err));
        TRY(check_text(pool->description, KVIST_TEXT_BYTES_MAX, "description", err));
    }
    for (size_t index = 0; index < reply->n_sessions; index++) {
        const Kvist__Wire__SessionInfo *session = reply->sessions[index];
        TRY(check_length(&session->session_id, SESSION_ID_BYTES, "session id", err));
        TRY(check_text(session->name, KVIST_NAME_BYTES_MAX, "session name", err));
        TRY(check_text(session->tenant, KVIST_TENANT_BYTES_MAX, "tenant", err));
        TRY(check_count(session->n_pids, PROCESSES_MAX, "processes of a session", err));
    }
    return KVIST_OK;
}

static enum kvist_status check_admin_reply(const Kvist__Wire__Envelope *envelope,
                                           struct kvist_error *err)
{
    return check_text(envelope->admin_reply->reason, KVIST_TEXT_BYTES_MAX, "reason", err);
}

static enum kvist_status check_inspect(const Kvist__Wire__Envelope *envelope,
                                       struct kvist_error *err)
{
    return check_length(&envelope->inspect->key, KVIST_KEY_BYTES, "key", err);
}

static enum kvist_status check_inspect_reply(const Kvist__Wire__Envelope *envelope,
                                             struct kvist_error *err)
{
    const Kvist__Wire__InspectReply *reply = envelope->inspect_reply;
    TRY(check_count(reply->n_places, KVIST_POOLS_MAX, "places", err));
    for (size_t index = 0; index < reply->n_places; index++) {
        const Kvist__Wire__InspectReply__Place *place = reply->places[index];
        TRY(check_length(&place->pool_id, KVIST_KEY_BYTES, "pool id", err));
        TRY(check_text(place->tier, KVIST_NAME_BYTES_MAX, "tier", err));
        TRY(check_length(&place->parent_tag, PARENT_TAG_BYTES, "parent tag", err));
    }
    return KVIST_OK;
}

static enum kvist_status check_admin(const Kvist__Wire__Envelope *envelope, struct kvist_error *err)
{
    int action = (int)envelope->admin->action;
    REQUIRE(action == KVIST__WIRE__ADMIN__ACTION__ACTION_RELOAD ||
                action == KVIST__WIRE__ADMIN__ACTION__ACTION_SAVE,
            "admin action %d does not exist",
            action);
    return KVIST_OK;
}

static enum kvist_status check_mapped(const Kvist__Wire__Envelope *envelope,
                                      struct kvist_error *err)
{
    const Kvist__Wire__Mapped *mapped = envelope->mapped;
    return check_segment(mapped->pool, mapped->segment, mapped->serial, err);
}

static enum kvist_status check_unmapped(const Kvist__Wire__Envelope *envelope,
                                        struct kvist_error *err)
{
    const Kvist__Wire__Unmapped *unmapped = envelope->unmapped;
    return check_segment(unmapped->pool, unmapped->segment, unmapped->serial, err);
}

static enum kvist_status check_commit(const Kvist__Wire__Envelope *envelope,
                                      struct kvist_error *err)
{
    const Kvist__Wire__Commit *commit = envelope->commit;
    TRY(check_pool(commit->pool, err));
    TRY(check_count(commit->n_blocks, KVIST_KEYS_MAX, "blocks", err));
    TRY(check_count(commit->used, KVIST_GRANTS_MAX, "used slots", err));
    for (size_t index = 0; index < commit->n_blocks; index++) {
        const Kvist__Wire__Commit__Block *block = commit->blocks[index];
        TRY(check_slot(block->slot, block->ticket, block->reservation, err));
        TRY(check_length(&block->key, KVIST_KEY_BYTES, "key", err));
        REQUIRE(block->block_bytes > 0 && block->block_bytes <= KVIST_BLOCK_BYTES_MAX,
                "block of %llu bytes",
                (unsigned long long)block->block_bytes);
    }
    return KVIST_OK;
}

static enum kvist_status check_return(const Kvist__Wire__Envelope *envelope,
                                      struct kvist_error *err)
{
    const Kvist__Wire__Return *back = envelope->return_slots;
    TRY(check_pool(back->pool, err));
    TRY(check_count(back->n_slots, KVIST_GRANTS_MAX, "slots", err));
    for (size_t index = 0; index < back->n_slots; index++) {
        const Kvist__Wire__Return__Slot *slot = back->slots[index];
        TRY(check_slot(slot->slot, slot->ticket, slot->reservation, err));
    }
    return KVIST_OK;
}

static enum kvist_status check_keys(const ProtobufCBinaryData *keys,
                                    size_t key_count,
                                    size_t key_count_max,
                                    struct kvist_error *err)
{
    TRY(check_count(key_count, key_count_max, "keys", err));
    for (size_t index = 0; index < key_count; index++) {
        TRY(check_length(&keys[index], KVIST_KEY_BYTES, "key", err));
    }
    return KVIST_OK;
}

static enum kvist_status check_prefetch(const Kvist__Wire__Envelope *envelope,
                                        struct kvist_error *err)
{
    const Kvist__Wire__Prefetch *prefetch = envelope->prefetch;
    TRY(check_pool(prefetch->pool, err));
    return check_keys(prefetch->keys, prefetch->n_keys, KVIST_KEYS_MAX, err);
}

static enum kvist_status check_suspect(const Kvist__Wire__Envelope *envelope,
                                       struct kvist_error *err)
{
    const Kvist__Wire__Suspect *suspect = envelope->suspect;
    TRY(check_pool(suspect->pool, err));
    return check_keys(suspect->keys, suspect->n_keys, KVIST_SUSPECT_KEYS_MAX, err);
}

static enum kvist_status check_close_pool(const Kvist__Wire__Envelope *envelope,
                                          struct kvist_error *err)
{
    return check_pool(envelope->close_pool->pool, err);
}

static enum kvist_status check_failure(const Kvist__Wire__Envelope *envelope,
                                       struct kvist_error *err)
{
    REQUIRE(envelope->failure->status != KVIST_OK, "failure that is none");
    return check_text(envelope->failure->text, KVIST_TEXT_BYTES_MAX, "text of a failure", err);
}

static enum kvist_status check_grant(const Kvist__Wire__Envelope *envelope, struct kvist_error *err)
{
    const Kvist__Wire__Grant *grant = envelope->grant;
    TRY(check_pool(grant->pool, err));
    TRY(check_count(grant->n_slots, KVIST_GRANTS_MAX, "slots", err));
    for (size_t index = 0; index < grant->n_slots; index++) {
        const Kvist__Wire__Grant__Slot *slot = grant->slots[index];
        TRY(check_slot(slot->slot, slot->ticket, slot->reservation, err));
    }
    return KVIST_OK;
}

static enum kvist_status check_recall(const Kvist__Wire__Envelope *envelope,
                                      struct kvist_error *err)
{
    TRY(check_pool(envelope->recall->pool, err));
    return check_count(envelope->recall->count, KVIST_GRANTS_MAX, "recalled slots", err);
}

static enum kvist_status check_new_segment(const Kvist__Wire__Envelope *envelope,
                                           struct kvist_error *err)
{
    const Kvist__Wire__Segment *segment = envelope->segment;
    TRY(check_segment(segment->pool, segment->segment, segment->serial, err));
    TRY(check_map_bytes(segment->bytes, err));
    REQUIRE(segment->bytes <= KVIST_SEGMENT_BYTES_MAX,
            "segment of %llu bytes",
            (unsigned long long)segment->bytes);
    return KVIST_OK;
}

static enum kvist_status check_pool_map(const Kvist__Wire__Envelope *envelope,
                                        struct kvist_error *err)
{
    TRY(check_pool(envelope->pool_map->pool, err));
    return check_map_bytes(envelope->pool_map->map_bytes, err);
}

static enum kvist_status check_revoke(const Kvist__Wire__Envelope *envelope,
                                      struct kvist_error *err)
{
    const Kvist__Wire__Revoke *revoke = envelope->revoke;
    return check_segment(revoke->pool, revoke->segment, revoke->serial, err);
}

static enum kvist_status check_promoted(const Kvist__Wire__Envelope *envelope,
                                        struct kvist_error *err)
{
    TRY(check_pool(envelope->promoted->pool, err));
    return check_count(envelope->promoted->blocks, KVIST_PREFETCHES_MAX, "promoted blocks", err);
}

/* --- The table of bodies -------------------------------------------------------------------- */

enum body_kind {
    BODY_REQUEST, /* from a client, with an id */
    BODY_POSTED,  /* from a client, without */
    BODY_REPLY,   /* from the daemon, with the request's id */
    BODY_PUSHED,  /* from the daemon, without */
    BODY_FAILURE  /* from the daemon; without an id it is about the connection */
};

struct body_row {
    Kvist__Wire__Envelope__BodyCase body;
    enum body_kind kind;
    const char *name;
    enum kvist_status (*check)(const Kvist__Wire__Envelope *envelope, struct kvist_error *err);
};

/* clang-format off */
#define ROW(body, kind, name, check) {KVIST__WIRE__ENVELOPE__BODY_##body, BODY_##kind, name, check}
static const struct body_row body_table[] = {
    ROW(HELLO,         REQUEST, "hello",         check_hello),
    ROW(OPEN_POOL,     REQUEST, "open_pool",     check_open_pool),
    ROW(CLEAR,         REQUEST, "clear",         check_clear),
    ROW(STAT,          REQUEST, "stat",          check_nothing),
    ROW(LIST,          REQUEST, "list",          check_nothing),
    ROW(INSPECT,       REQUEST, "inspect",       check_inspect),
    ROW(ADMIN,         REQUEST, "admin",         check_admin),
    ROW(MAPPED,        POSTED,  "mapped",        check_mapped),
    ROW(UNMAPPED,      POSTED,  "unmapped",      check_unmapped),
    ROW(COMMIT,        POSTED,  "commit",        check_commit),
    ROW(RETURN_SLOTS,  POSTED,  "return_slots",  check_return),
    ROW(PREFETCH,      POSTED,  "prefetch",      check_prefetch),
    ROW(CLOSE_POOL,    POSTED,  "close_pool",    check_close_pool),
    ROW(SUSPECT,       POSTED,  "suspect",       check_suspect),
    ROW(FAILURE,       FAILURE, "failure",       check_failure),
    ROW(HELLO_REPLY,   REPLY,   "hello_reply",   check_hello_reply),
    ROW(POOL_REPLY,    REPLY,   "pool_reply",    check_pool_reply),
    ROW(CLEAR_REPLY,   REPLY,   "clear_reply",   check_nothing),
    ROW(STAT_REPLY,    REPLY,   "stat_reply",    check_stat_reply),
    ROW(LIST_REPLY,    REPLY,   "list_reply",    check_list_reply),
    ROW(INSPECT_REPLY, REPLY,   "inspect_reply", check_inspect_reply),
    ROW(ADMIN_REPLY,   REPLY,   "admin_reply",   check_admin_reply),
    ROW(GRANT,         PUSHED,  "grant",         check_grant),
    ROW(SEGMENT,       PUSHED,  "segment",       check_new_segment),
    ROW(POOL_MAP,      PUSHED,  "pool_map",      check_pool_map),
    ROW(REVOKE,        PUSHED,  "revoke",        check_revoke),
    ROW(PROMOTED,      PUSHED,  "promoted",      check_promoted),
    ROW(RECALL,        PUSHED,  "recall",        check_recall),
};
#undef ROW
/* clang-format on */

static const struct body_row *find_row(const Kvist__Wire__Envelope *envelope)
{
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(body_table); index++) {
        if (body_table[index].body == envelope->body_case) {
            return &body_table[index];
        }
    }
    return NULL;
}

static enum kvist_status check_body(const Kvist__Wire__Envelope *envelope,
                                    const struct body_row *row,
                                    struct kvist_error *err)
{
    if (row->kind == BODY_REQUEST || row->kind == BODY_REPLY) {
        REQUIRE(envelope->id != 0, "%s without an id", row->name);
    } else if (row->kind != BODY_FAILURE) {
        REQUIRE(envelope->id == 0, "%s with an id", row->name);
    }
    return row->check(envelope, err);
}

static enum kvist_status
check_envelope(const Kvist__Wire__Envelope *envelope, bool from_client, struct kvist_error *err)
{
    const struct body_row *row = find_row(envelope);
    if (row == NULL) {
        REQUIRE(envelope->base.n_unknown_fields > 0, "message without a body");
        return KVIST_OK; /* a newer peer's; see Versions in the header */
    }
    bool clients = row->kind == BODY_REQUEST || row->kind == BODY_POSTED;
    REQUIRE(clients == from_client, "%s came from the wrong side", row->name);
    return check_body(envelope, row, err);
}

/* --- Unpacking ------------------------------------------------------------------------------ */

/*
 * A few bytes can describe an empty submessage that takes a hundred in memory. The allocator stops
 * the unpacking of a message that asks for more than any honest one needs.
 */
struct unpack_budget {
    size_t left;
    bool out_of_memory;
};

static void *budget_alloc(void *ctx, size_t bytes)
{
    struct unpack_budget *budget = ctx;
    if (bytes > KVIST_MESSAGE_MEMORY_MAX || bytes + UNPACK_HEADER > budget->left) {
        return NULL;
    }
    budget->left -= bytes + UNPACK_HEADER;
    void *memory = kvist_fault_point("message.alloc") ? NULL : malloc(bytes);
    budget->out_of_memory = budget->out_of_memory || memory == NULL;
    return memory;
}

static void budget_free(void *ctx, void *pointer)
{
    (void)ctx;
    free(pointer);
}

enum kvist_status kvist_message_unpack(const uint8_t *bytes,
                                       size_t length,
                                       bool from_client,
                                       Kvist__Wire__Envelope **envelope_out,
                                       struct kvist_error *err)
{
    struct unpack_budget budget = {.left = KVIST_MESSAGE_MEMORY_MAX};
    ProtobufCAllocator allocator = {
        .alloc = budget_alloc,
        .free = budget_free,
        .allocator_data = &budget,
    };
    Kvist__Wire__Envelope *envelope = kvist__wire__envelope__unpack(&allocator, length, bytes);
    if (envelope == NULL && budget.out_of_memory) {
        return kvist_error_set(err,
                               KVIST_NO_MEMORY,
                               ENOMEM,
                               "message",
                               "no memory for a message of %zu bytes",
                               length);
    }
    if (envelope == NULL) {
        return kvist_error_set(
            err, KVIST_PROTOCOL, 0, "peer", "%zu bytes that are no message, or too big", length);
    }
    enum kvist_status status = check_envelope(envelope, from_client, err);
    if (status != KVIST_OK) {
        kvist_message_free(&envelope);
        return status;
    }
    *envelope_out = envelope;
    return KVIST_OK;
}

void kvist_message_free(Kvist__Wire__Envelope **envelope)
{
    /* malloc() is under both allocators, so the default one may free. */
    kvist__wire__envelope__free_unpacked(*envelope, NULL);
    *envelope = NULL;
}

size_t kvist_message_fd_count(const Kvist__Wire__Envelope *envelope)
{
    if (envelope->body_case == KVIST__WIRE__ENVELOPE__BODY_HELLO_REPLY) {
        return envelope->hello_reply->page_bytes != 0 ? 1 : 0;
    }
    return envelope->body_case == KVIST__WIRE__ENVELOPE__BODY_POOL_REPLY ||
           envelope->body_case == KVIST__WIRE__ENVELOPE__BODY_SEGMENT ||
           envelope->body_case == KVIST__WIRE__ENVELOPE__BODY_POOL_MAP;
}

const char *kvist_message_name(const Kvist__Wire__Envelope *envelope)
{
    const struct body_row *row = find_row(envelope);
    return row != NULL ? row->name : "unknown";
}

/* --- Packing -------------------------------------------------------------------------------- */

static enum kvist_status
check_outgoing(const Kvist__Wire__Envelope *envelope, size_t fd_count, struct kvist_error *err)
{
    const struct body_row *row = find_row(envelope);
    if (row == NULL) {
        return kvist_error_set(err, KVIST_INVALID, 0, "message", "message without a body");
    }
    enum kvist_status status = check_body(envelope, row, err);
    if (status != KVIST_OK) {
        if (err != NULL) {
            err->status = KVIST_INVALID;
            err->origin = "message";
        }
        return KVIST_INVALID;
    }
    if (fd_count != kvist_message_fd_count(envelope)) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, "message", "%s with %zu file descriptors", row->name, fd_count);
    }
    return KVIST_OK;
}

enum kvist_status kvist_message_put(struct kvist_frame_writer *writer,
                                    const Kvist__Wire__Envelope *envelope,
                                    const int *fds,
                                    size_t fd_count,
                                    struct kvist_error *err)
{
    enum kvist_status status = check_outgoing(envelope, fd_count, err);
    if (status != KVIST_OK) {
        return status;
    }
    uint8_t small[SMALL_BYTES];
    size_t length = kvist__wire__envelope__get_packed_size(envelope);
    if (length > KVIST_FRAME_BYTES_MAX) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, "message", "message of %zu bytes is over a frame", length);
    }
    uint8_t *bytes = small;
    if (length > sizeof(small)) {
        bytes = kvist_fault_point("message.alloc") ? NULL : malloc(length);
    }
    if (bytes == NULL) {
        return kvist_error_set(
            err, KVIST_NO_MEMORY, ENOMEM, "message", "no memory for %zu bytes", length);
    }
    (void)kvist__wire__envelope__pack(envelope, bytes);
    status = kvist_frame_writer_put(writer, bytes, length, fds, fd_count, err);
    if (bytes != small) {
        free(bytes);
    }
    return status;
}

ProtobufCBinaryData kvist_message_bytes(const void *data, size_t length)
{
    union {
        const void *from;
        uint8_t *to;
    } pointer = {.from = data};
    return (ProtobufCBinaryData){.len = length, .data = pointer.to};
}

char *kvist_message_text(const char *text)
{
    union {
        const char *from;
        char *to;
    } pointer = {.from = text};
    return pointer.to;
}
