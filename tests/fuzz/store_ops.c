/*
 * Fuzz target: the store, by everything that sessions can ask of it, in any order.
 *
 * Input: operations. Engines 0 and 1 keep to the protocol; engine 2 maps nothing, writes what it
 * likes into its session page and sends what it likes. After every operation the store's
 * invariants hold, and each leased block of the honest engines is the one that was committed.
 */
#include "tests/fuzz/fuzz.h"
#include "tests/support/engine.h"

#include <poll.h>

#define ARENA_BYTES    (16ULL << 20)
#define BLOCK_BYTES    4096U
#define ENGINES        3U
#define HOSTILE        2U
#define POOLS          3U
#define LEASES         16U
#define NUMBERS        64U   /* keys of honest engines */
#define HOSTILE_NUMBER 1000U /* and from here on of the other */
#define STEPS_MAX      200U
#define WAITS_MAX      20U

struct held_lease {
    const void *bytes; /* NULL: none */
    uint32_t engine;
    uint32_t ordinal;
    uint64_t number;
};

static struct {
    struct kvist_store *store;
    struct kvist_test_engine *engines[ENGINES];
    struct held_lease leases[LEASES]; /* by lease record */
    uint32_t clears_asked;
    uint32_t clears_done;
} rig;

/* --- What is used by several operations ------------------------------------------------------ */

static struct kvist_store_pool *open_pool(uint8_t number)
{
    static const uint64_t slot_bytes[POOLS] = {64ULL << 10, 256ULL << 10, 1ULL << 20};
    return kvist_test_pool_open(rig.store, number % POOLS, slot_bytes[number % POOLS]);
}

/* An engine that exists, else NULL. */
static struct kvist_test_engine *take_engine(struct kvist_fuzz_input *input, uint32_t *index_out)
{
    *index_out = kvist_fuzz_u8(input) % ENGINES;
    return rig.engines[*index_out];
}

/* An ordinal that the engine has a pool under. */
static bool
take_ordinal(struct kvist_fuzz_input *input, struct kvist_test_engine *engine, uint32_t *out)
{
    *out = kvist_fuzz_u8(input) % KVIST_SESSION_POOLS_MAX;
    return engine != NULL && engine->pools[*out].pool != NULL;
}

static void forget_leases(uint32_t engine, uint32_t ordinal)
{
    for (uint32_t record = 0; record < LEASES; record++) {
        struct held_lease *lease = &rig.leases[record];
        if (lease->bytes != NULL && lease->engine == engine &&
            (lease->ordinal == ordinal || ordinal == KVIST_SESSION_POOLS_MAX)) {
            kvist_test_engine_release(rig.engines[engine], record);
            lease->bytes = NULL;
        }
    }
}

static void check_all(void)
{
    const char *broken = kvist_store_check(rig.store);
    if (broken != NULL) {
        (void)fprintf(stderr, "kvist_store_check: %s\n", broken);
    }
    KVIST_FUZZ_REQUIRE(broken == NULL);
    for (uint32_t record = 0; record < LEASES; record++) {
        const struct held_lease *lease = &rig.leases[record];
        KVIST_FUZZ_REQUIRE(lease->bytes == NULL ||
                           kvist_test_holds(lease->bytes, lease->number, BLOCK_BYTES));
    }
}

/* Turn until what workers do has come back, for a bounded time. */
static void settle(void)
{
    for (unsigned waits = 0; waits < WAITS_MAX; waits++) {
        struct pollfd polls[4];
        int fds[4];
        struct kvist_store_stats stats;
        size_t count = kvist_store_fds(rig.store, fds);
        kvist_test_advance(rig.store, 0);
        kvist_store_stats(rig.store, &stats);
        for (size_t index = 0; index < count; index++) {
            polls[index] = (struct pollfd){.fd = fds[index], .events = POLLIN};
        }
        if (poll(polls, (nfds_t)count, 0) == 0 && stats.arena_used_bytes == stats.populated_bytes) {
            return;
        }
        (void)poll(polls, (nfds_t)count, 1);
    }
}

