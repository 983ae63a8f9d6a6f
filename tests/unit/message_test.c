/* message: every limit of every body, the wrong side's bodies, garbage. */
#include "proto/base/check.h"
#include "proto/base/fault.h"
#include "proto/wire/message.h"
#include "tests/support/unit.h"

#include <kvist/version.h>

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define GARBAGE_ROUNDS 20000U
#define LONG_TEXT      8000U

typedef Kvist__Wire__Envelope envelope_type;

static uint8_t bytes64[64];
static char long_text[LONG_TEXT + 1];

static ProtobufCBinaryData data(size_t length)
{
    return (ProtobufCBinaryData){.len = length, .data = bytes64};
}

/* Text of a length. */
static char *text(size_t length)
{
    return long_text + LONG_TEXT - length;
}

static enum kvist_status unpack(const uint8_t *bytes, size_t length, bool from_client)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    envelope_type *envelope = NULL;
    enum kvist_status status = kvist_message_unpack(bytes, length, from_client, &envelope, &err);
    KVIST_TEST_TRUE((status == KVIST_OK) == (envelope != NULL));
    KVIST_TEST_TRUE((status == KVIST_OK) == (err.text[0] == '\0'));
    kvist_message_free(&envelope);
    KVIST_TEST_TRUE(envelope == NULL);
    return status;
}

/* Pack without any check, as a peer of ours would not. */
static enum kvist_status receive(const envelope_type *envelope, bool from_client)
{
    size_t length = kvist__wire__envelope__get_packed_size(envelope);
    uint8_t *bytes = malloc(length + 1);
    KVIST_TEST_FATAL(bytes != NULL);
    (void)kvist__wire__envelope__pack(envelope, bytes);
    enum kvist_status status = unpack(bytes, length, from_client);
    free(bytes);
    return status;
}

static bool is_clients(const envelope_type *envelope)
{
    return envelope->body_case < KVIST__WIRE__ENVELOPE__BODY_FAILURE;
}

static void accepted(const envelope_type *envelope)
{
    KVIST_TEST_STATUS(receive(envelope, is_clients(envelope)), KVIST_OK);
}

static void refused(const envelope_type *envelope)
{
    KVIST_TEST_STATUS(receive(envelope, is_clients(envelope)), KVIST_PROTOCOL);
    struct kvist_frame_writer *writer = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_FATAL(kvist_frame_writer_create(&writer) == KVIST_OK);
    KVIST_TEST_STATUS(kvist_message_put(writer, envelope, NULL, 0, &err), KVIST_INVALID);
    KVIST_TEST_STATUS(err.status, KVIST_INVALID);
    KVIST_TEST_EQUAL(kvist_frame_writer_pending_bytes(writer), 0);
    kvist_frame_writer_destroy(&writer);
}

/* Set one field to a value, expect a refusal, set it back. */
#define REFUSED_WITH(envelope, field, value)                                                       \
    do {                                                                                           \
        __typeof__(field) kept = (field);                                                          \
        (field) = (value);                                                                         \
        refused(envelope);                                                                         \
        (field) = kept;                                                                            \
    } while (0)
#define ACCEPTED_WITH(envelope, field, value)                                                      \
    do {                                                                                           \
        __typeof__(field) kept = (field);                                                          \
        (field) = (value);                                                                         \
        accepted(envelope);                                                                        \
        (field) = kept;                                                                            \
    } while (0)

/* The envelope's body from now on, empty. */
#define BODY(variable, type, CASE, field)                                                          \
    Kvist__Wire__##type variable;                                                                  \
    kvist__wire__##field##__init(&(variable));                                                     \
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_##CASE;                                       \
    envelope.field = &(variable)
#define ENVELOPE(variable, id_value, type, CASE, field)                                            \
    envelope_type envelope = KVIST__WIRE__ENVELOPE__INIT;                                          \
    envelope.id = (id_value);                                                                      \
    BODY(variable, type, CASE, field)

/* `return` is no name for a field. */
#define kvist__wire__return_slots__init kvist__wire__return__init

/* --- From clients ----------------------------------------------------------------------------- */

