#include "storage/page.h"

#include "proto/base/check.h"
#include "proto/shm/memfd.h"

#include <stdio.h>
#include <unistd.h>

static void
write_header(struct kvist_page_header *header, const uint8_t session_id[16], uint32_t rank_count)
{
    header->layout_version = KVIST_LAYOUT_VERSION;
    header->header_bytes = KVIST_HEADER_BYTES;
    memcpy(header->session_id, session_id, sizeof(header->session_id));
    header->lease_max = KVIST_LEASES_MAX;
    header->ticket_max = KVIST_GRANTS_MAX;
    header->rank_count = rank_count;
    header->pool_max = KVIST_SESSION_POOLS_MAX;
    header->segment_max = KVIST_SEGMENTS_MAX;
    header->touch_count = KVIST_TOUCH_RING_COUNT;
    kvist_page_lay_out(header);
    header->magic = KVIST_PAGE_MAGIC;
}

static void set_pointers(struct kvist_page *page, const struct kvist_page_header *geometry)
{
    const char *base = page->map;
    page->header = (const struct kvist_page_header *)page->map;
    page->leases = (const void *)(base + geometry->lease_offset);
    page->marks = (const void *)(base + geometry->mark_offset);
    page->mapped = (const void *)(base + geometry->mapped_offset);
    page->touches = (const void *)(base + geometry->touch_offset);
}

enum kvist_status kvist_page_init(const uint8_t session_id[16],
                                  uint32_t rank_count,
                                  uint64_t arena,
                                  uint32_t serial,
                                  struct kvist_page *page_out,
                                  struct kvist_error *err)
{
    KVIST_CHECK(rank_count >= 1 && rank_count <= KVIST_RANKS_MAX);
    struct kvist_page_header geometry = {.magic = 0};
    write_header(&geometry, session_id, rank_count);
    struct kvist_page page = {
        .fd = -1, .bytes = geometry.page_bytes, .map = NULL, .rank_count = rank_count};
    char name[KVIST_MEMFD_NAME_BYTES + 1];
    kvist_memfd_name('p', serial, arena, name);
    enum kvist_status status = kvist_memfd_create(name, page.bytes, &page.fd, err);
    if (status != KVIST_OK) {
        return status;
    }
    /* Written through a mapping of its own, so that the daemon cannot write it later by mistake. */
    void *writable = NULL;
    status = kvist_memfd_map(page.fd, page.bytes, KVIST_MEMFD_WRITE, &writable, err);
    if (status != KVIST_OK) {
        goto close_fd;
    }
    memcpy(writable, &geometry, sizeof(geometry));
    kvist_memfd_unmap(&writable, page.bytes);
    status = kvist_memfd_map(page.fd, page.bytes, KVIST_MEMFD_READ, &page.map, err);
    if (status != KVIST_OK) {
        goto close_fd;
    }
    set_pointers(&page, &geometry);
    *page_out = page;
    return KVIST_OK;

close_fd:
    (void)close(page.fd);
    return status;
}

enum kvist_status
kvist_page_adopt(int fd, uint32_t rank_count, struct kvist_page *page_out, struct kvist_error *err)
{
    static const uint8_t no_id[16];
    struct kvist_page_header geometry = {.magic = 0};
    write_header(&geometry, no_id, rank_count);
    struct kvist_page page = {
        .fd = fd, .bytes = geometry.page_bytes, .map = NULL, .rank_count = rank_count};
    enum kvist_status status = kvist_memfd_check_own(fd, page.bytes, err);
    if (status == KVIST_OK) {
        status = kvist_memfd_map(fd, page.bytes, KVIST_MEMFD_READ, &page.map, err);
    }
    if (status != KVIST_OK) {
        return status;
    }
    set_pointers(&page, &geometry);
    page.touch_tail = atomic_load_explicit(&page.header->touch_head, memory_order_acquire);
    *page_out = page;
    return KVIST_OK;
}

void kvist_page_fini(struct kvist_page *page)
{
    if (page->map != NULL) {
        kvist_memfd_unmap(&page->map, page->bytes);
        (void)close(page->fd);
        page->fd = -1;
    }
}

bool kvist_page_filled(const struct kvist_page *page, uint32_t ticket, uint64_t reservation)
{
    for (uint32_t rank = 0; rank < page->rank_count; rank++) {
        const _Atomic uint64_t *mark = &page->marks[(size_t)rank * KVIST_GRANTS_MAX + ticket];
        if (atomic_load_explicit(mark, memory_order_acquire) != reservation) {
            return false;
        }
    }
    return true;
}

bool kvist_page_has_mapped(const struct kvist_page *page,
                           uint32_t pool,
                           uint32_t segment,
                           uint32_t serial)
{
    for (uint32_t rank = 0; rank < page->rank_count; rank++) {
        size_t index =
            ((size_t)rank * KVIST_SESSION_POOLS_MAX + pool) * KVIST_SEGMENTS_MAX + segment;
        if (atomic_load_explicit(&page->mapped[index], memory_order_acquire) != serial) {
            return false;
        }
    }
    return true;
}

uint32_t kvist_page_take_touches(struct kvist_page *page, uint64_t *refs_out, uint32_t count_max)
{
    uint64_t head = atomic_load_explicit(&page->header->touch_head, memory_order_acquire);
    /* The difference also covers a head that a peer has set back. */
    if (head - page->touch_tail > KVIST_TOUCH_RING_COUNT) {
        page->touch_tail = head - KVIST_TOUCH_RING_COUNT;
    }
    uint32_t count = 0;
    while (page->touch_tail != head && count < count_max) {
        const _Atomic uint64_t *entry =
            &page->touches[page->touch_tail & (KVIST_TOUCH_RING_COUNT - 1)];
        refs_out[count++] = atomic_load_explicit(entry, memory_order_relaxed);
        page->touch_tail++;
    }
    return count;
}