/* --- Sessions and pools ---------------------------------------------------------------------- */

static void open_engine(struct kvist_fuzz_input *input)
{
    uint32_t index = 0;
    if (take_engine(input, &index) == NULL) {
        uint32_t rank_count = 1 + kvist_fuzz_u8(input) % 2;
        rig.engines[index] = kvist_test_engine_open(rig.store, (uint8_t)index, rank_count);
        rig.engines[index]->maps_nothing = index == HOSTILE;
    }
}

static void close_engine(struct kvist_fuzz_input *input)
{
    uint32_t index = 0;
    if (take_engine(input, &index) != NULL) {
        forget_leases(index, KVIST_SESSION_POOLS_MAX);
        kvist_test_engine_close(&rig.engines[index]);
    }
}

static void attach(struct kvist_fuzz_input *input)
{
    uint32_t index = 0;
    struct kvist_test_engine *engine = take_engine(input, &index);
    struct kvist_store_pool *pool = open_pool(kvist_fuzz_u8(input));
    if (engine != NULL) {
        uint32_t ordinal = kvist_test_engine_attach(engine, pool);
        engine->pools[ordinal].grant_count = 0; /* all are said again */
    }
}

static void detach(struct kvist_fuzz_input *input)
{
    uint32_t index = 0;
    uint32_t ordinal = 0;
    struct kvist_test_engine *engine = take_engine(input, &index);
    if (take_ordinal(input, engine, &ordinal)) {
        forget_leases(index, ordinal);
        kvist_test_engine_detach(engine, ordinal);
    }
}

static void reconnect(struct kvist_fuzz_input *input)
{
    uint32_t index = 0;
    struct kvist_test_engine *engine = take_engine(input, &index);
    if (engine == NULL) {
        return;
    }
    struct kvist_test_member *member =
        &engine->members[kvist_fuzz_u8(input) % engine->member_count];
    bool away = kvist_store_process_ctx(member->process) != NULL;
    kvist_store_process_set_ctx(member->process, away ? NULL : member);
}

/* --- Honest blocks --------------------------------------------------------------------------- */

static void put(struct kvist_fuzz_input *input)
{
    uint32_t index = 0;
    uint32_t ordinal = 0;
    struct kvist_test_engine *engine = take_engine(input, &index);
    uint64_t number = kvist_fuzz_u8(input) % NUMBERS;
    unsigned count = 1 + kvist_fuzz_u8(input) % 32;
    if (index == HOSTILE || !take_ordinal(input, engine, &ordinal)) {
        return;
    }
    for (; count > 0; count--, number = (number + 1) % NUMBERS) {
        enum kvist_status status = kvist_test_engine_put(engine, ordinal, number, BLOCK_BYTES);
        KVIST_FUZZ_REQUIRE(status != KVIST_INVALID);
    }
}

static void give_back(struct kvist_fuzz_input *input)
{
    uint32_t index = 0;
    uint32_t ordinal = 0;
    struct kvist_store_grant grant;
    struct kvist_test_engine *engine = take_engine(input, &index);
    if (take_ordinal(input, engine, &ordinal) && kvist_test_engine_take(engine, ordinal, &grant)) {
        KVIST_FUZZ_REQUIRE(
            kvist_store_return(
                engine->session, ordinal, grant.slot, grant.ticket, grant.reservation) !=
            KVIST_INVALID);
    }
}

static void lease(struct kvist_fuzz_input *input)
{
    uint32_t index = 0;
    uint32_t ordinal = 0;
    struct kvist_test_engine *engine = take_engine(input, &index);
    uint32_t record = kvist_fuzz_u8(input) % LEASES;
    uint64_t number = kvist_fuzz_u8(input) % NUMBERS;
    if (index == HOSTILE || !take_ordinal(input, engine, &ordinal)) {
        return;
    }
    struct held_lease *mine = &rig.leases[record];
    if (mine->bytes != NULL) {
        kvist_test_engine_release(rig.engines[mine->engine], record);
        mine->bytes = NULL;
    } else {
        mine->bytes = kvist_test_engine_lease(engine, ordinal, number, record);
        mine->engine = index;
        mine->ordinal = ordinal;
        mine->number = number;
    }
}