static void hello(void)
{
    ENVELOPE(body, 1, Hello, HELLO, hello);
    body.wire_major = KVIST_WIRE_MAJOR;
    body.role = KVIST__WIRE__ROLE__ROLE_WORKER;
    body.session_id = data(16);
    body.rank = KVIST_RANKS_MAX - 1;
    body.rank_count = KVIST_RANKS_MAX;
    body.name = text(KVIST_NAME_BYTES_MAX);
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.role, (Kvist__Wire__Role)4);
    REFUSED_WITH(&envelope, body.role, (Kvist__Wire__Role)-1);
    REFUSED_WITH(&envelope, body.role, KVIST__WIRE__ROLE__ROLE_ENGINE);
    REFUSED_WITH(&envelope, body.role, KVIST__WIRE__ROLE__ROLE_TOOL);
    REFUSED_WITH(&envelope, body.session_id, data(15));
    REFUSED_WITH(&envelope, body.session_id, data(17));
    REFUSED_WITH(&envelope, body.session_id, data(0));
    REFUSED_WITH(&envelope, body.rank, KVIST_RANKS_MAX);
    REFUSED_WITH(&envelope, body.rank_count, 0);
    REFUSED_WITH(&envelope, body.rank_count, KVIST_RANKS_MAX + 1);
    REFUSED_WITH(&envelope, body.name, text(KVIST_NAME_BYTES_MAX + 1));
    body.wire_major = KVIST_WIRE_MAJOR + 1; /* refused later, with VERSION */
    ACCEPTED_WITH(&envelope, body.role, (Kvist__Wire__Role)9);
    body.wire_major = KVIST_WIRE_MAJOR;
    body.rank = 0;
    body.rank_count = 1;
    ACCEPTED_WITH(&envelope, body.role, KVIST__WIRE__ROLE__ROLE_ENGINE);
    body.session_id = data(0);
    body.rank_count = 0;
    body.role = KVIST__WIRE__ROLE__ROLE_TOOL;
    accepted(&envelope);
}

static void open_pool(void)
{
    enum { COUNT = KVIST_IDENTITY_FIELDS_MAX + 1 };
    Kvist__Wire__OpenPool__Field field;
    Kvist__Wire__OpenPool__Field *fields[COUNT];
    kvist__wire__open_pool__field__init(&field);
    field.name = text(8);
    field.value = data(32);
    for (size_t index = 0; index < COUNT; index++) {
        fields[index] = &field;
    }
    ENVELOPE(body, 1, OpenPool, OPEN_POOL, open_pool);
    body.fields = fields;
    body.n_fields = KVIST_IDENTITY_FIELDS_MAX;
    body.slot_bytes = KVIST_BLOCK_BYTES_MIN;
    body.shape = data(32);
    accepted(&envelope);
    ACCEPTED_WITH(&envelope, body.slot_bytes, KVIST_BLOCK_BYTES_MAX);
    ACCEPTED_WITH(&envelope, field.value, data(0));
    REFUSED_WITH(&envelope, body.n_fields, KVIST_IDENTITY_FIELDS_MAX + 1);
    REFUSED_WITH(&envelope, body.n_fields, 0);
    REFUSED_WITH(&envelope, body.slot_bytes, 0);
    REFUSED_WITH(&envelope, body.slot_bytes, KVIST_BLOCK_BYTES_MIN + 1);
    REFUSED_WITH(&envelope, body.slot_bytes, KVIST_BLOCK_BYTES_MAX + 4096);
    REFUSED_WITH(&envelope, body.shape, data(33));
    REFUSED_WITH(&envelope, field.name, text(0));
    REFUSED_WITH(&envelope, field.name, text(KVIST_IDENTITY_BYTES_MAX / KVIST_IDENTITY_FIELDS_MAX));
    uint8_t *value = calloc(1, KVIST_IDENTITY_BYTES_MAX);
    KVIST_TEST_FATAL(value != NULL);
    body.n_fields = 1;
    field.value.data = value;
    field.value.len = KVIST_IDENTITY_BYTES_MAX - 8;
    accepted(&envelope);
    REFUSED_WITH(&envelope, field.value.len, KVIST_IDENTITY_BYTES_MAX - 7);
    free(value);
}

static void clear(void)
{
    ENVELOPE(body, 1, Clear, CLEAR, clear);
    body.pool_id = data(32);
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.pool_id, data(31));
    REFUSED_WITH(&envelope, body.pool_id, data(0));
    REFUSED_WITH(&envelope, body.scope, (Kvist__Wire__Clear__Scope)2);
    body.scope = KVIST__WIRE__CLEAR__SCOPE__SCOPE_ALL;
    refused(&envelope);
    body.pool_id = data(0);
    accepted(&envelope);
}

