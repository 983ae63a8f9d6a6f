/*
 * cleared - clears that the NVMe tier has not heard of, written down for later starts.
 *
 * Role        a tier that was switched off, or is away, when its blocks were cleared is to drop them
 *             when it is back. The store's roster remembers that as long as the arena lives; this
 *             file also when kvistd was stopped meanwhile. Whose pools, not which: rather too many.
 * File        `cleared` where the service manager has kvistd's state ($STATE_DIRECTORY; without it
 *             nothing is written): a tenant a line, an empty line for all. One that cannot be read
 *             says all. It is written as a whole, and goes when a tier has dropped what it names.
 * Threads     loop; a note waits for the disk
 */
#ifndef KVIST_DAEMON_CLEARED_H
#define KVIST_DAEMON_CLEARED_H

#include "storage/store.h"

#include <kvist/error.h>
#include <kvist/limits.h>

#include <limits.h>

#define KVIST_CLEARED_MAX 16U /* tenants; with more, all of them */

struct kvist_cleared {
    char directory[PATH_MAX]; /* "": there is none */
    uint64_t again_us;        /* a note failed: the next is tried then */
    uint32_t count;
    char tenants[KVIST_CLEARED_MAX][KVIST_TENANT_BYTES_MAX + 1];
};

/** Read what earlier starts have noted. */
void kvist_cleared_init(struct kvist_cleared *cleared);

/** Have a store that was just opened know it. */
void kvist_cleared_tell(const struct kvist_cleared *cleared, struct kvist_store *store);

/**
 * Write down that a tenant's pools ("": all) are cleared, durably.
 *
 * @return OK, also where there is no directory; BUSY: it failed within the last 10 s, and is not tried;
 *         else what the disk says. Not OK: it is as before
 */
KVIST_MUST_USE enum kvist_status
kvist_cleared_note(struct kvist_cleared *cleared, const char *tenant, struct kvist_error *err);

/** A tier has dropped all of it. */
void kvist_cleared_forget(struct kvist_cleared *cleared);

#endif
