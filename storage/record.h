/*
 * record - one block in an extent: a header page, the block, zeros up to 4096.
 *
 * Role        writes and reads records at an offset of a file, by direct or buffered I/O. On disk a
 *             record says itself whose it is, so that neither a stale index nor a torn write can
 *             pass another block for it.
 * Shapes      header: struct kvist_record_header of record.c, 4096 bytes, little-endian
 * Threads     any; the calls block
 * Errors      CORRUPT: not the record that was asked for, or its bytes do not check out;
 *             SYSTEM and kin: the file system's
 * Source      open(2) O_DIRECT, statx(2) STATX_DIOALIGN; xxHash XXH3-64
 */
#ifndef KVIST_STORAGE_RECORD_H
#define KVIST_STORAGE_RECORD_H

#include "storage/tier.h"

#define KVIST_RECORD_PAGE_BYTES 4096U
#define KVIST_RECORD_PAGES      2U /* of scratch memory that a request needs */

/* A block and where it lies. */
struct kvist_tier_record {
    struct kvist_tier_block block;
    uint64_t offset; /* of the record header in block.extent */
};

/** Memory for pieces of blocks, of whole pages, kept out of core dumps; for free(). NULL: none. */
void *kvist_record_memory(size_t bytes);

/** Bytes that a block takes in an extent. */
uint64_t kvist_record_bytes(uint64_t block_bytes);

/** XXH3-64 of a block, seeded with its key and pool. */
uint64_t kvist_record_checksum(const struct kvist_tier_block *block, const void *bytes);

/** Write and read a file in the directory by direct I/O, page-aligned. OK, or err says why not. */
KVIST_MUST_USE enum kvist_status kvist_record_probe_direct(int directory_fd,
                                                           struct kvist_error *err);

/**
 * Write a record: header page and block by one call, straight from source.
 *
 * @param source  block_bytes, 4096-aligned
 * @param pages   KVIST_RECORD_PAGES aligned pages, overwritten
 */
KVIST_MUST_USE enum kvist_status kvist_record_write(int fd,
                                                    bool direct,
                                                    const struct kvist_tier_record *record,
                                                    const void *source,
                                                    uint8_t *pages,
                                                    struct kvist_error *err);

/**
 * Read a record and verify all of it.
 *
 * @param target  record->block.block_bytes, 4096-aligned
 * @param pages   as above
 */
KVIST_MUST_USE enum kvist_status kvist_record_read(int fd,
                                                   bool direct,
                                                   const struct kvist_tier_record *record,
                                                   void *target,
                                                   uint8_t *pages,
                                                   struct kvist_error *err);

#endif