static void stat_and_list(void)
{
    ENVELOPE(body, 1, Stat, STAT, stat);
    accepted(&envelope);
    REFUSED_WITH(&envelope, envelope.id, 0);
    BODY(list, List, LIST, list);
    list.offset = UINT32_MAX;
    accepted(&envelope);
}

static void inspect(void)
{
    ENVELOPE(body, 1, Inspect, INSPECT, inspect);
    body.key = data(32);
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.key, data(33));
}

static void admin(void)
{
    ENVELOPE(body, 1, Admin, ADMIN, admin);
    body.action = KVIST__WIRE__ADMIN__ACTION__ACTION_SAVE;
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.action, KVIST__WIRE__ADMIN__ACTION__ACTION_NONE);
    REFUSED_WITH(&envelope, body.action, (Kvist__Wire__Admin__Action)99);
}

static void mapped_and_unmapped(void)
{
    ENVELOPE(body, 0, Mapped, MAPPED, mapped);
    body.pool = KVIST_SESSION_POOLS_MAX - 1;
    body.segment = KVIST_SEGMENTS_MAX - 1;
    body.serial = 1;
    accepted(&envelope);
    REFUSED_WITH(&envelope, envelope.id, 1);
    REFUSED_WITH(&envelope, body.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, body.segment, KVIST_SEGMENTS_MAX);
    REFUSED_WITH(&envelope, body.serial, 0);
    BODY(unmapped, Unmapped, UNMAPPED, unmapped);
    refused(&envelope);
    unmapped.serial = 1;
    accepted(&envelope);
}

static void commit(void)
{
    enum { COUNT = KVIST_KEYS_MAX + 1 };
    Kvist__Wire__Commit__Block block;
    static Kvist__Wire__Commit__Block *blocks[COUNT];
    kvist__wire__commit__block__init(&block);
    for (size_t index = 0; index < COUNT; index++) {
        blocks[index] = &block;
    }
    block.slot = KVIST_SEGMENTS_MAX * (KVIST_SEGMENT_BYTES_MAX / KVIST_BLOCK_BYTES_MIN) - 1;
    block.ticket = KVIST_GRANTS_MAX - 1;
    block.reservation = 1;
    block.key = data(32);
    block.parent_tag = UINT64_MAX;
    block.block_bytes = KVIST_BLOCK_BYTES_MAX;
    ENVELOPE(body, 0, Commit, COMMIT, commit);
    body.blocks = blocks;
    body.n_blocks = KVIST_KEYS_MAX;
    accepted(&envelope); /* the largest that anyone sends fits a frame and the memory */
    REFUSED_WITH(&envelope, body.n_blocks, KVIST_KEYS_MAX + 1);
    body.n_blocks = 1;
    REFUSED_WITH(&envelope, body.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, block.slot, block.slot + 1);
    body.used = KVIST_GRANTS_MAX;
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.used, KVIST_GRANTS_MAX + 1);
    REFUSED_WITH(&envelope, block.ticket, KVIST_GRANTS_MAX);
    REFUSED_WITH(&envelope, block.reservation, 0);
    REFUSED_WITH(&envelope, block.key, data(31));
    REFUSED_WITH(&envelope, block.block_bytes, 0);
    REFUSED_WITH(&envelope, block.block_bytes, KVIST_BLOCK_BYTES_MAX + 1);
}

static void return_slots(void)
{
    enum { COUNT = KVIST_GRANTS_MAX + 1 };
    Kvist__Wire__Return__Slot slot;
    static Kvist__Wire__Return__Slot *slots[COUNT];
    kvist__wire__return__slot__init(&slot);
    slot.reservation = 1;
    for (size_t index = 0; index < COUNT; index++) {
        slots[index] = &slot;
    }
    ENVELOPE(body, 0, Return, RETURN_SLOTS, return_slots);
    body.slots = slots;
    body.n_slots = KVIST_GRANTS_MAX;
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.n_slots, KVIST_GRANTS_MAX + 1);
    REFUSED_WITH(&envelope, body.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, slot.slot, UINT32_MAX);
    REFUSED_WITH(&envelope, slot.ticket, KVIST_GRANTS_MAX);
    REFUSED_WITH(&envelope, slot.reservation, 0);
}

