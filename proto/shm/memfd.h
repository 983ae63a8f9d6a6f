/*
 * memfd - anonymous shared memory that is passed between processes.
 *
 * Role        creates sealed memfds, and maps ones that a peer has sent after checking them.
 * Ownership   the caller owns every fd and mapping that is returned
 * Threads     any
 * Errors      NO_MEMORY, BUSY (fds exhausted), CORRUPT (a peer's fd is not what it should be),
 *             SYSTEM
 * Source      memfd_create(2), fcntl(2) F_ADD_SEALS, madvise(2) MADV_POPULATE_*, MADV_DONTDUMP
 */
#ifndef KVIST_SHM_MEMFD_H
#define KVIST_SHM_MEMFD_H

#include <kvist/error.h>

#include <stdbool.h>
#include <stdint.h>

enum kvist_memfd_access {
    KVIST_MEMFD_READ,
    KVIST_MEMFD_WRITE, /* and read */
};

#define KVIST_MEMFD_NAME_BYTES 31U

/** The name of a piece of an arena: no other memory of this host has it. */
void kvist_memfd_name(char kind,
                      uint32_t serial,
                      uint64_t arena,
                      char name_out[KVIST_MEMFD_NAME_BYTES + 1]);

/** Whether an fd is a memfd that was created with this name. */
bool kvist_memfd_is_named(int fd, const char *name);

/**
 * Create a memfd of a fixed size, sealed against shrinking, growing and further seals,
 * mode 0400, close-on-exec.
 *
 * @param name     at most KVIST_MEMFD_NAME_BYTES; shows in /proc, and stays what it is for ever
 * @param fd_out   owned by the caller
 */
KVIST_MUST_USE enum kvist_status
kvist_memfd_create(const char *name, uint64_t bytes, int *fd_out, struct kvist_error *err);

/** The same, not sealed yet: not for others before kvist_memfd_seal(). */
KVIST_MUST_USE enum kvist_status
kvist_memfd_create_open(const char *name, uint64_t bytes, int *fd_out, struct kvist_error *err);

/** Give it its size for good. Pages that it had within that size stay. */
KVIST_MUST_USE enum kvist_status kvist_memfd_seal(int fd, uint64_t bytes, struct kvist_error *err);

/**
 * Open the same memory read-only, to be sent to a peer that must not write.
 *
 * @param fd       borrowed
 * @param fd_out   owned by the caller; cannot be mapped writable
 */
KVIST_MUST_USE enum kvist_status
kvist_memfd_reopen_read_only(int fd, int *fd_out, struct kvist_error *err);

/**
 * Size of a memfd that a peer has sent, after checking that it is one and that it cannot shrink
 * under a mapping.
 */
KVIST_MUST_USE enum kvist_status
kvist_memfd_check(int fd, uint64_t *bytes_out, struct kvist_error *err);

/**
 * Map a whole memfd, kept out of core dumps. Huge pages are asked for where the system offers them.
 *
 * @param map_out  owned by the caller, give back with kvist_memfd_unmap()
 */
KVIST_MUST_USE enum kvist_status kvist_memfd_map(int fd,
                                                 uint64_t bytes,
                                                 enum kvist_memfd_access access,
                                                 void **map_out,
                                                 struct kvist_error *err);

/**
 * Check that an fd is a memfd of exactly so many bytes with the seals and the mode of
 * kvist_memfd_create(): CORRUPT when not.
 */
KVIST_MUST_USE enum kvist_status
kvist_memfd_check_own(int fd, uint64_t bytes, struct kvist_error *err);

/**
 * Turn a shared writable mapping into a private copy: what is written from here on stays in this
 * process.
 */
KVIST_MUST_USE enum kvist_status
kvist_memfd_make_private(int fd, void *map, uint64_t bytes, struct kvist_error *err);

/** Unmap; NULL is fine. Sets the pointer to NULL. */
void kvist_memfd_unmap(void **map, uint64_t bytes);

/**
 * Allocate the pages of a writable mapping (the daemon, once a segment).
 * In steps of 4 MiB, so that a stop is noticed: `stop` may be NULL.
 */
KVIST_MUST_USE enum kvist_status
kvist_memfd_populate(void *map, uint64_t bytes, const _Atomic bool *stop, struct kvist_error *err);

/**
 * Fill this process's page table for memory that is allocated already; a failure is only slow
 * later, never wrong.
 */
void kvist_memfd_populate_page_table(void *map, uint64_t bytes);

#endif