static void unmap(struct kvist_fuzz_input *input)
{
    uint32_t index = 0;
    struct kvist_test_engine *engine = take_engine(input, &index);
    if (engine != NULL && index != HOSTILE) {
        kvist_test_engine_unmap_revoked(engine);
    }
}

/* --- What a peer may do, and should not ------------------------------------------------------ */

static void forge_commit(struct kvist_fuzz_input *input)
{
    uint32_t ordinal = kvist_fuzz_u8(input) % (KVIST_SESSION_POOLS_MAX + 1);
    struct kvist_test_engine *engine = rig.engines[HOSTILE];
    struct kvist_store_grant grant = {0};
    if (engine == NULL) {
        return;
    }
    uint8_t how = kvist_fuzz_u8(input);
    if (ordinal < KVIST_SESSION_POOLS_MAX && (how & 1U) != 0) {
        (void)kvist_test_engine_take(engine, ordinal, &grant);
        if ((how & 2U) != 0) {
            for (uint32_t rank = 0; rank < engine->rank_count; rank++) {
                kvist_test_engine_mark(engine, rank, &grant);
            }
        }
    }
    struct kvist_store_commit commit = {
        .slot = grant.slot ^ (uint32_t)kvist_fuzz_number(input),
        .ticket = grant.ticket ^ (uint32_t)kvist_fuzz_number(input),
        .reservation = grant.reservation ^ kvist_fuzz_number(input),
        .parent_tag = kvist_fuzz_u8(input),
        .block_bytes = BLOCK_BYTES ^ kvist_fuzz_number(input),
    };
    kvist_test_key(HOSTILE_NUMBER + kvist_fuzz_u8(input), commit.key);
    enum kvist_status status = KVIST_OK;
    if ((how & 4U) != 0) {
        status = kvist_store_return(
            engine->session, ordinal, commit.slot, commit.ticket, commit.reservation);
    } else {
        status = kvist_store_commit(engine->session, ordinal, &commit);
    }
    (void)status; /* whatever it is, nobody else is hurt */
}

static void spoil_page(struct kvist_fuzz_input *input)
{
    struct kvist_test_engine *engine = rig.engines[HOSTILE];
    uint8_t part = kvist_fuzz_u8(input) % 6;
    uint64_t index = kvist_fuzz_number(input);
    uint64_t value = kvist_fuzz_number(input);
    if (engine == NULL) {
        return;
    }
    const struct kvist_page_header *geometry = &engine->geometry;
    const uint64_t offsets[] = {geometry->lease_offset,
                                geometry->mark_offset,
                                geometry->mapped_offset,
                                geometry->touch_offset,
                                offsetof(struct kvist_page_header, lease_high),
                                offsetof(struct kvist_page_header, touch_head)};
    if (part == 0) { /* lease records name slots of pools */
        value = kvist_slot_ref((uint32_t)(value % KVIST_SESSION_POOLS_MAX), (uint32_t)value / 8);
    }
    uint64_t at = (offsets[part] + index * 8) % (geometry->page_bytes - 8) / 8 * 8;
    memcpy((char *)engine->page + at, &value, sizeof(value));
}

static void lie_of_segments(struct kvist_fuzz_input *input)
{
    struct kvist_test_engine *engine = rig.engines[HOSTILE];
    uint32_t ordinal = kvist_fuzz_u8(input) % KVIST_SESSION_POOLS_MAX;
    uint32_t segment = kvist_fuzz_u8(input);
    uint32_t serial = (uint32_t)kvist_fuzz_number(input);
    uint8_t how = kvist_fuzz_u8(input);
    if (engine == NULL) {
        return;
    }
    struct kvist_store_process *process = engine->members[how / 4 % engine->member_count].process;
    if ((how & 1U) != 0) { /* the record too, of every rank */
        for (uint32_t rank = 0; rank < engine->rank_count; rank++) {
            uint64_t index =
                ((uint64_t)rank * KVIST_SESSION_POOLS_MAX + ordinal) * KVIST_SEGMENTS_MAX + segment;
            memcpy((char *)engine->page + engine->geometry.mapped_offset + index * sizeof(serial),
                   &serial,
                   sizeof(serial));
        }
    }
    if ((how & 2U) != 0) {
        kvist_store_segment_unmapped(process, ordinal, segment, serial);
    } else {
        kvist_store_segment_mapped(process, ordinal, segment, serial);
    }
}