static void prefetch(void)
{
    enum { COUNT = KVIST_KEYS_MAX + 1 };
    static ProtobufCBinaryData keys[COUNT];
    for (size_t index = 0; index < COUNT; index++) {
        keys[index] = data(32);
    }
    ENVELOPE(body, 0, Prefetch, PREFETCH, prefetch);
    body.keys = keys;
    body.n_keys = KVIST_KEYS_MAX;
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.n_keys, KVIST_KEYS_MAX + 1);
    REFUSED_WITH(&envelope, body.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, keys[KVIST_KEYS_MAX - 1], data(31));
}

static void suspect(void)
{
    enum { COUNT = KVIST_SUSPECT_KEYS_MAX + 1 };
    ProtobufCBinaryData keys[COUNT];
    for (size_t index = 0; index < COUNT; index++) {
        keys[index] = data(32);
    }
    ENVELOPE(body, 0, Suspect, SUSPECT, suspect);
    body.keys = keys;
    body.n_keys = KVIST_SUSPECT_KEYS_MAX;
    accepted(&envelope);
    ACCEPTED_WITH(&envelope, body.n_keys, 0);
    REFUSED_WITH(&envelope, body.n_keys, KVIST_SUSPECT_KEYS_MAX + 1);
    REFUSED_WITH(&envelope, body.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, keys[KVIST_SUSPECT_KEYS_MAX - 1], data(31));
    REFUSED_WITH(&envelope, envelope.id, 1);
}

static void close_pool(void)
{
    ENVELOPE(body, 0, ClosePool, CLOSE_POOL, close_pool);
    body.pool = KVIST_SESSION_POOLS_MAX - 1;
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, envelope.id, 7);
}

/* --- From the daemon ---------------------------------------------------------------------------
 */

static void failure(void)
{
    ENVELOPE(body, 7, Failure, FAILURE, failure);
    body.status = KVIST_BUSY;
    body.text = text(KVIST_TEXT_BYTES_MAX);
    accepted(&envelope);
    ACCEPTED_WITH(&envelope, envelope.id, 0); /* about the connection */
    ACCEPTED_WITH(&envelope, body.status, 4000);
    REFUSED_WITH(&envelope, body.status, KVIST_OK);
    REFUSED_WITH(&envelope, body.text, text(KVIST_TEXT_BYTES_MAX + 1));
}

static void hello_reply(void)
{
    ENVELOPE(body, 7, HelloReply, HELLO_REPLY, hello_reply);
    body.wire_major = KVIST_WIRE_MAJOR;
    body.version = text(KVIST_NAME_BYTES_MAX);
    body.page_bytes = 8192;
    accepted(&envelope);
    KVIST_TEST_EQUAL(kvist_message_fd_count(&envelope), 1);
    REFUSED_WITH(&envelope, envelope.id, 0);
    REFUSED_WITH(&envelope, body.page_bytes, 8191);
    REFUSED_WITH(&envelope, body.version, text(KVIST_NAME_BYTES_MAX + 1));
    body.wire_major++;
    ACCEPTED_WITH(&envelope, body.page_bytes, 8191);
    body.page_bytes = 0; /* to a tool */
    accepted(&envelope);
    KVIST_TEST_EQUAL(kvist_message_fd_count(&envelope), 0);
}

static void pool_reply(void)
{
    ENVELOPE(body, 7, PoolReply, POOL_REPLY, pool_reply);
    body.pool = KVIST_SESSION_POOLS_MAX - 1;
    body.pool_id = data(32);
    body.map_bytes = 1 << 20;
    body.slot_bytes = KVIST_BLOCK_BYTES_MAX;
    body.slots_per_segment = 8;
    accepted(&envelope);
    KVIST_TEST_EQUAL(kvist_message_fd_count(&envelope), 1);
    REFUSED_WITH(&envelope, body.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, body.pool_id, data(16));
    REFUSED_WITH(&envelope, body.map_bytes, 0);
    REFUSED_WITH(&envelope, body.map_bytes, UINT64_MAX - 4095);
    REFUSED_WITH(&envelope, body.slot_bytes, 100);
    REFUSED_WITH(&envelope, body.slots_per_segment, 0);
    REFUSED_WITH(&envelope, body.slots_per_segment, 9);
}

