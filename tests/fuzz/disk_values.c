/*
 * Fuzz target: what stands on disk, as it is read back.
 *
 * Input: a kind, then: a value of the tier's index; or a block, edits of the record that holds it,
 * and whether the header's checksum is made right again. A value that decodes is one that the
 * store can live with. Of a record, nothing comes back but the block that was written.
 */
#include "proto/key/checksum.h"
#include "storage/tier_codec.h"
#include "tests/fuzz/fuzz.h"

#include <sys/mman.h>
#include <unistd.h>

#define PAGE            KVIST_RECORD_PAGE_BYTES
#define BLOCK_BYTES_MAX 10000U
#define EDITS_MAX       8U

static const uint8_t pool_id[KVIST_KEY_BYTES] = {1, 2, 3};
static const uint8_t key[KVIST_KEY_BYTES] = {4, 5, 6};

/* --- Values of the index --------------------------------------------------------------------- */

static void decode_block(struct kvist_fuzz_input *input)
{
    struct kvist_tier_record record;
    struct kvist_tier_record again;
    uint8_t value[KVIST_TIER_BLOCK_VALUE_BYTES];
    if (!kvist_tier_block_decode(pool_id, key, input->at, input->left, &record)) {
        return;
    }
    KVIST_FUZZ_REQUIRE(record.block.block_bytes >= 1 &&
                       record.block.block_bytes <= KVIST_BLOCK_BYTES_MAX);
    KVIST_FUZZ_REQUIRE(record.block.extent != 0);
    KVIST_FUZZ_REQUIRE(record.offset >= PAGE && record.offset % PAGE == 0 &&
                       record.offset <= INT64_MAX - kvist_record_bytes(KVIST_BLOCK_BYTES_MAX));
    kvist_tier_block_encode(&record, value);
    KVIST_FUZZ_REQUIRE(kvist_tier_block_decode(pool_id, key, value, sizeof(value), &again));
    KVIST_FUZZ_REQUIRE(memcmp(value, input->at, sizeof(value)) == 0);
}

static void decode_pool(struct kvist_fuzz_input *input)
{
    struct kvist_tier_pool pool;
    uint8_t pool_key[KVIST_TIER_POOL_KEY_BYTES];
    uint8_t value[KVIST_TIER_POOL_VALUE_BYTES];
    kvist_tier_pool_key(pool_id, pool_key);
    size_t key_bytes = sizeof(pool_key) - (kvist_fuzz_u8(input) == 1);
    if (!kvist_tier_pool_decode(pool_key, key_bytes, input->at, input->left, &pool)) {
        return;
    }
    KVIST_FUZZ_REQUIRE(pool.slot_bytes >= KVIST_BLOCK_BYTES_MIN &&
                       pool.slot_bytes <= KVIST_BLOCK_BYTES_MAX &&
                       pool.slot_bytes % KVIST_SLOT_ALIGN_BYTES == 0);
    KVIST_FUZZ_REQUIRE(strnlen(pool.tenant, sizeof(pool.tenant)) < sizeof(pool.tenant));
    KVIST_FUZZ_REQUIRE(strnlen(pool.description, sizeof(pool.description)) <
                       sizeof(pool.description));
    kvist_tier_pool_encode(&pool, value);
    struct kvist_tier_pool again;
    KVIST_FUZZ_REQUIRE(
        kvist_tier_pool_decode(pool_key, sizeof(pool_key), value, sizeof(value), &again));
    KVIST_FUZZ_REQUIRE(strcmp(pool.tenant, again.tenant) == 0 &&
                       strcmp(pool.description, again.description) == 0 &&
                       pool.slot_bytes == again.slot_bytes && pool.generation == again.generation &&
                       pool.sparse == again.sparse);
}

static void decode_extent_key(struct kvist_fuzz_input *input)
{
    uint8_t given[KVIST_TIER_EXTENT_KEY_BYTES];
    uint8_t made[KVIST_TIER_EXTENT_KEY_BYTES];
    kvist_fuzz_take(input, given, sizeof(given));
    given[0] = KVIST_TIER_EXTENT_PREFIX;
    kvist_tier_extent_key(
        kvist_tier_extent_key_number(given), kvist_tier_extent_key_offset(given), made);
    KVIST_FUZZ_REQUIRE(memcmp(given, made, sizeof(made)) == 0);
}

/* --- Records --------------------------------------------------------------------------------- */

static void *make_aligned(size_t bytes)
{
    void *memory = NULL;
    KVIST_FUZZ_REQUIRE(posix_memalign(&memory, PAGE, bytes) == 0);
    return memory;
}

static void fix_header(uint8_t *page)
{
    uint64_t sum = kvist_checksum(page, PAGE - sizeof(sum), 0);
    memcpy(page + PAGE - sizeof(sum), &sum, sizeof(sum));
}

