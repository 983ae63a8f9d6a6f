/*
 * model - what must be true of the bytes that engines are shown.
 *
 * Role        every content that is ever written into a slot is a *version* of a key, with a number
 *             that its bytes tell. A key shows versions that were committed under it in that pool
 *             and generation, and no others; none before its commit was answered.
 */
#include "tests/sim/sim.h"

#define NOTES 32768U /* of grants, by reservation */

struct version {
    uint64_t key;
    uint64_t bytes;
    uint32_t pool;
    uint32_t generation; /* of the pool when the slot was granted */
    bool committed;
    bool spoiled;
};

struct note {
    uint64_t reservation; /* 0: none */
    uint32_t generation;
    bool taken;
};

static struct {
    uint32_t generation[KVIST_SIM_POOLS]; /* now */
    uint32_t floor[KVIST_SIM_POOLS];      /* what is older may not be shown */
    uint32_t durable[KVIST_SIM_POOLS];    /* the floor that outlives everything */
    struct version *versions;
    uint64_t count;
    uint64_t room;
    uint64_t hits;
    struct note notes[NOTES];
} model;

void kvist_sim_model_init(void)
{
    memset(&model, 0, sizeof(model));
    model.count = 1; /* 0 is no version */
}

void kvist_sim_model_fini(void)
{
    free(model.versions);
    model.versions = NULL;
}

uint32_t kvist_sim_model_clear(uint32_t pool)
{
    model.floor[pool] = ++model.generation[pool];
    return model.floor[pool];
}

void kvist_sim_model_cleared(uint32_t pool, uint32_t generation)
{
    if (generation > model.durable[pool]) {
        model.durable[pool] = generation;
    }
}

void kvist_sim_model_forget_memory(void)
{
    memcpy(model.floor, model.durable, sizeof(model.floor));
}

static struct note *note_of(uint64_t reservation)
{
    uint32_t place = (uint32_t)(reservation % NOTES);
    while (model.notes[place].reservation != 0 && model.notes[place].reservation != reservation) {
        place = (place + 1) % NOTES;
    }
    return &model.notes[place];
}

void kvist_sim_model_granted(uint32_t pool, uint64_t reservation)
{
    struct note *note = note_of(reservation);
    if (note->reservation == 0) { /* else it is said again */
        *note = (struct note){.reservation = reservation, .generation = model.generation[pool]};
    }
}

bool kvist_sim_model_is_stale(uint32_t pool, uint64_t reservation)
{
    return note_of(reservation)->generation < model.floor[pool];
}

void kvist_sim_model_take(uint64_t reservation)
{
    KVIST_SIM_REQUIRE(!note_of(reservation)->taken);
    note_of(reservation)->taken = true;
}

bool kvist_sim_model_is_taken(uint64_t reservation)
{
    return note_of(reservation)->taken;
}

bool kvist_sim_model_any_key(uint32_t pool, uint64_t *key_out)
{
    for (uint32_t left = 8; left > 0 && model.count > 1; left--) {
        const struct version *known =
            &model.versions[1 + kvist_sim_below((uint32_t)model.count - 1)];
        if (known->pool == pool && known->committed) {
            *key_out = known->key;
            return true;
        }
    }
    return false;
}

uint64_t kvist_sim_model_version(uint32_t pool, uint64_t key, uint64_t bytes, uint64_t reservation)
{
    if (model.count >= model.room) {
        model.room = model.room == 0 ? 1024 : model.room * 2;
        model.versions = realloc(model.versions, model.room * sizeof(model.versions[0]));
        KVIST_SIM_REQUIRE(model.versions != NULL);
    }
    model.versions[model.count] = (struct version){
        .key = key,
        .bytes = bytes,
        .pool = pool,
        .generation = note_of(reservation)->generation,
    };
    return model.count++;
}

void kvist_sim_model_committed(uint64_t version)
{
    const struct version *known = &model.versions[version];
    KVIST_SIM_REQUIRE(known->generation >= model.floor[known->pool]);
    model.versions[version].committed = true;
}

void kvist_sim_model_spoil(uint64_t version)
{
    model.versions[version].spoiled = true;
}

static uint64_t version_in(const void *bytes)
{
    uint64_t first = 0;
    memcpy(&first, bytes, sizeof(first));
    return first >> 20; /* kvist_test_fill() */
}

void kvist_sim_model_check_same(const void *bytes, uint64_t version)
{
    const struct version *known = &model.versions[version];
    KVIST_SIM_REQUIRE(version_in(bytes) == version);
    KVIST_SIM_REQUIRE(known->spoiled || kvist_test_holds(bytes, version, known->bytes));
}

uint64_t kvist_sim_model_check(uint32_t pool, uint64_t key, const void *bytes, uint64_t length)
{
    uint64_t version = version_in(bytes);
    KVIST_SIM_REQUIRE(version > 0 && version < model.count);
    const struct version *known = &model.versions[version];
    kvist_sim_trace("  version %llu", (unsigned long long)version);
    KVIST_SIM_REQUIRE(known->pool == pool);
    KVIST_SIM_REQUIRE(known->key == key);
    KVIST_SIM_REQUIRE(known->committed);
    KVIST_SIM_REQUIRE(known->generation >= model.floor[pool]);
    KVIST_SIM_REQUIRE(known->bytes == length);
    kvist_sim_model_check_same(bytes, version);
    model.hits++;
    return version;
}

uint64_t kvist_sim_model_hits(void)
{
    return model.hits;
}

void kvist_sim_model_check_copies(struct kvist_store *store)
{
    for (uint64_t version = 1; version < model.count; version++) {
        uint8_t pool_id[KVIST_KEY_BYTES] = {(uint8_t)model.versions[version].pool,
                                            [KVIST_KEY_BYTES - 1] = 0xaa};
        uint8_t key[KVIST_KEY_BYTES];
        struct kvist_store_block_info info;
        kvist_test_key(model.versions[version].key, key);
        struct kvist_store_pool *pool = kvist_store_pool_lookup(store, pool_id);
        if (pool != NULL && kvist_store_inspect(pool, key, &info) == KVIST_OK && info.on_nvme) {
            KVIST_SIM_REQUIRE(kvist_sim_disk_has(pool_id, key));
        }
    }
}