static void stat_reply(void)
{
    enum { COUNT = KVIST_METRICS_MAX + 1 };
    Kvist__Wire__Metric metric;
    static Kvist__Wire__Metric *metrics[COUNT];
    kvist__wire__metric__init(&metric);
    for (size_t index = 0; index < COUNT; index++) {
        metrics[index] = &metric;
    }
    ENVELOPE(body, 7, StatReply, STAT_REPLY, stat_reply);
    body.metrics = metrics;
    body.n_metrics = KVIST_METRICS_MAX;
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.n_metrics, KVIST_METRICS_MAX + 1);
    body.n_metrics = 1;
    REFUSED_WITH(&envelope, body.health, text(KVIST_TEXT_BYTES_MAX + 1));
    REFUSED_WITH(&envelope, metric.name, text(KVIST_TEXT_BYTES_MAX + 1));
    REFUSED_WITH(&envelope, metric.unit, text(KVIST_NAME_BYTES_MAX + 1));
    REFUSED_WITH(&envelope, metric.help, text(KVIST_TEXT_BYTES_MAX + 1));
}

static void list_reply(void)
{
    enum { COUNT = KVIST_POOLS_MAX + 1 };
    Kvist__Wire__PoolInfo pool;
    Kvist__Wire__PoolInfo *pools[COUNT];
    Kvist__Wire__SessionInfo session;
    Kvist__Wire__SessionInfo *sessions[COUNT];
    uint32_t pids[KVIST_RANKS_MAX + 2] = {0};
    kvist__wire__pool_info__init(&pool);
    kvist__wire__session_info__init(&session);
    for (size_t index = 0; index < COUNT; index++) {
        pools[index] = &pool;
        sessions[index] = &session;
    }
    pool.pool_id = data(32);
    session.session_id = data(16);
    session.pids = pids;
    session.n_pids = KVIST_RANKS_MAX + 1;
    ENVELOPE(body, 7, ListReply, LIST_REPLY, list_reply);
    body.pools = pools;
    body.sessions = sessions;
    body.n_pools = KVIST_POOLS_MAX;
    body.n_sessions = KVIST_SESSIONS_MAX;
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.n_pools, KVIST_POOLS_MAX + 1);
    REFUSED_WITH(&envelope, body.n_sessions, KVIST_SESSIONS_MAX + 1);
    REFUSED_WITH(&envelope, pool.pool_id, data(0));
    REFUSED_WITH(&envelope, pool.tenant, text(KVIST_TENANT_BYTES_MAX + 1));
    REFUSED_WITH(&envelope, pool.description, text(KVIST_TEXT_BYTES_MAX + 1));
    REFUSED_WITH(&envelope, session.session_id, data(15));
    REFUSED_WITH(&envelope, session.name, text(KVIST_NAME_BYTES_MAX + 1));
    REFUSED_WITH(&envelope, session.tenant, text(KVIST_TENANT_BYTES_MAX + 1));
    REFUSED_WITH(&envelope, session.n_pids, KVIST_RANKS_MAX + 2);
}

static void inspect_reply(void)
{
    enum { COUNT = KVIST_POOLS_MAX + 1 };
    Kvist__Wire__InspectReply__Place place;
    Kvist__Wire__InspectReply__Place *places[COUNT];
    kvist__wire__inspect_reply__place__init(&place);
    for (size_t index = 0; index < COUNT; index++) {
        places[index] = &place;
    }
    place.pool_id = data(32);
    place.parent_tag = data(8);
    place.tier = text(4);
    ENVELOPE(body, 7, InspectReply, INSPECT_REPLY, inspect_reply);
    body.places = places;
    body.n_places = KVIST_POOLS_MAX;
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.n_places, KVIST_POOLS_MAX + 1);
    REFUSED_WITH(&envelope, place.pool_id, data(33));
    REFUSED_WITH(&envelope, place.tier, text(KVIST_NAME_BYTES_MAX + 1));
    REFUSED_WITH(&envelope, place.parent_tag, data(9));
}

static void clear_and_admin_replies(void)
{
    ENVELOPE(body, 7, ClearReply, CLEAR_REPLY, clear_reply);
    accepted(&envelope);
    REFUSED_WITH(&envelope, envelope.id, 0);
    BODY(admin_reply, AdminReply, ADMIN_REPLY, admin_reply);
    accepted(&envelope);
}

