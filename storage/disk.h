/*
 * disk - whether a directory can be written to.
 *
 * Role        keeps RocksDB away from a disk that is full or broken: Debian's build has assertions,
 *             and its logger fails one on the second write after a failed one, which ends the
 *             process.
 * Threads     any; the calls block
 * Errors      NO_SPACE, DENIED, NOT_FOUND, SYSTEM: the system's, with a sentence
 */
#ifndef KVIST_STORAGE_DISK_H
#define KVIST_STORAGE_DISK_H

#include <kvist/error.h>

#include <stdint.h>

/** Whether the directory is there and its disk has free_bytes left. About a microsecond. */
KVIST_MUST_USE enum kvist_status
kvist_disk_check(const char *directory, uint64_t free_bytes, struct kvist_error *err);

/** The same, and a write that reaches the disk. */
KVIST_MUST_USE enum kvist_status
kvist_disk_probe(const char *directory, uint64_t free_bytes, struct kvist_error *err);

#endif
