/* layout: geometry and its checks, the index protocol under a real writer, memfds. */
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/shm/layout.h"
#include "proto/shm/memfd.h"
#include "tests/support/unit.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define TORN_READ_TEST_US 1000000U

static struct kvist_map_header good_map(void)
{
    struct kvist_map_header header = {
        .magic = KVIST_MAP_MAGIC,
        .layout_version = KVIST_LAYOUT_VERSION,
        .header_bytes = KVIST_HEADER_BYTES,
        .slot_bytes = 512 << 10,
        .slots_per_segment = 8,
        .segment_max = 4,
        .slot_max = 32,
        .index_capacity = 64,
    };
    kvist_map_lay_out(&header);
    return header;
}

static bool map_is_good(struct kvist_map_header header)
{
    return kvist_map_header_check(&header, header.map_bytes);
}

/* Consistent in itself, so that the limit alone is what can refuse it. */
static bool map_is_good_laid_out(struct kvist_map_header header)
{
    kvist_map_lay_out(&header);
    return map_is_good(header);
}

static void map_headers_are_checked(void)
{
    struct kvist_map_header good = good_map();
    KVIST_TEST_TRUE(map_is_good(good));
    KVIST_TEST_TRUE(!kvist_map_header_check(&good, good.map_bytes - 4096));
    struct kvist_map_header bad[15];
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(bad); index++) {
        bad[index] = good;
    }
    bad[0].index_capacity = 63;
    bad[1].index_capacity = 0;
    bad[2].slot_max = 33;
    bad[3].slot_bytes = 4097;
    bad[4].slot_bytes = KVIST_BLOCK_BYTES_MAX + 4096;
    bad[5].slot_bytes = 0;
    bad[6].segment_max = KVIST_SEGMENTS_MAX + 1;
    bad[6].slot_max = bad[6].segment_max * bad[6].slots_per_segment;
    bad[7].segment_max = 0;
    bad[7].slot_max = 0;
    bad[8].slots_per_segment = KVIST_SEGMENT_BYTES_MAX / KVIST_BLOCK_BYTES_MIN + 1;
    bad[8].slot_max = bad[8].segment_max * bad[8].slots_per_segment;
    bad[9].slots_per_segment = 0;
    bad[9].slot_max = 0;
    bad[10].layout_version++;
    bad[11].magic++;
    bad[12].header_bytes = 64;
    bad[13].segment_max = 1U << 30; /* times slots_per_segment is slot_max modulo 2^32 */
    bad[13].slots_per_segment = 8;
    bad[13].slot_max = 0;
    bad[14].slots_per_segment = KVIST_SEGMENT_BYTES_MAX / (512 << 10) + 1;
    bad[14].slot_max = bad[14].segment_max * bad[14].slots_per_segment;
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(bad); index++) {
        KVIST_TEST_TRUE(!map_is_good_laid_out(bad[index]));
    }
    struct kvist_map_header moved = good;
    moved.index_offset += 64;
    KVIST_TEST_TRUE(!map_is_good(moved));
    moved = good;
    moved.slot_table_offset -= 64;
    KVIST_TEST_TRUE(!map_is_good(moved));
    moved = good;
    moved.segment_table_offset = 0;
    KVIST_TEST_TRUE(!map_is_good(moved));
    moved = good;
    moved.map_bytes += 4096;
    KVIST_TEST_TRUE(!map_is_good(moved));
}

static bool page_is_good(struct kvist_page_header header)
{
    return kvist_page_header_check(&header, header.page_bytes);
}

static bool page_is_good_laid_out(struct kvist_page_header header)
{
    kvist_page_lay_out(&header);
    return page_is_good(header);
}