static void grant(void)
{
    enum { COUNT = KVIST_GRANTS_MAX + 1 };
    Kvist__Wire__Grant__Slot slot;
    static Kvist__Wire__Grant__Slot *slots[COUNT];
    kvist__wire__grant__slot__init(&slot);
    slot.reservation = UINT64_MAX;
    for (size_t index = 0; index < COUNT; index++) {
        slots[index] = &slot;
    }
    ENVELOPE(body, 0, Grant, GRANT, grant);
    body.slots = slots;
    body.n_slots = KVIST_GRANTS_MAX;
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.n_slots, KVIST_GRANTS_MAX + 1);
    REFUSED_WITH(&envelope, body.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, slot.slot, UINT32_MAX);
    REFUSED_WITH(&envelope, slot.ticket, KVIST_GRANTS_MAX);
    REFUSED_WITH(&envelope, slot.reservation, 0);
}

static void segment_and_revoke(void)
{
    ENVELOPE(body, 0, Segment, SEGMENT, segment);
    body.serial = 1;
    body.bytes = KVIST_SEGMENT_BYTES_MAX;
    accepted(&envelope);
    KVIST_TEST_EQUAL(kvist_message_fd_count(&envelope), 1);
    REFUSED_WITH(&envelope, body.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, body.segment, KVIST_SEGMENTS_MAX);
    REFUSED_WITH(&envelope, body.serial, 0);
    REFUSED_WITH(&envelope, body.bytes, 0);
    REFUSED_WITH(&envelope, body.bytes, 4097);
    REFUSED_WITH(&envelope, body.bytes, KVIST_SEGMENT_BYTES_MAX + 4096);
    BODY(revoke, Revoke, REVOKE, revoke);
    revoke.serial = 1;
    accepted(&envelope);
    REFUSED_WITH(&envelope, revoke.serial, 0);
    REFUSED_WITH(&envelope, revoke.segment, KVIST_SEGMENTS_MAX);
}

static void recall(void)
{
    ENVELOPE(body, 0, Recall, RECALL, recall);
    body.count = KVIST_GRANTS_MAX;
    accepted(&envelope);
    REFUSED_WITH(&envelope, body.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, body.count, KVIST_GRANTS_MAX + 1);
}

static void pool_map_and_promoted(void)
{
    ENVELOPE(body, 0, PoolMap, POOL_MAP, pool_map);
    body.map_bytes = 4096;
    accepted(&envelope);
    KVIST_TEST_EQUAL(kvist_message_fd_count(&envelope), 1);
    REFUSED_WITH(&envelope, body.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, body.map_bytes, 4097);
    BODY(promoted, Promoted, PROMOTED, promoted);
    promoted.blocks = KVIST_PREFETCHES_MAX;
    accepted(&envelope);
    REFUSED_WITH(&envelope, promoted.pool, KVIST_SESSION_POOLS_MAX);
    REFUSED_WITH(&envelope, promoted.blocks, KVIST_PREFETCHES_MAX + 1);
}

/* --- Envelopes ---------------------------------------------------------------------------------
 */

static void the_wrong_side_is_refused(void)
{
    ENVELOPE(body, 1, Stat, STAT, stat);
    KVIST_TEST_STATUS(receive(&envelope, false), KVIST_PROTOCOL);
    BODY(promoted, Promoted, PROMOTED, promoted);
    envelope.id = 0;
    KVIST_TEST_STATUS(receive(&envelope, true), KVIST_PROTOCOL);
}

static void a_body_must_be_there(void)
{
    envelope_type envelope = KVIST__WIRE__ENVELOPE__INIT;
    envelope.id = 1;
    refused(&envelope);
    KVIST_TEST_STATUS(unpack((const uint8_t *)"", 0, true), KVIST_PROTOCOL);
}

/* What a newer minor version may send: field 99, length-delimited, empty. */
static void an_unknown_body_passes(void)
{
    static const uint8_t newer[] = {8, 5, 0x9a, 6, 0};
    envelope_type *envelope = NULL;
    KVIST_TEST_STATUS(kvist_message_unpack(newer, sizeof(newer), true, &envelope, NULL), KVIST_OK);
    KVIST_TEST_FATAL(envelope != NULL);
    KVIST_TEST_EQUAL(envelope->id, 5);
    KVIST_TEST_EQUAL(envelope->body_case, KVIST__WIRE__ENVELOPE__BODY__NOT_SET);
    CU_ASSERT_STRING_EQUAL(kvist_message_name(envelope), "unknown");
    KVIST_TEST_EQUAL(kvist_message_fd_count(envelope), 0);
    kvist_message_free(&envelope);
    kvist_message_free(&envelope);
}