static void touch(struct kvist_fuzz_input *input)
{
    uint32_t index = 0;
    struct kvist_test_engine *engine = take_engine(input, &index);
    uint64_t ref = kvist_fuzz_number(input);
    if (engine != NULL) {
        kvist_test_engine_touch(
            engine, (kvist_fuzz_u8(input) & 1U) != 0 ? ref : kvist_slot_ref(0, (uint32_t)ref));
    }
}

static void prefetch(struct kvist_fuzz_input *input)
{
    uint32_t index = 0;
    struct kvist_test_engine *engine = take_engine(input, &index);
    uint8_t keys[4][KVIST_KEY_BYTES];
    for (unsigned key = 0; key < 4; key++) {
        kvist_test_key(kvist_fuzz_u8(input), keys[key]);
    }
    if (engine != NULL) {
        uint32_t ordinal = kvist_fuzz_u8(input) % (KVIST_SESSION_POOLS_MAX + 1);
        enum kvist_status status = kvist_store_prefetch(engine->session, ordinal, keys, 4);
        (void)status; /* there is no tier */
    }
}

/* --- Operators ------------------------------------------------------------------------------- */

static void cleared(void *ctx, enum kvist_status status, uint64_t blocks, uint64_t bytes)
{
    (void)ctx;
    (void)blocks;
    (void)bytes;
    KVIST_FUZZ_REQUIRE(status == KVIST_OK);
    rig.clears_done++;
}

static void clear(struct kvist_fuzz_input *input)
{
    if (kvist_store_clear(rig.store, open_pool(kvist_fuzz_u8(input)), cleared, NULL) == KVIST_OK) {
        rig.clears_asked++;
    }
}

static void look(struct kvist_fuzz_input *input)
{
    struct kvist_store_pool_info pool_info;
    struct kvist_store_block_info block_info;
    uint8_t key[KVIST_KEY_BYTES];
    kvist_test_key(kvist_fuzz_u8(input) % NUMBERS, key);
    for (uint32_t index = 0; kvist_store_pool_info(rig.store, index, &pool_info); index++) {
        enum kvist_status status = kvist_store_inspect(
            kvist_store_pool_lookup(rig.store, pool_info.pool_id), key, &block_info);
        KVIST_FUZZ_REQUIRE(status == KVIST_OK || status == KVIST_NOT_FOUND);
    }
    for (uint32_t index = 0; index < ENGINES; index++) {
        struct kvist_store_session_info info;
        if (rig.engines[index] != NULL) {
            kvist_store_session_info(rig.engines[index]->session, &info);
        }
    }
}

static void pass_time(struct kvist_fuzz_input *input)
{
    kvist_test_advance(rig.store, (uint64_t)kvist_fuzz_u8(input) * 20000);
}

static void wait(struct kvist_fuzz_input *input)
{
    (void)input;
    settle();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const operations[])(struct kvist_fuzz_input *) = {
        open_engine, close_engine,    attach, detach,   reconnect, put,
        put,         give_back,       lease,  lease,    unmap,     forge_commit,
        spoil_page,  lie_of_segments, touch,  prefetch, clear,     look,
        pass_time,   pass_time,       wait,   wait,     wait};
    struct kvist_fuzz_input input = {data, size};
    memset(&rig, 0, sizeof(rig));
    struct kvist_store_options options = kvist_test_options(ARENA_BYTES);
    rig.store = kvist_test_store_open(&options);
    for (unsigned step = 0; step < STEPS_MAX && input.left > 0; step++) {
        operations[kvist_fuzz_u8(&input) % (sizeof(operations) / sizeof(operations[0]))](&input);
        check_all();
    }
    for (uint32_t index = 0; index < ENGINES; index++) {
        if (rig.engines[index] != NULL) {
            forget_leases(index, KVIST_SESSION_POOLS_MAX);
            kvist_test_engine_close(&rig.engines[index]);
            check_all();
        }
    }
    kvist_store_close(&rig.store);
    KVIST_FUZZ_REQUIRE(rig.clears_done == rig.clears_asked);
    return 0;
}