/* Bytes of the record that say something; what follows the block's last ones is not looked at. */
static void spoil(struct kvist_fuzz_input *input, uint8_t *file, uint64_t record_bytes)
{
    bool fixes = (kvist_fuzz_u8(input) & 1U) != 0;
    for (unsigned edit = 0; edit < EDITS_MAX && input->left > 0; edit++) {
        uint64_t at = kvist_fuzz_u16(input) % record_bytes;
        file[at] ^= kvist_fuzz_u8(input);
    }
    if (fixes) {
        fix_header(file);
    }
}

static void read_record(struct kvist_fuzz_input *input)
{
    static uint8_t pages[2 * PAGE] __attribute__((aligned(4096)));
    struct kvist_tier_record record = {.offset = (uint64_t)(kvist_fuzz_u8(input) % 4) * PAGE};
    uint64_t block_bytes = 1 + kvist_fuzz_u16(input) % BLOCK_BYTES_MAX;
    uint64_t record_bytes = kvist_record_bytes(block_bytes);
    record.block.block_bytes = block_bytes;
    record.block.extent = 1 + kvist_fuzz_u8(input);
    record.block.parent_tag = kvist_fuzz_u64(input);
    record.block.pool_generation = kvist_fuzz_u8(input);
    memcpy(record.block.pool_id, pool_id, KVIST_KEY_BYTES);
    memcpy(record.block.key, key, KVIST_KEY_BYTES);
    uint8_t *source = make_aligned(block_bytes);
    uint8_t *target = make_aligned(block_bytes);
    memset(source, kvist_fuzz_u8(input), block_bytes);
    memset(target, 0, block_bytes);
    record.block.checksum = kvist_record_checksum(&record.block, source);

    int fd = memfd_create("record", MFD_CLOEXEC);
    uint64_t file_bytes = record.offset + record_bytes;
    KVIST_FUZZ_REQUIRE(fd >= 0);
    KVIST_FUZZ_REQUIRE(kvist_record_write(fd, false, &record, source, pages, NULL) == KVIST_OK);
    uint8_t *written = malloc(record_bytes);
    uint8_t *file = malloc(record_bytes);
    KVIST_FUZZ_REQUIRE(written != NULL && file != NULL);
    KVIST_FUZZ_REQUIRE(pread(fd, written, record_bytes, (off_t)record.offset) ==
                       (ssize_t)record_bytes);
    memcpy(file, written, record_bytes);
    uint8_t cut = kvist_fuzz_u8(input);
    spoil(input, file, record_bytes);
    KVIST_FUZZ_REQUIRE(pwrite(fd, file, record_bytes, (off_t)record.offset) ==
                       (ssize_t)record_bytes);
    bool is_cut = cut > 200;
    KVIST_FUZZ_REQUIRE(!is_cut || ftruncate(fd, (off_t)(file_bytes - cut)) == 0);

    enum kvist_status status = kvist_record_read(fd, false, &record, target, pages, NULL);
    bool same = !is_cut && memcmp(file, written, PAGE + block_bytes) == 0;
    KVIST_FUZZ_REQUIRE(status == (same ? KVIST_OK : KVIST_CORRUPT));
    KVIST_FUZZ_REQUIRE(!same || memcmp(source, target, block_bytes) == 0);
    (void)close(fd);
    free(written);
    free(file);
    free(source);
    free(target);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvist_fuzz_input input = {data, size};
    switch (kvist_fuzz_u8(&input) % 4) {
    case 0:
        decode_block(&input);
        break;
    case 1:
        decode_pool(&input);
        break;
    case 2:
        decode_extent_key(&input);
        break;
    default:
        read_record(&input);
    }
    return 0;
}

void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx)
{
    const struct kvist_tier_record record = {
        .block = {.block_bytes = 5000, .extent = 7, .checksum = 9, .pool_generation = 1},
        .offset = PAGE,
    };
    const struct kvist_tier_pool pool = {
        .slot_bytes = 65536, .generation = 3, .sparse = true, .tenant = "a", .description = "b"};
    uint8_t block_seed[1 + KVIST_TIER_BLOCK_VALUE_BYTES] = {0};
    uint8_t pool_seed[2 + KVIST_TIER_POOL_VALUE_BYTES] = {1};
    static const uint8_t extent_seed[] = {2, 'x', 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    /* kind, offset, length, extent, parent, generation, fill, cut, fix, edits */
    static const uint8_t whole[] = {3, 1, 0x88, 0x13, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 'x'};
    static const uint8_t spoilt[] = {3, 0, 0xff, 0x0f, 1, 0,  0, 0, 0, 0,  0, 0,
                                     0, 1, 'x',  0,    1, 16, 0, 5, 0, 16, 1};
    static const uint8_t cut[] = {3, 0, 0, 16, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 'x', 255};
    kvist_tier_block_encode(&record, block_seed + 1);
    kvist_tier_pool_encode(&pool, pool_seed + 2);
    emit(ctx, block_seed, sizeof(block_seed));
    emit(ctx, pool_seed, sizeof(pool_seed));
    emit(ctx, extent_seed, sizeof(extent_seed));
    emit(ctx, whole, sizeof(whole));
    emit(ctx, spoilt, sizeof(spoilt));
    emit(ctx, cut, sizeof(cut));
}
