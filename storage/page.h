/*
 * page - a session page, as the daemon reads it.
 *
 * Role        creates the memfd that a session's processes write, and reads leases, marks, mapped
 *             segments and touches from it.
 * Ownership   the page owns its fd and its read-only mapping
 * Threads     loop
 * Limits      every index is bounded by the geometry that the page was created with; what the
 *             header says later is not read, but for lease_high and touch_head, which are clamped
 * Source      proto/shm/layout.h
 */
#ifndef KVIST_STORAGE_PAGE_H
#define KVIST_STORAGE_PAGE_H

#include "proto/shm/layout.h"

#include <kvist/error.h>

struct kvist_page {
    int fd;
    uint64_t bytes;
    void *map; /* read-only */
    const struct kvist_page_header *header;
    const struct kvist_lease_record *leases;
    const _Atomic uint64_t *marks;
    const _Atomic uint32_t *mapped;
    const _Atomic uint64_t *touches;
    uint32_t rank_count;
    uint64_t touch_tail; /* entries read or given up */
};

/**
 * @param arena     its instance
 * @param page_out  owned by the caller, give back with kvist_page_fini()
 */
KVIST_MUST_USE enum kvist_status kvist_page_init(const uint8_t session_id[16],
                                                 uint32_t rank_count,
                                                 uint64_t arena,
                                                 uint32_t serial,
                                                 struct kvist_page *page_out,
                                                 struct kvist_error *err);

/**
 * Map a page that an earlier daemon has made for a session of so many ranks. Touches in it are
 * given up. Of its header nothing is believed.
 *
 * @param fd  taken over on OK
 * @return OK; CORRUPT: it is not of the size that such a page has
 */
KVIST_MUST_USE enum kvist_status
kvist_page_adopt(int fd, uint32_t rank_count, struct kvist_page *page_out, struct kvist_error *err);

void kvist_page_fini(struct kvist_page *page);

/** Records from here on were never used. At most KVIST_LEASES_MAX. */
static inline uint32_t kvist_page_lease_high(const struct kvist_page *page)
{
    uint32_t high = atomic_load_explicit(&page->header->lease_high, memory_order_relaxed);
    return high < KVIST_LEASES_MAX ? high : KVIST_LEASES_MAX;
}

/** The slot reference in a lease record, 0 when free. index < KVIST_LEASES_MAX. */
static inline uint64_t kvist_page_lease(const struct kvist_page *page, uint32_t index)
{
    return atomic_load_explicit(&page->leases[index].ref, memory_order_acquire);
}

/** Whether every rank has filled its part. ticket < KVIST_GRANTS_MAX. */
bool kvist_page_filled(const struct kvist_page *page, uint32_t ticket, uint64_t reservation);

/** Whether every rank has mapped that segment. pool, segment below their limits. */
bool kvist_page_has_mapped(const struct kvist_page *page,
                           uint32_t pool,
                           uint32_t segment,
                           uint32_t serial);

/**
 * Take touches in the order in which they were written; entries that were overwritten are skipped.
 *
 * @param refs_out  [count_max] whatever the peer wrote: to be checked
 * @return how many; count_max: there may be more
 */
uint32_t kvist_page_take_touches(struct kvist_page *page, uint64_t *refs_out, uint32_t count_max);

#endif
