#include "storage/record.h"

#include "proto/base/fault.h"
#include "proto/key/checksum.h"
#include "proto/key/key.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE           KVIST_RECORD_PAGE_BYTES
#define RECORD_MAGIC   0x314345525453564bULL
#define RECORD_VERSION 1U
#define PROBE_NAME     "probe"

_Static_assert(__BYTE_ORDER == __LITTLE_ENDIAN, "on-disk integers are little-endian");

struct kvist_record_header {
    uint64_t magic;
    uint32_t version;
    uint32_t extent;
    uint64_t offset;
    uint8_t pool_id[KVIST_KEY_BYTES];
    uint8_t key[KVIST_KEY_BYTES];
    uint64_t parent_tag;
    uint64_t pool_generation;
    uint64_t block_bytes;
    uint64_t checksum;
    uint8_t zero[PAGE - 128];
    uint64_t header_checksum; /* XXH3-64 of all before */
};

_Static_assert(sizeof(struct kvist_record_header) == PAGE, "one page");

void *kvist_record_memory(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    page = page > PAGE ? page : PAGE;
    bytes = (bytes + page - 1) / page * page;
    void *memory = aligned_alloc(page, bytes);
    if (memory != NULL) {
        (void)madvise(memory, bytes, MADV_DONTDUMP); /* stays so when it is freed: no harm */
    }
    return memory;
}

/* A record as a scatter list: header page, whole pages of the block, its last bytes in a page. */
struct record_parts {
    struct iovec vector[3];
    int count;
    uint64_t bytes;
    uint64_t body_bytes;
    uint64_t tail_bytes;
};

uint64_t kvist_record_bytes(uint64_t block_bytes)
{
    return PAGE + (block_bytes + PAGE - 1) / PAGE * PAGE;
}

uint64_t kvist_record_checksum(const struct kvist_tier_block *block, const void *bytes)
{
    uint64_t seed = kvist_key_checksum_seed(block->key, block->pool_id);
    return kvist_checksum(bytes, block->block_bytes, seed);
}

static struct record_parts parts_make(uint64_t block_bytes, void *body, uint8_t *pages)
{
    struct record_parts parts = {.count = 1, .bytes = kvist_record_bytes(block_bytes)};
    parts.tail_bytes = block_bytes % PAGE;
    parts.body_bytes = block_bytes - parts.tail_bytes;
    parts.vector[0] = (struct iovec){pages, PAGE};
    if (parts.body_bytes > 0) {
        parts.vector[parts.count++] = (struct iovec){body, parts.body_bytes};
    }
    if (parts.tail_bytes > 0) {
        parts.vector[parts.count++] = (struct iovec){pages + PAGE, PAGE};
    }
    return parts;
}

/* Drop `done` bytes from the front of what is still to be moved. */
static void parts_advance(struct record_parts *parts, struct iovec **vector, size_t done)
{
    while (done > 0 && done >= (*vector)->iov_len) {
        done -= (*vector)->iov_len;
        (*vector)++;
        parts->count--;
    }
    if (done > 0) {
        (*vector)->iov_base = (uint8_t *)(*vector)->iov_base + done;
        (*vector)->iov_len -= done;
    }
}

/* Move all parts, going on after short transfers. 0, or errno; ENODATA: the file ends before. */
static int parts_move(int fd, struct record_parts *parts, uint64_t offset, bool out)
{
    struct iovec *vector = parts->vector;
    uint64_t left = parts->bytes;
    while (left > 0) {
        ssize_t moved = out ? pwritev(fd, vector, parts->count, (off_t)offset)
                            : preadv(fd, vector, parts->count, (off_t)offset);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved < 0) {
            return errno;
        }
        if (moved == 0 || moved % PAGE != 0) {
            return out ? EIO : ENODATA;
        }
        left -= (uint64_t)moved;
        offset += (uint64_t)moved;
        parts_advance(parts, &vector, (size_t)moved);
    }
    return 0;
}

static void header_fill(struct kvist_record_header *header, const struct kvist_tier_record *record)
{
    memset(header, 0, sizeof(*header));
    header->magic = RECORD_MAGIC;
    header->version = RECORD_VERSION;
    header->extent = record->block.extent;
    header->offset = record->offset;
    memcpy(header->pool_id, record->block.pool_id, sizeof(header->pool_id));
    memcpy(header->key, record->block.key, sizeof(header->key));
    header->parent_tag = record->block.parent_tag;
    header->pool_generation = record->block.pool_generation;
    header->block_bytes = record->block.block_bytes;
    header->checksum = record->block.checksum;
    header->header_checksum =
        kvist_checksum(header, offsetof(struct kvist_record_header, header_checksum), 0);
}

