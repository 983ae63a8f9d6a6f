/*
 * Fuzz target: the index of a pool map, against a model.
 *
 * Input: operations. The keys are few, and those of a group share one place of the index, so that
 * probes are long. After every operation each key is found, or not, as the model says; by a reader
 * of the shared memory, too; and kvist_map_check() holds.
 */
#include "storage/map.h"
#include "tests/fuzz/fuzz.h"

#define GROUPS    4U
#define KEYS      200U
#define CAPACITY  64U
#define STEPS_MAX 400U
#define BATCH_MAX 8U

struct model_key {
    bool present;
    uint32_t position;
    struct kvist_entry_copy entry;
};

static struct {
    struct kvist_map map;
    struct model_key keys[KEYS];
    uint32_t serial;
} rig;

static void key_words(uint32_t number, uint64_t words_out[4])
{
    words_out[0] = number % GROUPS;
    words_out[1] = 0;
    words_out[2] = number;
    words_out[3] = ~(uint64_t)number;
}

static bool same(const struct kvist_entry_copy *one, const struct kvist_entry_copy *other)
{
    return one->state == other->state && one->slot == other->slot && one->extent == other->extent &&
           one->generation == other->generation && one->parent_tag == other->parent_tag &&
           memcmp(one->key, other->key, sizeof(one->key)) == 0;
}

static void check_all(void)
{
    const char *broken = kvist_map_check(&rig.map);
    if (broken != NULL) {
        (void)fprintf(stderr, "kvist_map_check: %s\n", broken);
    }
    KVIST_FUZZ_REQUIRE(broken == NULL);
    uint32_t live = 0;
    for (uint32_t number = 0; number < KEYS; number++) {
        struct model_key *mine = &rig.keys[number];
        struct kvist_entry_copy found;
        uint64_t words[4];
        uint8_t key[KVIST_KEY_BYTES];
        key_words(number, words);
        memcpy(key, words, sizeof(key));
        uint32_t position = kvist_map_find(&rig.map, key, &found);
        KVIST_FUZZ_REQUIRE((position != KVIST_ENTRY_NONE) == mine->present);
        KVIST_FUZZ_REQUIRE(!mine->present ||
                           (position == mine->position && same(&found, &mine->entry)));
        live += mine->present;
    }
    KVIST_FUZZ_REQUIRE(live == rig.map.live);
}

/* Anything that an entry of this key can be. */
static struct kvist_entry_copy take_entry(struct kvist_fuzz_input *input, uint32_t number)
{
    struct kvist_entry_copy entry = {
        .state = KVIST_ENTRY_READY + kvist_fuzz_u8(input) % 3,
        .slot = kvist_fuzz_u8(input),
        .extent = kvist_fuzz_u8(input),
        .generation = kvist_fuzz_u8(input),
        .parent_tag = number,
    };
    key_words(number, entry.key);
    return entry;
}

static void put(struct kvist_fuzz_input *input)
{
    uint32_t number = kvist_fuzz_u8(input) % KEYS;
    struct model_key *mine = &rig.keys[number];
    struct kvist_entry_copy entry = take_entry(input, number);
    if (mine->present) {
        kvist_map_write(&rig.map, mine->position, &entry);
        mine->entry = entry;
        return;
    }
    uint32_t position = kvist_map_insert(&rig.map, &entry);
    if (position != KVIST_ENTRY_NONE) {
        *mine = (struct model_key){true, position, entry};
    } else {
        /* 128 places were looked at, all of them in use. */
        KVIST_FUZZ_REQUIRE(rig.map.live + rig.map.tombstones >= CAPACITY);
    }
}

static void take_away(struct kvist_fuzz_input *input)
{
    struct model_key *mine = &rig.keys[kvist_fuzz_u8(input) % KEYS];
    if (mine->present) {
        kvist_map_remove(&rig.map, mine->position);
        mine->present = false;
    }
}