static void garbage_and_truncation_are_refused(void)
{
    ENVELOPE(body, 1, Inspect, INSPECT, inspect);
    body.key = data(32);
    uint8_t good[64];
    size_t length = kvist__wire__envelope__pack(&envelope, good);
    KVIST_TEST_STATUS(unpack(good, length, true), KVIST_OK);
    for (size_t cut = 0; cut < length; cut++) {
        uint8_t *exact = malloc(cut + 1); /* so that a sanitizer sees any read beyond it */
        KVIST_TEST_FATAL(exact != NULL);
        memcpy(exact, good, cut);
        KVIST_TEST_STATUS(unpack(exact, cut, true), KVIST_PROTOCOL);
        free(exact);
    }
    uint32_t random = 1;
    for (unsigned round = 0; round < GARBAGE_ROUNDS; round++) {
        uint8_t noise[64];
        for (size_t at = 0; at < sizeof(noise); at++) {
            random = random * 1664525U + 1013904223U;
            noise[at] = at < length && random % 4 != 0 ? good[at] : (uint8_t)(random >> 24);
        }
        envelope_type *unpacked = NULL;
        if (kvist_message_unpack(noise, random % sizeof(noise), true, &unpacked, NULL) ==
            KVIST_OK) {
            kvist_message_free(&unpacked);
        }
    }
}

/* 1 MiB of empty submessages would unpack to a hundred. */
static void memory_is_bounded(void)
{
    enum { PARTS = 500000, BODY_BYTES = 2 * PARTS };
    uint8_t *bytes = malloc(BODY_BYTES + 8);
    KVIST_TEST_FATAL(bytes != NULL);
    size_t at = 0;
    bytes[at++] = 0xb2; /* field 22, commit */
    bytes[at++] = 1;
    bytes[at++] = (uint8_t)((BODY_BYTES & 127) | 128);
    bytes[at++] = (uint8_t)(((BODY_BYTES >> 7) & 127) | 128);
    bytes[at++] = (uint8_t)(BODY_BYTES >> 14);
    for (size_t part = 0; part < PARTS; part++) {
        bytes[at++] = 0x12; /* field 2, blocks */
        bytes[at++] = 0;
    }
    struct kvist_error err = KVIST_ERROR_INIT;
    envelope_type *envelope = NULL;
    KVIST_TEST_STATUS(kvist_message_unpack(bytes, at, true, &envelope, &err), KVIST_PROTOCOL);
    KVIST_TEST_TRUE(strstr(err.text, "no message, or too big") != NULL);
    free(bytes);
}

/* Each allocation of an unpacking fails once: nothing leaks, and the next one works. */
static void no_memory_is_no_protocol_error(void)
{
    static const uint8_t bytes[] = {8, 1, 0x52, 6, 8, 1, 0x42, 2, 'm', 'e'}; /* hello of a tool */
    envelope_type *envelope = NULL;
    kvist_fault_arm("message.alloc", 0, false);
    KVIST_TEST_STATUS(kvist_message_unpack(bytes, sizeof(bytes), true, &envelope, NULL), KVIST_OK);
    uint64_t count = kvist_fault_disarm();
    KVIST_TEST_EQUAL(count, 3);
    kvist_message_free(&envelope);
    for (uint64_t nth = 1; nth <= count; nth++) {
        kvist_fault_arm("message.alloc", nth, false);
        KVIST_TEST_STATUS(kvist_message_unpack(bytes, sizeof(bytes), true, &envelope, NULL),
                          KVIST_NO_MEMORY);
        (void)kvist_fault_disarm();
        KVIST_TEST_TRUE(envelope == NULL);
    }
    KVIST_TEST_STATUS(unpack(bytes, sizeof(bytes), true), KVIST_OK);
}

/* --- Through a socket --------------------------------------------------------------------------
 */

