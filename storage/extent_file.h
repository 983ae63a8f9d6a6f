/*
 * extent_file - one extent's file: its name, its header, its bytes on disk.
 *
 * Role        makes, recognises and removes files; knows nothing of records and of other files.
 * Shapes      name: the number, eight digits. Header: 4096 bytes, little-endian: magic, version,
 *             number, bytes, expiry and encryption key (both for later), tenant, checksum
 * Threads     any; the calls block
 * Source      fallocate(2), fstatvfs(3)
 */
#ifndef KVIST_STORAGE_EXTENT_FILE_H
#define KVIST_STORAGE_EXTENT_FILE_H

#include <kvist/limits.h>

#include <stdbool.h>
#include <stdint.h>

/** Number of a file's name; 0: not an extent's. */
uint32_t kvist_extent_file_number(const char *name);

/**
 * Make a file with its header, all of it allocated: no write meets a full disk later.
 *
 * @return 0 or errno; on failure nothing is left
 */
int kvist_extent_file_make(int directory_fd,
                           bool direct,
                           uint32_t number,
                           const char *tenant,
                           uint64_t file_bytes,
                           int *fd_out);

/**
 * Make an extent of an open file of another number whose records nothing names any more. Header
 * first, name then: a crash between leaves a file whose name is not its header's, and any other an
 * extent without records.
 *
 * @param fd  borrowed
 * @return 0 or errno; on failure both names are gone
 */
int kvist_extent_file_reuse(int directory_fd,
                            int fd,
                            uint32_t number_before,
                            uint32_t number,
                            const char *tenant,
                            uint64_t file_bytes);

/**
 * Open a file and check its header.
 *
 * @return 0; EBADMSG: not a whole extent; another errno
 */
int kvist_extent_file_open(int directory_fd,
                           bool direct,
                           uint32_t number,
                           char tenant_out[KVIST_TENANT_BYTES_MAX + 1],
                           uint64_t *file_bytes_out,
                           int *fd_out);

/** Remove the name; the bytes stay until the last descriptor is closed. */
void kvist_extent_file_remove(int directory_fd, uint32_t number);

/** Bytes on disk, and never less than at_least. */
uint64_t kvist_extent_file_disk_bytes(int fd, uint64_t at_least);

#endif
