/*
 * extent - the append-only files that blocks lie in, and their records.
 *
 * Role        makes, fills, reads and removes extent files, and accounts for their bytes on disk.
 *             Knows nothing of the index: it is told how many live blocks an extent holds.
 * Shapes      extent: a 4096-byte header, then records (record.h). Integers little-endian.
 * Units       bytes on disk are st_blocks, and never less than what is promised to an open extent
 * Ownership   the set owns files and descriptors; a struct kvist_extent is lent from reserve or
 *             acquire until kvist_extents_release()
 * Threads     any, except as marked; one lock inside, not held across system calls on data
 * Limits      KVIST_EXTENTS_MAX files, one descriptor each
 * States      OPEN [make] -> SEALED [make of the next, drain] -> DRAINING [drain] -> gone [retire];
 *             DRAINING -> SEALED [undrain]; DRAINING -> spare [retire] -> OPEN of another number
 *             [make] or gone [drop_spare, close]
 * Spare       the file of one extent that went is kept for the next of its tenant: on every file
 *             system to overwrite is faster than to write what was only allocated. Never for
 *             another tenant: a read that does not check out leaves old bytes in its target.
 * Errors      NO_SPACE: no room in the tenant's extent (reserve), or the disk is full (make);
 *             CORRUPT: a record is not what was asked for; SYSTEM, DENIED: see err
 * Source      open(2) O_DIRECT, fallocate(2), statx(2) STATX_DIOALIGN
 */
#ifndef KVIST_STORAGE_EXTENT_H
#define KVIST_STORAGE_EXTENT_H

#include "storage/record.h"

#define KVIST_EXTENT_HIT_BYTES   8192U /* the smallest record, so each has its own hit bit */
#define KVIST_EXTENTS_MAX        2048U
#define KVIST_EXTENT_NUMBER_MAX  99999999U
#define KVIST_EXTENT_SPARE_BYTES (32U << 20) /* left on a nearly full disk, for the index */
#define KVIST_EXTENT_TENANT_NONE UINT32_MAX

struct kvist_extents;
struct kvist_extent;

/* Gauges of the whole set. */
struct kvist_extents_totals {
    uint64_t blocks;         /* live, as accounted */
    uint64_t block_bytes;    /* theirs */
    uint64_t disk_bytes;     /* until the last descriptor is closed */
    uint64_t retired_bytes;  /* of these, what comes back when loans end */
    uint64_t spare_bytes;    /* of these, the spare's when nothing of it is lent */
    uint32_t spare_tenant;   /* whose it is, when there is one */
    uint64_t unfilled_bytes; /* promised to open extents and not yet reserved */
    uint64_t extents;
};

/**
 * Find the extents in a directory; files with a broken header are removed.
 * All that is found is sealed: new records go to new extents.
 *
 * @param directory     PATH/extents, exists
 * @param direct        use direct I/O (kvist_record_probe_direct() said that it works)
 * @param number_floor  numbers up to this one may have been used before
 */
KVIST_MUST_USE enum kvist_status kvist_extents_open(const char *directory,
                                                    bool direct,
                                                    uint32_t number_floor,
                                                    struct kvist_extents **extents_out,
                                                    struct kvist_error *err);

/** Close all files. Nothing may be lent. NULL is fine. */
void kvist_extents_close(struct kvist_extents **extents);

/** Index of a tenant, added when new. NO_MEMORY. */
KVIST_MUST_USE enum kvist_status
kvist_extents_tenant(struct kvist_extents *extents, const char *name, uint32_t *tenant_out);

/** Most bytes of a tenant's extents, 0: any; and the weight of its share. */
void kvist_extents_set_tenant(struct kvist_extents *extents,
                              uint32_t tenant,
                              uint64_t bytes_max,
                              uint32_t weight);

/** Bytes on disk of a tenant's extents, and the most that they may be. */
uint64_t
kvist_extents_tenant_bytes(struct kvist_extents *extents, uint32_t tenant, uint64_t *bytes_max_out);

/** A tenant that is over its quota and has something that can go; KVIST_EXTENT_TENANT_NONE. */
uint32_t kvist_extents_over(struct kvist_extents *extents);

/** Bytes of a new extent that is to hold a record: extent_bytes, or more for a large record. */
uint64_t kvist_extent_file_bytes(uint64_t extent_bytes, uint64_t record_bytes);

/** Whether the tenant's open extent has room for a record. */
bool kvist_extents_fits(struct kvist_extents *extents, uint32_t tenant, uint64_t record_bytes);

/** Take room at the end of the tenant's open extent, and lend it. NO_SPACE: make one first. */
KVIST_MUST_USE enum kvist_status kvist_extents_reserve(struct kvist_extents *extents,
                                                       uint32_t tenant,
                                                       uint64_t record_bytes,
                                                       struct kvist_extent **extent_out,
                                                       uint64_t *offset_out);

/** Give room back that holds nothing; it is used again when nothing was reserved after it. */
void kvist_extents_unreserve(struct kvist_extents *extents,
                             struct kvist_extent *extent,
                             uint64_t offset,
                             uint64_t record_bytes);