static void a_message_passes_with_its_fd(void)
{
    ENVELOPE(body, 0, Segment, SEGMENT, segment);
    body.serial = 5;
    body.bytes = 4096;
    int pair[2];
    KVIST_TEST_FATAL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    struct kvist_frame_writer *writer = NULL;
    struct kvist_frame_reader *reader = NULL;
    KVIST_TEST_FATAL(kvist_frame_writer_create(&writer) == KVIST_OK);
    KVIST_TEST_FATAL(kvist_frame_reader_create(1, &reader) == KVIST_OK);
    KVIST_TEST_STATUS(kvist_message_put(writer, &envelope, NULL, 0, NULL), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_message_put(writer, &envelope, pair, 2, NULL), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_message_put(writer, &envelope, pair, 1, NULL), KVIST_OK);
    KVIST_TEST_STATUS(kvist_frame_writer_flush(writer, pair[0], NULL), KVIST_OK);
    bool more = false;
    struct kvist_frame frame;
    KVIST_TEST_STATUS(kvist_frame_reader_fill(reader, pair[1], &more, NULL), KVIST_OK);
    KVIST_TEST_FATAL(kvist_frame_reader_next(reader, &frame, NULL) == KVIST_OK);
    KVIST_TEST_EQUAL(frame.fd_count, 1);
    envelope_type *unpacked = NULL;
    KVIST_TEST_STATUS(kvist_message_unpack(frame.bytes, frame.length, false, &unpacked, NULL),
                      KVIST_OK);
    KVIST_TEST_FATAL(unpacked != NULL);
    CU_ASSERT_STRING_EQUAL(kvist_message_name(unpacked), "segment");
    KVIST_TEST_EQUAL(unpacked->segment->serial, 5);
    kvist_message_free(&unpacked);
    (void)close(frame.fds[0]);
    kvist_frame_reader_destroy(&reader);
    kvist_frame_writer_destroy(&writer);
    (void)close(pair[0]);
    (void)close(pair[1]);
}

static void a_message_over_a_frame_is_refused(void)
{
    enum { COUNT = 1000 };
    Kvist__Wire__Metric metric;
    Kvist__Wire__Metric *metrics[COUNT];
    kvist__wire__metric__init(&metric);
    metric.help = text(KVIST_TEXT_BYTES_MAX);
    for (size_t index = 0; index < COUNT; index++) {
        metrics[index] = &metric;
    }
    ENVELOPE(body, 7, StatReply, STAT_REPLY, stat_reply);
    body.metrics = metrics;
    body.n_metrics = COUNT;
    struct kvist_frame_writer *writer = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_FATAL(kvist_frame_writer_create(&writer) == KVIST_OK);
    KVIST_TEST_STATUS(kvist_message_put(writer, &envelope, NULL, 0, &err), KVIST_INVALID);
    KVIST_TEST_TRUE(strstr(err.text, "over a frame") != NULL);
    body.n_metrics = 100; /* longer than what is packed on the stack */
    kvist_fault_arm("message.alloc", 1, false);
    KVIST_TEST_STATUS(kvist_message_put(writer, &envelope, NULL, 0, NULL), KVIST_NO_MEMORY);
    (void)kvist_fault_disarm();
    KVIST_TEST_STATUS(kvist_message_put(writer, &envelope, NULL, 0, NULL), KVIST_OK);
    KVIST_TEST_TRUE(kvist_frame_writer_pending_bytes(writer) > 100 * KVIST_TEXT_BYTES_MAX);
    kvist_frame_writer_destroy(&writer);
}

int main(void)
{
    memset(bytes64, 7, sizeof(bytes64));
    memset(long_text, 'k', LONG_TEXT);
    static const struct kvist_unit_case cases[] = {
        {"hello", hello},
        {"open pool", open_pool},
        {"clear", clear},
        {"stat and list", stat_and_list},
        {"inspect", inspect},
        {"admin", admin},
        {"mapped and unmapped", mapped_and_unmapped},
        {"commit", commit},
        {"return", return_slots},
        {"prefetch", prefetch},
        {"suspect", suspect},
        {"close pool", close_pool},
        {"failure", failure},
        {"hello reply", hello_reply},
        {"pool reply", pool_reply},
        {"stat reply", stat_reply},
        {"list reply", list_reply},
        {"inspect reply", inspect_reply},
        {"clear and admin replies", clear_and_admin_replies},
        {"grant", grant},
        {"segment and revoke", segment_and_revoke},
        {"recall", recall},
        {"pool map and promoted", pool_map_and_promoted},
        {"the wrong side is refused", the_wrong_side_is_refused},
        {"a body must be there", a_body_must_be_there},
        {"an unknown body passes", an_unknown_body_passes},
        {"garbage and truncation are refused", garbage_and_truncation_are_refused},
        {"memory is bounded", memory_is_bounded},
        {"no memory is no protocol error", no_memory_is_no_protocol_error},
        {"a message passes with its fd", a_message_passes_with_its_fd},
        {"a message over a frame is refused", a_message_over_a_frame_is_refused},
    };
    return kvist_unit_main("message", cases, KVIST_ARRAY_COUNT(cases), NULL, NULL);
}
