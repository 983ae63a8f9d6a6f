/*
 * extent_internal - what the files of the extents share.
 *
 * Role        extent.c: files and records; extent_share.c: whose oldest goes.
 * Threads     any, with the set's lock; functions ending in _locked want it held
 */
#ifndef KVIST_STORAGE_EXTENT_INTERNAL_H
#define KVIST_STORAGE_EXTENT_INTERNAL_H

#include "storage/extent.h"

#include <pthread.h>
#include <stdatomic.h>

enum kvist_extent_state {
    KVIST_EXTENT_OPEN,
    KVIST_EXTENT_SEALED,
    KVIST_EXTENT_DRAINING,
};

struct kvist_extent {
    uint32_t number;
    uint32_t tenant;
    int fd;
    bool direct;
    bool retired;
    bool found; /* at start, not made by this process */
    enum kvist_extent_state state;
    uint32_t loans;
    uint32_t writers; /* loans of reserve */
    uint64_t file_bytes;
    uint64_t append_bytes; /* end of the last record, or of what is known of it */
    uint64_t disk_bytes;
    int64_t blocks;
    int64_t block_bytes;
    _Atomic bool dirty;
    _Atomic uint64_t *hits; /* a bit for each KVIST_EXTENT_HIT_BYTES */
};

struct kvist_extent_tenant {
    char name[KVIST_TENANT_BYTES_MAX + 1];
    struct kvist_extent *open; /* NULL: none */
    uint64_t bytes_max;        /* 0: any */
    uint32_t weight;
    uint64_t bytes; /* scratch of count_locked() */
};

struct kvist_extents {
    int directory_fd;
    bool direct;
    pthread_mutex_t lock; /* all below, and the plain members of every extent */
    uint32_t number_last;
    uint64_t retired_bytes;     /* of removed files that are still open */
    struct kvist_extent *spare; /* out of the list; its file takes its tenant's next extent */
    struct kvist_extent_tenant *tenants;
    uint32_t tenant_count;
    uint32_t extent_count;
    struct kvist_extent *extents[KVIST_EXTENTS_MAX]; /* by number */
};

static inline void kvist_extents_lock(struct kvist_extents *extents)
{
    (void)pthread_mutex_lock(&extents->lock);
}

static inline void kvist_extents_unlock(struct kvist_extents *extents)
{
    (void)pthread_mutex_unlock(&extents->lock);
}

static inline bool kvist_extent_may_go(const struct kvist_extent *extent)
{
    return extent->writers == 0 && extent->state != KVIST_EXTENT_DRAINING;
}

#endif