/* As eviction does: hide some, undo it for those that are leased, settle the others. */
static void evict(struct kvist_fuzz_input *input)
{
    struct model_key *batch[BATCH_MAX];
    size_t count = 0;
    uint32_t first = kvist_fuzz_u8(input) % KEYS;
    uint32_t stride = 1 + kvist_fuzz_u8(input) % 16;
    uint8_t leased = kvist_fuzz_u8(input);
    for (uint32_t number = first; number < KEYS && count < BATCH_MAX; number += stride) {
        if (rig.keys[number].present) {
            batch[count++] = &rig.keys[number];
        }
    }
    for (size_t index = 0; index < count; index++) {
        struct kvist_entry_copy hidden = batch[index]->entry;
        hidden.state = KVIST_ENTRY_TOMBSTONE;
        kvist_map_write(&rig.map, batch[index]->position, &hidden);
        batch[index]->present = false;
    }
    check_all();
    for (size_t index = 0; index < count; index++) {
        if ((leased & (1U << index)) != 0) {
            kvist_map_write(&rig.map, batch[index]->position, &batch[index]->entry);
            batch[index]->present = true;
        }
    }
    for (size_t index = 0; index < count; index++) {
        if (!batch[index]->present) {
            kvist_map_settle(&rig.map, batch[index]->position);
        }
    }
}

static void moving(void *ctx, const struct kvist_map *map, struct kvist_map *next)
{
    (void)ctx;
    KVIST_FUZZ_REQUIRE(map->carried == map->capacity && next->live == map->live);
    for (uint32_t number = 0; number < KEYS; number++) {
        struct kvist_entry_copy found;
        uint64_t words[4];
        uint8_t key[KVIST_KEY_BYTES];
        key_words(number, words);
        memcpy(key, words, sizeof(key));
        rig.keys[number].position = kvist_map_find(next, key, &found);
    }
}

/* What is complete is moved to at once, or with a later step. */
static void grow(uint32_t step_max)
{
    if (!kvist_map_wants_growth(&rig.map)) {
        return;
    }
    if (rig.map.next == NULL) {
        KVIST_FUZZ_REQUIRE(kvist_map_begin_growth(&rig.map, rig.serial++, NULL) == KVIST_OK);
        rig.map.next->seed = rig.serial; /* the same on every run */
        rig.map.next->header->index_seed = rig.serial;
        return;
    }
    if (kvist_map_can_move(&rig.map) && step_max % 2 == 0) {
        kvist_map_move(&rig.map, moving, NULL);
        return;
    }
    enum kvist_status status = kvist_map_carry(&rig.map, step_max, NULL);
    KVIST_FUZZ_REQUIRE(status == (rig.map.next != NULL ? KVIST_OK : KVIST_NO_SPACE));
}

static void clear(void)
{
    uint32_t live = rig.map.live;
    KVIST_FUZZ_REQUIRE(kvist_map_clear(&rig.map) == live);
    for (uint32_t number = 0; number < KEYS; number++) {
        rig.keys[number].present = false;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t pool_id[KVIST_KEY_BYTES] = {1};
    struct kvist_fuzz_input input = {data, size};
    const struct kvist_map_shape shape = {
        .pool_id = pool_id,
        .slot_bytes = 4096,
        .generation = 1,
        .slots_per_segment = 4,
        .segment_max = 4,
        .index_capacity = CAPACITY,
    };
    memset(&rig, 0, sizeof(rig));
    KVIST_FUZZ_REQUIRE(kvist_map_init(&shape, rig.serial++, &rig.map, NULL) == KVIST_OK);
    rig.map.seed = 1;
    rig.map.header->index_seed = 1;
    for (unsigned step = 0; step < STEPS_MAX && input.left > 0; step++) {
        uint8_t what = kvist_fuzz_u8(&input) % 16;
        if (what < 7) {
            put(&input);
        } else if (what < 10) {
            take_away(&input);
        } else if (what < 12) {
            evict(&input);
        } else if (what < 15) {
            grow(kvist_fuzz_u8(&input));
        } else if (kvist_fuzz_u8(&input) < 32) {
            clear();
        }
        check_all();
    }
    kvist_map_fini(&rig.map);
    return 0;
}

void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx)
{
    uint8_t fill[5 * 60 + 8];
    size_t length = 0;
    for (uint8_t number = 0; number < 60; number++) {
        const uint8_t step[] = {0, number, 0, number, 0, 0};
        memcpy(fill + length, step, 5);
        length += 5;
    }
    emit(ctx, fill, length);
    static const uint8_t then[] = {12, 0, 12, 200, 7, 3, 10, 0};
    memcpy(fill + length, then, sizeof(then));
    emit(ctx, fill, length + sizeof(then));
    static const uint8_t few[] = {0, 1, 0, 1, 0,  0, 0, 5, 0, 2, 0,  0, 0,  9,
                                  0, 3, 0, 0, 10, 1, 3, 2, 7, 5, 12, 0, 15, 0};
    emit(ctx, few, sizeof(few));
}
