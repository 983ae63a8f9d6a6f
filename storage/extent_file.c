#include "storage/extent_file.h"

#include "proto/base/fault.h"
#include "proto/key/checksum.h"
#include "storage/extent.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define PAGE           KVIST_RECORD_PAGE_BYTES
#define EXTENT_MAGIC   0x315458455453564bULL
#define EXTENT_VERSION 1U
#define NAME_BYTES     16
#define NAME_DIGITS    8

struct extent_header {
    uint64_t magic;
    uint32_t version;
    uint32_t number;
    uint64_t file_bytes;
    uint64_t expires_us;           /* 0: never; for later */
    uint8_t encryption_key_id[32]; /* zeros: none; for later */
    char tenant[KVIST_TENANT_BYTES_MAX + 1];
    uint8_t zero[PAGE - 136];
    uint64_t header_checksum; /* XXH3-64 of all before */
};

_Static_assert(sizeof(struct extent_header) == PAGE, "one page");

static void name_format(uint32_t number, char name_out[NAME_BYTES])
{
    (void)snprintf(name_out, NAME_BYTES, "%08u", number);
}

uint32_t kvist_extent_file_number(const char *name)
{
    uint32_t number = 0;
    size_t length = strlen(name);
    if (length != NAME_DIGITS) {
        return 0;
    }
    for (size_t index = 0; index < length; index++) {
        if (name[index] < '0' || name[index] > '9') {
            return 0;
        }
        number = number * 10 + (uint32_t)(name[index] - '0');
    }
    return number;
}

static uint64_t header_checksum(const struct extent_header *header)
{
    return kvist_checksum(header, offsetof(struct extent_header, header_checksum), 0);
}

uint64_t kvist_extent_file_disk_bytes(int fd, uint64_t at_least)
{
    struct stat state;
    uint64_t bytes = fstat(fd, &state) == 0 ? (uint64_t)state.st_blocks * 512 : 0;
    return bytes > at_least ? bytes : at_least;
}

void kvist_extent_file_remove(int directory_fd, uint32_t number)
{
    char name[NAME_BYTES];
    name_format(number, name);
    (void)unlinkat(directory_fd, name, 0);
}

static int allocate(int directory_fd, int fd, uint64_t file_bytes)
{
    struct statvfs room;
    uint64_t has_bytes = kvist_extent_file_disk_bytes(fd, 0);
    uint64_t more_bytes = file_bytes > has_bytes ? file_bytes - has_bytes : 0;
    if (fstatvfs(directory_fd, &room) == 0 &&
        (uint64_t)room.f_bavail * room.f_frsize < more_bytes + KVIST_EXTENT_SPARE_BYTES) {
        return ENOSPC;
    }
    if (fallocate(fd, 0, 0, (off_t)file_bytes) == 0) {
        return 0;
    }
    if (errno != EOPNOTSUPP && errno != ENOSYS) {
        return errno;
    }
    return ftruncate(fd, (off_t)file_bytes) == 0 ? 0 : errno;
}

static int header_write(int fd, uint32_t number, const char *tenant, uint64_t file_bytes)
{
    struct extent_header *page = aligned_alloc(PAGE, PAGE);
    if (page == NULL) {
        return ENOMEM;
    }
    memset(page, 0, PAGE);
    page->magic = EXTENT_MAGIC;
    page->version = EXTENT_VERSION;
    page->number = number;
    page->file_bytes = file_bytes;
    (void)snprintf(page->tenant, sizeof(page->tenant), "%s", tenant);
    page->header_checksum = header_checksum(page);
    ssize_t written = pwrite(fd, page, PAGE, 0);
    int failure = 0;
    if (written != PAGE) {
        failure = written < 0 ? errno : EIO;
    }
    free(page);
    return failure;
}

int kvist_extent_file_make(int directory_fd,
                           bool direct,
                           uint32_t number,
                           const char *tenant,
                           uint64_t file_bytes,
                           int *fd_out)
{
    char name[NAME_BYTES];
    if (kvist_fault_point("tier.extent.make")) {
        return ENOSPC;
    }
    name_format(number, name);
    int flags = O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | (direct ? O_DIRECT : 0);
    int fd = openat(directory_fd, name, flags, 0600);
    if (fd < 0) {
        return errno;
    }
    int failure = allocate(directory_fd, fd, file_bytes);
    if (failure == 0) {
        failure = header_write(fd, number, tenant, file_bytes);
    }
    if (failure != 0) {
        (void)unlinkat(directory_fd, name, 0);
        (void)close(fd);
        return failure;
    }
    *fd_out = fd;
    return 0;
}

int kvist_extent_file_reuse(int directory_fd,
                            int fd,
                            uint32_t number_before,
                            uint32_t number,
                            const char *tenant,
                            uint64_t file_bytes)
{
    char before[NAME_BYTES];
    char name[NAME_BYTES];
    name_format(number_before, before);
    name_format(number, name);
    int failure = allocate(directory_fd, fd, file_bytes);
    if (failure == 0) {
        failure = header_write(fd, number, tenant, file_bytes);
    }
    if (failure == 0 && kvist_fault_point("tier.extent.reuse")) {
        failure = EIO;
    }
    if (failure == 0 && renameat(directory_fd, before, directory_fd, name) != 0) {
        failure = errno;
    }
    if (failure != 0) {
        kvist_extent_file_remove(directory_fd, number_before);
    }
    return failure;
}

/* 0, EBADMSG or errno. */
static int header_read(int fd,
                       uint32_t number,
                       char tenant_out[KVIST_TENANT_BYTES_MAX + 1],
                       uint64_t *file_bytes_out)
{
    struct stat state;
    if (fstat(fd, &state) != 0) {
        return errno;
    }
    struct extent_header *page = aligned_alloc(PAGE, PAGE);
    if (page == NULL) {
        return ENOMEM;
    }
    int failure = EBADMSG;
    ssize_t got = pread(fd, page, PAGE, 0);
    if (got < 0) {
        failure = errno;
    } else if (got == PAGE && page->magic == EXTENT_MAGIC && page->version == EXTENT_VERSION &&
               page->number == number && page->header_checksum == header_checksum(page) &&
               memchr(page->tenant, '\0', sizeof(page->tenant)) != NULL) {
        memcpy(tenant_out, page->tenant, sizeof(page->tenant));
        *file_bytes_out = (uint64_t)state.st_size / PAGE * PAGE;
        failure = 0;
    }
    free(page);
    return failure;
}

int kvist_extent_file_open(int directory_fd,
                           bool direct,
                           uint32_t number,
                           char tenant_out[KVIST_TENANT_BYTES_MAX + 1],
                           uint64_t *file_bytes_out,
                           int *fd_out)
{
    char name[NAME_BYTES];
    name_format(number, name);
    int fd = openat(directory_fd, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | (direct ? O_DIRECT : 0));
    if (fd < 0) {
        return errno;
    }
    int failure = header_read(fd, number, tenant_out, file_bytes_out);
    if (failure != 0) {
        (void)close(fd);
        return failure;
    }
    *fd_out = fd;
    return 0;
}