/* Written back and dropped, so that blocks do not push other things out of the page cache. */
static void cache_drop(int fd, uint64_t offset, uint64_t bytes, bool written)
{
    if (written) {
        (void)sync_file_range(fd,
                              (off_t)offset,
                              (off_t)bytes,
                              SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                  SYNC_FILE_RANGE_WAIT_AFTER);
    }
    (void)posix_fadvise(fd, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
}

/* A disk that takes its time, for a test. */
static void stall(void)
{
    if (kvist_fault_point("tier.stall")) {
        (void)sleep(1);
    }
}

enum kvist_status kvist_record_write(int fd,
                                     bool direct,
                                     const struct kvist_tier_record *record,
                                     const void *source,
                                     uint8_t *pages,
                                     struct kvist_error *err)
{
    union {
        const void *source;
        void *body; /* pwritev(2) takes a plain pointer and does not write through it */
    } memory = {.source = source};
    header_fill((struct kvist_record_header *)(void *)pages, record);
    struct record_parts parts = parts_make(record->block.block_bytes, memory.body, pages);
    if (parts.tail_bytes > 0) {
        memset(pages + PAGE, 0, PAGE);
        memcpy(pages + PAGE, (const uint8_t *)source + parts.body_bytes, parts.tail_bytes);
    }
    uint64_t bytes = parts.bytes;
    stall();
    int failure =
        kvist_fault_point("tier.extent.write") ? EIO : parts_move(fd, &parts, record->offset, true);
    if (failure != 0) {
        return kvist_error_set_errno(
            err, failure, "pwritev", "cannot write to extent %u", record->block.extent);
    }
    if (!direct) {
        cache_drop(fd, record->offset, bytes, true);
    }
    return KVIST_OK;
}

enum kvist_status kvist_record_read(int fd,
                                    bool direct,
                                    const struct kvist_tier_record *record,
                                    void *target,
                                    uint8_t *pages,
                                    struct kvist_error *err)
{
    const struct kvist_tier_block *block = &record->block;
    struct record_parts parts = parts_make(block->block_bytes, target, pages);
    uint64_t bytes = parts.bytes;
    stall();
    int failure =
        kvist_fault_point("tier.extent.read") ? EIO : parts_move(fd, &parts, record->offset, false);
    if (failure != 0 && failure != ENODATA) {
        return kvist_error_set_errno(
            err, failure, "preadv", "cannot read extent %u", block->extent);
    }
    if (!direct) {
        cache_drop(fd, record->offset, bytes, false);
    }
    struct kvist_record_header expected;
    header_fill(&expected, record);
    if (failure == ENODATA || memcmp(pages, &expected, sizeof(expected)) != 0) {
        return kvist_error_set(
            err, KVIST_CORRUPT, 0, "tier", "a record header in extent %u is wrong", block->extent);
    }
    if (parts.tail_bytes > 0) {
        memcpy((uint8_t *)target + parts.body_bytes, pages + PAGE, parts.tail_bytes);
    }
    if (kvist_record_checksum(block, target) != block->checksum) {
        return kvist_error_set(err,
                               KVIST_CORRUPT,
                               0,
                               "tier",
                               "a block in extent %u does not check out",
                               block->extent);
    }
    return KVIST_OK;
}

/* What the file system says of its alignment; true where it says nothing. */
static bool alignment_suits(int fd)
{
#ifdef STATX_DIOALIGN
    struct statx state;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &state) == 0 &&
        (state.stx_mask & STATX_DIOALIGN) != 0) {
        return state.stx_dio_mem_align != 0 && PAGE % state.stx_dio_mem_align == 0 &&
               PAGE % state.stx_dio_offset_align == 0;
    }
#endif
    (void)fd;
    return true;
}

static int probe_pages(int fd, uint8_t *pages)
{
    memset(pages, 0x5a, PAGE);
    memset(pages + PAGE, 0, PAGE);
    if (!alignment_suits(fd)) {
        return EINVAL;
    }
    ssize_t moved = pwrite(fd, pages, PAGE, PAGE);
    if (moved == PAGE) {
        moved = pread(fd, pages + PAGE, PAGE, PAGE);
    }
    if (moved < 0) {
        return errno;
    }
    return moved == PAGE && memcmp(pages, pages + PAGE, PAGE) == 0 ? 0 : EIO;
}

enum kvist_status kvist_record_probe_direct(int directory_fd, struct kvist_error *err)
{
    if (kvist_fault_point("tier.direct")) {
        return kvist_error_set_errno(err, EINVAL, "open", "direct I/O does not work");
    }
    uint8_t *pages = aligned_alloc(PAGE, (size_t)KVIST_RECORD_PAGES * PAGE);
    if (pages == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "tier", "no memory for a probe");
    }
    int failure = 0;
    int fd =
        openat(directory_fd, PROBE_NAME, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
    if (fd < 0) {
        failure = errno;
    } else {
        failure = probe_pages(fd, pages);
        (void)close(fd);
    }
    (void)unlinkat(directory_fd, PROBE_NAME, 0);
    free(pages);
    return failure == 0 ? KVIST_OK
                        : kvist_error_set_errno(err, failure, "open", "direct I/O does not work");
}