static void page_headers_are_checked(void)
{
    struct kvist_page_header good = {
        .magic = KVIST_PAGE_MAGIC,
        .layout_version = KVIST_LAYOUT_VERSION,
        .header_bytes = KVIST_HEADER_BYTES,
        .lease_max = 100,
        .ticket_max = 10,
        .rank_count = 2,
        .pool_max = KVIST_SESSION_POOLS_MAX,
        .segment_max = KVIST_SEGMENTS_MAX,
        .touch_count = KVIST_TOUCH_RING_COUNT,
    };
    kvist_page_lay_out(&good);
    KVIST_TEST_TRUE(page_is_good(good));
    KVIST_TEST_TRUE(!kvist_page_header_check(&good, good.page_bytes + 4096));
    struct kvist_page_header bad[12];
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(bad); index++) {
        bad[index] = good;
    }
    bad[0].rank_count = KVIST_RANKS_MAX + 1;
    bad[1].rank_count = 0;
    bad[2].lease_max = KVIST_LEASES_MAX + 1;
    bad[3].lease_max = 0;
    bad[4].ticket_max = KVIST_GRANTS_MAX + 1;
    bad[5].ticket_max = 0;
    bad[6].pool_max = KVIST_SESSION_POOLS_MAX + 1;
    bad[7].segment_max = KVIST_SEGMENTS_MAX + 1;
    bad[8].touch_count = KVIST_TOUCH_RING_COUNT - 1;
    bad[9].layout_version++;
    bad[10].magic = KVIST_MAP_MAGIC;
    bad[11].header_bytes = 0;
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(bad); index++) {
        KVIST_TEST_TRUE(!page_is_good_laid_out(bad[index]));
    }
    struct kvist_page_header moved = good;
    moved.touch_offset += 8;
    KVIST_TEST_TRUE(!page_is_good(moved));
    moved = good;
    moved.lease_offset = 0;
    KVIST_TEST_TRUE(!page_is_good(moved));
    moved = good;
    moved.mark_offset += 8;
    KVIST_TEST_TRUE(!page_is_good(moved));
    moved = good;
    moved.mapped_offset += 4;
    KVIST_TEST_TRUE(!page_is_good(moved));
    moved = good;
    moved.page_bytes += 4096;
    KVIST_TEST_TRUE(!page_is_good(moved));
}

/* A writer that rewrites one entry with matching words all the time. */
struct seqlock_run {
    struct kvist_index_entry entry;
    _Atomic bool stop;
};

static void *rewrite_entry(void *ctx)
{
    struct seqlock_run *run = ctx;
    for (uint64_t value = 1; !run->stop; value++) {
        struct kvist_entry_copy copy = {
            .state = KVIST_ENTRY_READY,
            .slot = (uint32_t)value,
            .generation = value,
            .parent_tag = value,
            .key = {value, value, value, value},
        };
        kvist_entry_write(&run->entry, &copy);
    }
    return NULL;
}

static void entry_reads_are_never_torn(void)
{
    struct seqlock_run run = {.stop = false};
    pthread_t thread;
    KVIST_TEST_FATAL(pthread_create(&thread, NULL, rewrite_entry, &run) == 0);
    uint64_t consistent = 0;
    uint64_t deadline_us = kvist_clock_now_us() + TORN_READ_TEST_US;
    for (uint64_t reads = 0; reads % 1024 != 0 || kvist_clock_now_us() < deadline_us; reads++) {
        struct kvist_entry_copy copy;
        if (!kvist_entry_read(&run.entry, &copy)) {
            continue;
        }
        consistent++;
        bool equal = copy.slot == (uint32_t)copy.generation && copy.parent_tag == copy.generation;
        for (unsigned word = 0; word < 4; word++) {
            equal = equal && copy.key[word] == copy.generation;
        }
        KVIST_TEST_FATAL(equal);
    }
    run.stop = true;
    (void)pthread_join(thread, NULL);
    KVIST_TEST_TRUE(consistent > 0);
}

static void an_entry_left_odd_is_a_miss(void)
{
    struct kvist_index_entry entry = {.sequence = 7, .state = KVIST_ENTRY_READY};
    struct kvist_entry_copy copy;
    KVIST_TEST_TRUE(!kvist_entry_read(&entry, &copy));
}

