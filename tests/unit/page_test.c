/* page: what a session writes is bounded, whatever it is. */
#include "proto/shm/memfd.h"
#include "storage/page.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"

#include <stdlib.h>

#define SLOT_BYTES (64ULL << 10)

static struct kvist_page page;
static void *peer; /* as the session's processes have it */
static struct kvist_page_header geometry;

static void setup(void)
{
    static const uint8_t id[16] = {1, 2, 3};
    KVIST_TEST_FATAL(kvist_page_init(id, 2, 1, 7, &page, NULL) == KVIST_OK);
    KVIST_TEST_FATAL(kvist_memfd_map(page.fd, page.bytes, KVIST_MEMFD_WRITE, &peer, NULL) ==
                     KVIST_OK);
    memcpy(&geometry, peer, sizeof(geometry));
}

static void teardown(void)
{
    kvist_memfd_unmap(&peer, page.bytes);
    kvist_page_fini(&page);
    kvist_page_fini(&page);
}

static void write_touches(const uint64_t *refs, uint64_t count)
{
    struct kvist_page_header *header = peer;
    _Atomic uint64_t *ring = (void *)((char *)peer + geometry.touch_offset);
    uint64_t head = atomic_load(&header->touch_head);
    for (uint64_t index = 0; index < count; index++) {
        ring[(head + index) % KVIST_TOUCH_RING_COUNT] = refs[index];
    }
    atomic_store(&header->touch_head, head + count);
}

static void its_header_is_valid(void)
{
    KVIST_TEST_TRUE(kvist_page_header_check(&geometry, page.bytes));
    KVIST_TEST_EQUAL(geometry.rank_count, 2);
    KVIST_TEST_EQUAL(kvist_page_lease_high(&page), 0);
}

static void marks_and_mapped_need_every_rank(void)
{
    _Atomic uint64_t *marks = (void *)((char *)peer + geometry.mark_offset);
    uint32_t last = KVIST_GRANTS_MAX - 1;
    KVIST_TEST_TRUE(!kvist_page_filled(&page, last, 55));
    marks[last] = 55;
    KVIST_TEST_TRUE(!kvist_page_filled(&page, last, 55));
    marks[KVIST_GRANTS_MAX + last] = 55;
    KVIST_TEST_TRUE(kvist_page_filled(&page, last, 55));
    KVIST_TEST_TRUE(!kvist_page_filled(&page, last, 56));

    _Atomic uint32_t *mapped = (void *)((char *)peer + geometry.mapped_offset);
    uint32_t at = (KVIST_SESSION_POOLS_MAX - 1) * KVIST_SEGMENTS_MAX + KVIST_SEGMENTS_MAX - 1;
    mapped[at] = 9;
    KVIST_TEST_TRUE(
        !kvist_page_has_mapped(&page, KVIST_SESSION_POOLS_MAX - 1, KVIST_SEGMENTS_MAX - 1, 9));
    mapped[KVIST_SESSION_POOLS_MAX * KVIST_SEGMENTS_MAX + at] = 9;
    KVIST_TEST_TRUE(
        kvist_page_has_mapped(&page, KVIST_SESSION_POOLS_MAX - 1, KVIST_SEGMENTS_MAX - 1, 9));
}

static void touches_are_lossy_and_bounded(void)
{
    static uint64_t refs[3 * KVIST_TOUCH_RING_COUNT];
    static uint64_t taken[KVIST_TOUCH_RING_COUNT];
    for (uint64_t index = 0; index < 3 * KVIST_TOUCH_RING_COUNT; index++) {
        refs[index] = index + 1;
    }
    write_touches(refs, 10);
    KVIST_TEST_EQUAL(kvist_page_take_touches(&page, taken, 4), 4);
    KVIST_TEST_EQUAL(taken[3], 4);
    KVIST_TEST_EQUAL(kvist_page_take_touches(&page, taken, 100), 6);
    KVIST_TEST_EQUAL(taken[5], 10);
    KVIST_TEST_EQUAL(kvist_page_take_touches(&page, taken, 100), 0);
    write_touches(refs, 2 * KVIST_TOUCH_RING_COUNT + 5);
    uint32_t count = kvist_page_take_touches(&page, taken, KVIST_TOUCH_RING_COUNT);
    KVIST_TEST_EQUAL(count, KVIST_TOUCH_RING_COUNT);
    KVIST_TEST_EQUAL(taken[count - 1], 2 * KVIST_TOUCH_RING_COUNT + 5);
    /* A head that goes back, or jumps. */
    struct kvist_page_header *header = peer;
    atomic_store(&header->touch_head, 3);
    KVIST_TEST_TRUE(kvist_page_take_touches(&page, taken, 50) <= 50);
    atomic_store(&header->touch_head, UINT64_MAX);
    KVIST_TEST_TRUE(kvist_page_take_touches(&page, taken, 50) <= 50);
}

static void what_the_header_says_later_is_not_believed(void)
{
    memset(peer, 0xff, page.bytes);
    KVIST_TEST_EQUAL(kvist_page_lease_high(&page), KVIST_LEASES_MAX);
    KVIST_TEST_EQUAL(kvist_page_lease(&page, KVIST_LEASES_MAX - 1), UINT64_MAX);
    KVIST_TEST_TRUE(!kvist_page_filled(&page, 0, 1));
    KVIST_TEST_TRUE(!kvist_page_has_mapped(&page, 0, 0, 1));
}

/* A store goes on whatever a session's page says, and others are served. */
static void a_hostile_page_harms_nobody_else(void)
{
    struct kvist_store_options options = kvist_test_options(16 << 20);
    struct kvist_store *store = kvist_test_store_open(&options);
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *good = kvist_test_engine_open(store, 1, 1);
    struct kvist_test_engine *evil = kvist_test_engine_open(store, 2, 1);
    uint32_t ordinal = kvist_test_engine_attach(good, pool);
    (void)kvist_test_engine_attach(evil, pool);
    kvist_test_settle(store);
    srand(3);
    for (unsigned round = 0; round < 40; round++) {
        uint8_t *bytes = evil->page;
        if (round % 4 == 0) {
            memset(bytes, (int)(round * 37), evil->geometry.page_bytes);
        } else {
            for (uint64_t at = 0; at < evil->geometry.page_bytes; at += 3) {
                bytes[at] = (uint8_t)rand();
            }
        }
        for (unsigned put = 0; put < 12; put++) {
            enum kvist_status status =
                kvist_test_engine_put(good, ordinal, round * 12 + put, SLOT_BYTES);
            KVIST_TEST_TRUE(status == KVIST_OK || status == KVIST_BUSY);
        }
        kvist_test_settle(store);
        struct kvist_store_stats stats;
        kvist_store_stats(store, &stats);
        struct kvist_store_session_info info;
        kvist_store_session_info(evil->session, &info);
    }
    KVIST_TEST_EQUAL(kvist_test_engine_probe(good, ordinal, 40 * 12 - 1), KVIST_ENTRY_READY);
    kvist_test_engine_close(&evil);
    kvist_test_settle(store);
    kvist_test_engine_close(&good);
    kvist_store_close(&store);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"its header is valid", its_header_is_valid},
        {"marks and mapped need every rank", marks_and_mapped_need_every_rank},
        {"touches are lossy and bounded", touches_are_lossy_and_bounded},
        {"what the header says later is not believed", what_the_header_says_later_is_not_believed},
        {"a hostile page harms nobody else", a_hostile_page_harms_nobody_else},
    };
    return kvist_unit_main("page", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
