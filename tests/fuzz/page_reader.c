/*
 * Fuzz target: a session page that its processes fill with whatever they like, as the daemon reads
 * it.
 *
 * Input: ranks; then writes of {which part, where, value} and reads, in any order. The reads stay
 * within the page, come to an end, and say of marks and mapped segments what the words say.
 */
#include "proto/shm/memfd.h"
#include "storage/page.h"
#include "tests/fuzz/fuzz.h"

#define STEPS_MAX   256U
#define TOUCHES_MAX 256U

struct rig {
    struct kvist_page page;
    void *writable;
    struct kvist_page_header geometry;
};

static void write_word(struct rig *rig, struct kvist_fuzz_input *input, uint8_t part)
{
    const uint64_t offsets[] = {0,
                                rig->geometry.lease_offset,
                                rig->geometry.mark_offset,
                                rig->geometry.mapped_offset,
                                rig->geometry.touch_offset,
                                offsetof(struct kvist_page_header, lease_high),
                                offsetof(struct kvist_page_header, touch_head),
                                KVIST_HEADER_BYTES};
    uint64_t at = offsets[part] + kvist_fuzz_number(input) * 4;
    uint64_t value = kvist_fuzz_number(input);
    at = at % (rig->page.bytes - sizeof(value)) / 8 * 8;
    memcpy((char *)rig->writable + at, &value, sizeof(value));
}

static void read_leases(struct rig *rig)
{
    uint32_t high = kvist_page_lease_high(&rig->page);
    uint64_t sum = 0;
    KVIST_FUZZ_REQUIRE(high <= KVIST_LEASES_MAX);
    for (uint32_t index = 0; index < high; index++) {
        sum += kvist_page_lease(&rig->page, index);
    }
    (void)sum;
}

static void read_mark(struct rig *rig, struct kvist_fuzz_input *input)
{
    uint32_t ticket = kvist_fuzz_u16(input) % KVIST_GRANTS_MAX;
    uint64_t reservation = kvist_fuzz_number(input);
    bool filled = true;
    for (uint32_t rank = 0; rank < rig->page.rank_count; rank++) {
        uint64_t mark = 0;
        memcpy(&mark,
               (char *)rig->writable + rig->geometry.mark_offset +
                   ((uint64_t)rank * KVIST_GRANTS_MAX + ticket) * sizeof(mark),
               sizeof(mark));
        filled = filled && mark == reservation;
    }
    KVIST_FUZZ_REQUIRE(kvist_page_filled(&rig->page, ticket, reservation) == filled);
}

static void read_mapped(struct rig *rig, struct kvist_fuzz_input *input)
{
    uint32_t pool = kvist_fuzz_u8(input) % KVIST_SESSION_POOLS_MAX;
    uint32_t segment = kvist_fuzz_u16(input) % KVIST_SEGMENTS_MAX;
    uint32_t serial = (uint32_t)kvist_fuzz_number(input);
    bool mapped = true;
    for (uint32_t rank = 0; rank < rig->page.rank_count; rank++) {
        uint32_t word = 0;
        uint64_t index =
            ((uint64_t)rank * KVIST_SESSION_POOLS_MAX + pool) * KVIST_SEGMENTS_MAX + segment;
        memcpy(&word,
               (char *)rig->writable + rig->geometry.mapped_offset + index * sizeof(word),
               sizeof(word));
        mapped = mapped && word == serial;
    }
    KVIST_FUZZ_REQUIRE(kvist_page_has_mapped(&rig->page, pool, segment, serial) == mapped);
}

/* However the head jumps, there is never more than a ring to take. */
static void read_touches(struct rig *rig, struct kvist_fuzz_input *input)
{
    uint64_t refs[TOUCHES_MAX];
    uint32_t count_max = 1 + kvist_fuzz_u8(input);
    uint64_t total = 0;
    uint32_t count = 0;
    do {
        count = kvist_page_take_touches(&rig->page, refs, count_max);
        KVIST_FUZZ_REQUIRE(count <= count_max);
        total += count;
        KVIST_FUZZ_REQUIRE(total <= KVIST_TOUCH_RING_COUNT);
    } while (count == count_max);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t session_id[16] = {1};
    struct kvist_fuzz_input input = {data, size};
    struct rig rig;
    uint32_t rank_count = 1 + kvist_fuzz_u8(&input) % KVIST_RANKS_MAX;
    KVIST_FUZZ_REQUIRE(kvist_page_init(session_id, rank_count, 1, 1, &rig.page, NULL) == KVIST_OK);
    KVIST_FUZZ_REQUIRE(
        kvist_memfd_map(rig.page.fd, rig.page.bytes, KVIST_MEMFD_WRITE, &rig.writable, NULL) ==
        KVIST_OK);
    memcpy(&rig.geometry, rig.writable, sizeof(rig.geometry));
    for (unsigned step = 0; step < STEPS_MAX && input.left > 0; step++) {
        uint8_t what = kvist_fuzz_u8(&input) % 12;
        if (what < 8) {
            write_word(&rig, &input, what);
        } else if (what == 8) {
            read_leases(&rig);
        } else if (what == 9) {
            read_mark(&rig, &input);
        } else if (what == 10) {
            read_mapped(&rig, &input);
        } else {
            read_touches(&rig, &input);
        }
    }
    kvist_memfd_unmap(&rig.writable, rig.page.bytes);
    kvist_page_fini(&rig.page);
    return 0;
}

void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx)
{
    /* ranks; write lease_high, lease 1; read leases */
    static const uint8_t leases[] = {0, 5, 0, 2, 1, 4, 7, 8};
    static const uint8_t marks[] = {0, 2, 6, 9, 9, 3, 0, 9, 9, 3, 0, 8};
    static const uint8_t mapped[] = {1, 3, 2, 5, 10, 0, 1, 0, 5};
    static const uint8_t touches[] = {0,   4,   0,   7,   6,   0,   3,  11, 9, 6, 0, 255, 255, 255,
                                      255, 255, 255, 255, 255, 255, 11, 0,  6, 0, 1, 11,  255};
    emit(ctx, leases, sizeof(leases));
    emit(ctx, marks, sizeof(marks));
    emit(ctx, mapped, sizeof(mapped));
    emit(ctx, touches, sizeof(touches));
}