static void finding_is_bounded(void)
{
    enum { CAPACITY = 256 };
    struct kvist_index_entry *index = calloc(CAPACITY, sizeof(*index));
    KVIST_TEST_FATAL(index != NULL);
    for (uint32_t at = 0; at < CAPACITY; at++) {
        struct kvist_entry_copy other = {.state = KVIST_ENTRY_READY, .key = {at + 1, 1, 2, 3}};
        kvist_entry_write(&index[at], &other);
    }
    uint64_t words[4] = {77777, 1, 2, 3};
    uint8_t key[KVIST_KEY_BYTES];
    memcpy(key, words, sizeof(key));
    struct kvist_entry_copy copy;
    KVIST_TEST_EQUAL(kvist_index_find(index, CAPACITY, 0, key, &copy), KVIST_ENTRY_NONE);

    uint32_t home = kvist_index_home(words, 0, CAPACITY);
    uint32_t position = (home + KVIST_INDEX_PROBE_MAX - 1) % CAPACITY;
    struct kvist_entry_copy mine = {.state = KVIST_ENTRY_READY, .slot = 9};
    memcpy(mine.key, words, sizeof(words));
    kvist_entry_write(&index[position], &mine);
    KVIST_TEST_EQUAL(kvist_index_find(index, CAPACITY, 0, key, &copy), position);
    KVIST_TEST_EQUAL(copy.slot, 9);

    mine.state = KVIST_ENTRY_TOMBSTONE;
    kvist_entry_write(&index[position], &mine);
    KVIST_TEST_EQUAL(kvist_index_find(index, CAPACITY, 0, key, &copy), KVIST_ENTRY_NONE);
    free(index);
}

static void memfds_are_sealed_and_read_only_when_asked(void)
{
    int fd = -1;
    int read_only = -1;
    void *map = NULL;
    uint64_t bytes = 0;
    KVIST_TEST_STATUS(kvist_memfd_create("s00000001", 1 << 20, &fd, NULL), KVIST_OK);
    KVIST_TEST_TRUE(ftruncate(fd, 4096) != 0);
    KVIST_TEST_STATUS(kvist_memfd_check(fd, &bytes, NULL), KVIST_OK);
    KVIST_TEST_EQUAL(bytes, 1 << 20);
    KVIST_TEST_STATUS(kvist_memfd_check_own(fd, bytes, NULL), KVIST_OK);
    KVIST_TEST_STATUS(kvist_memfd_map(fd, bytes, KVIST_MEMFD_WRITE, &map, NULL), KVIST_OK);
    KVIST_TEST_STATUS(kvist_memfd_populate(map, bytes, NULL, NULL), KVIST_OK);
    kvist_memfd_unmap(&map, bytes);
    KVIST_TEST_STATUS(kvist_memfd_reopen_read_only(fd, &read_only, NULL), KVIST_OK);
    KVIST_TEST_TRUE(kvist_memfd_map(read_only, bytes, KVIST_MEMFD_WRITE, &map, NULL) != KVIST_OK);
    KVIST_TEST_STATUS(kvist_memfd_map(read_only, bytes, KVIST_MEMFD_READ, &map, NULL), KVIST_OK);
    kvist_memfd_populate_page_table(map, bytes);
    kvist_memfd_unmap(&map, bytes);
    (void)close(read_only);
    (void)close(fd);

    int pipe_fds[2];
    KVIST_TEST_FATAL(pipe(pipe_fds) == 0);
    KVIST_TEST_STATUS(kvist_memfd_check(pipe_fds[0], &bytes, NULL), KVIST_CORRUPT);
    (void)close(pipe_fds[0]);
    (void)close(pipe_fds[1]);
    KVIST_TEST_STATUS(
        kvist_memfd_create("a-name-of-more-bytes-than-a-memfd-may-have", 4096, &fd, NULL),
        KVIST_INVALID);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"map headers are checked", map_headers_are_checked},
        {"page headers are checked", page_headers_are_checked},
        {"entry reads are never torn", entry_reads_are_never_torn},
        {"an entry left odd is a miss", an_entry_left_odd_is_a_miss},
        {"finding is bounded", finding_is_bounded},
        {"memfds are sealed and read-only when asked", memfds_are_sealed_and_read_only_when_asked},
    };
    return kvist_unit_main("layout", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL);
}