void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx)
{
    enum {
        OPEN,
        CLOSE,
        ATTACH,
        DETACH,
        RECONNECT,
        PUT,
        PUT_2,
        GIVE_BACK,
        LEASE,
        LEASE_2,
        UNMAP,
        FORGE,
        SPOIL,
        LIE,
        TOUCH,
        PREFETCH,
        CLEAR,
        LOOK,
        TIME,
        TIME_2,
        WAIT
    };
    static const uint8_t life[] = {
        OPEN,  0,     0, ATTACH, 0,   0,     WAIT, TIME, 1, WAIT,   PUT, 0,  0,     31, 0,    WAIT,
        LEASE, 0,     0, 3,      0,   TOUCH, 0,    3,    0, PUT,    0,   32, 31,    0,  TIME, 50,
        WAIT,  CLEAR, 0, WAIT,   PUT, 0,     0,    5,    0, DETACH, 0,   0,  CLOSE, 0};
    static const uint8_t two[] = {
        OPEN,  0,   1,         OPEN, 1,    0,      ATTACH, 0,     0,         WAIT,  WAIT,
        PUT,   0,   0,         31,   0,    ATTACH, 1,      1,     WAIT,      WAIT,  PUT,
        1,     9,   31,        0,    TIME, 255,    WAIT,   UNMAP, 0,         UNMAP, 1,
        WAIT,  PUT, 1,         40,   31,   0,      LEASE,  1,     2,         41,    0,
        LEASE, 0,   3,         5,    0,    TIME,   255,    WAIT,  RECONNECT, 0,     0,
        TIME,  1,   RECONNECT, 0,    0,    ATTACH, 0,      0,     WAIT,      LOOK,  3};
    static const uint8_t hostile[] = {
        OPEN, 2,     0,     OPEN, 0,     0,     ATTACH,    2,     0,   ATTACH,   0, 0,
        WAIT, LIE,   0,     0,    2,     1,     WAIT,      TIME,  1,   SPOIL,    4, 0,
        9,    SPOIL, 0,     0,    8,     FORGE, 0,         3,     0,   0,        0, 0,
        0,    1,     FORGE, 0,    1,     0,     0,         0,     0,   0,        2, FORGE,
        0,    5,     1,     0,    0,     0,     0,         3,     PUT, 0,        0, 31,
        0,    SPOIL, 5,     0,    200,   WAIT,  GIVE_BACK, 2,     0,   PREFETCH, 2, 1,
        2,    3,     4,     0,    CLEAR, 0,     WAIT,      CLOSE, 2};
    /* A pool of 16 slots: what is leased stays while the others are evicted. */
    static const uint8_t full[] = {
        OPEN, 0,    0,     ATTACH, 0,     2,    WAIT, TIME,  1,     WAIT, PUT, 0,    0,    7,
        0,    WAIT, LEASE, 0,      1,     1,    0,    LEASE, 0,     2,    2,   0,    PUT,  0,
        10,   31,   0,     TIME,   60,    WAIT, PUT,  0,     20,    31,   0,   TIME, 60,   WAIT,
        PUT,  0,    30,    31,     0,     TIME, 60,   WAIT,  LEASE, 0,    1,   1,    0,    PUT,
        0,    40,   31,    0,      TIME,  60,   WAIT, PUT,   0,     1,    31,  0,    WAIT, LEASE,
        0,    3,    40,    0,      CLEAR, 2,    PUT,  0,     40,    31,   0,   WAIT};
    emit(ctx, life, sizeof(life));
    emit(ctx, full, sizeof(full));
    emit(ctx, two, sizeof(two));
    emit(ctx, hostile, sizeof(hostile));
}