/** Lend an extent by number. NOT_FOUND. */
KVIST_MUST_USE enum kvist_status kvist_extents_acquire(struct kvist_extents *extents,
                                                       uint32_t number,
                                                       struct kvist_extent **extent_out);

/** End a loan of acquire; sets the pointer to NULL. A retired extent's last one closes its file. */
void kvist_extents_release(struct kvist_extents *extents, struct kvist_extent **extent);

/** End a loan of reserve: the record is written and indexed, or never will be. */
void kvist_extents_release_reserved(struct kvist_extents *extents, struct kvist_extent **extent);

/**
 * Make a new open extent for a tenant, in the spare file when it is the tenant's; seal the one
 * before. Worker; one at a time.
 *
 * @param sealed_out  the one before, to be trimmed; 0: none
 */
KVIST_MUST_USE enum kvist_status kvist_extents_make(struct kvist_extents *extents,
                                                    uint32_t tenant,
                                                    uint64_t file_bytes,
                                                    uint32_t *sealed_out,
                                                    struct kvist_error *err);

/**
 * Choose the extent that is to go: an empty one, else the oldest of the tenant with most bytes by
 * weight; or of the one that asks, when its quota leaves no room for what it asks.
 *
 * @param tenant        who asks for file_bytes, which count as its own already; or
 *                      KVIST_EXTENT_TENANT_NONE
 * @param empty_only    only an extent without live blocks
 * @return OK; NOT_FOUND: nothing can go
 */
KVIST_MUST_USE enum kvist_status kvist_extents_victim(struct kvist_extents *extents,
                                                      uint32_t tenant,
                                                      uint64_t file_bytes,
                                                      bool empty_only,
                                                      uint32_t *number_out);

/** Begin to empty an extent: no new records. BUSY: records are being written to it. */
KVIST_MUST_USE enum kvist_status kvist_extents_drain(struct kvist_extents *extents,
                                                     uint32_t number);

/** An extent that could not be emptied stays, sealed. */
void kvist_extents_undrain(struct kvist_extents *extents, uint32_t number);

/**
 * Give an extent up: its file is removed, and its bytes come back when the last loan ends; or it
 * becomes the spare, once that has ended.
 *
 * @param keep  it may be the spare, if there is none: the index is durable without its records
 */
void kvist_extents_retire(struct kvist_extents *extents, uint32_t number, bool keep);

/** Remove the spare's file. Worker. */
void kvist_extents_drop_spare(struct kvist_extents *extents);

/** Whether there is a spare, lent or not. */
bool kvist_extents_has_spare(struct kvist_extents *extents);

/** Add to the counts of an extent; a number that is gone is ignored. */
void kvist_extents_account(struct kvist_extents *extents,
                           uint32_t number,
                           int64_t blocks,
                           int64_t block_bytes);

/** Cut what no record uses from the end of an extent that is sealed. Waits for its writes. Worker. */
void kvist_extents_trim(struct kvist_extents *extents, uint32_t number);

/**
 * Whether a record lies wholly inside an extent that was found at start; notes its end for trim.
 */
bool kvist_extents_holds(struct kvist_extents *extents, const struct kvist_tier_record *record);

/** Numbers of all extents up to number_max. @return how many were written, at most capacity */
size_t kvist_extents_list(struct kvist_extents *extents,
                          uint32_t number_max,
                          uint32_t *numbers_out,
                          size_t capacity);

/** Highest number in use or used before. */
uint32_t kvist_extents_number_last(struct kvist_extents *extents);

/** Flush all files to stable storage. Worker. */
KVIST_MUST_USE enum kvist_status kvist_extents_sync(struct kvist_extents *extents,
                                                    struct kvist_error *err);

void kvist_extents_totals(struct kvist_extents *extents, struct kvist_extents_totals *totals_out);

/* On a lent extent. */
uint32_t kvist_extent_number(const struct kvist_extent *extent);
uint32_t kvist_extent_tenant(const struct kvist_extent *extent);
uint64_t kvist_extent_filled_bytes(struct kvist_extents *extents,
                                   const struct kvist_extent *extent);
bool kvist_extent_draining(struct kvist_extents *extents, const struct kvist_extent *extent);

/** Note that the record at this offset was read. */
void kvist_extent_hit(struct kvist_extent *extent, uint64_t offset);
bool kvist_extent_was_hit(const struct kvist_extent *extent, uint64_t offset);

/** kvist_record_write() and _read() on a lent extent. */
KVIST_MUST_USE enum kvist_status kvist_extent_write(struct kvist_extent *extent,
                                                    const struct kvist_tier_record *record,
                                                    const void *source,
                                                    uint8_t *pages,
                                                    struct kvist_error *err);
KVIST_MUST_USE enum kvist_status kvist_extent_read(struct kvist_extent *extent,
                                                   const struct kvist_tier_record *record,
                                                   void *target,
                                                   uint8_t *pages,
                                                   struct kvist_error *err);

#endif
