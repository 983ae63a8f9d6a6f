#include "proto/shm/memfd.h"

#include "proto/base/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif

#define MEMFD_SEALS      (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define MEMFD_MODE       0400U
#define POPULATE_STEP    (4ULL << 20)
#define HUGE_PAGE_BYTES  (2ULL << 20)

void kvist_memfd_name(char kind,
                      uint32_t serial,
                      uint64_t arena,
                      char name_out[KVIST_MEMFD_NAME_BYTES + 1])
{
    (void)snprintf(name_out,
                   KVIST_MEMFD_NAME_BYTES + 1,
                   "%c%08x-%016llx",
                   kind,
                   serial,
                   (unsigned long long)arena);
}

bool kvist_memfd_is_named(int fd, const char *name)
{
    char path[32];
    char target[KVIST_MEMFD_NAME_BYTES + 32] = "";
    char expected[KVIST_MEMFD_NAME_BYTES + 32];
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    (void)snprintf(expected, sizeof(expected), "/memfd:%s (deleted)", name);
    return fd >= 0 && readlink(path, target, sizeof(target) - 1) > 0 &&
           strcmp(target, expected) == 0;
}

static enum kvist_status size_failed(int error_number, struct kvist_error *err)
{
    return kvist_error_set_errno(err,
                                 error_number,
                                 "memfd",
                                 error_number == EFBIG
                                     ? "shared memory is over the limit of file sizes, raise "
                                       "LimitFSIZE= or ulimit -f"
                                     : "cannot size or seal shared memory");
}

enum kvist_status
kvist_memfd_create_open(const char *name, uint64_t bytes, int *fd_out, struct kvist_error *err)
{
    if (strlen(name) > KVIST_MEMFD_NAME_BYTES || bytes == 0 || bytes > INT64_MAX) {
        return kvist_error_set(err, KVIST_INVALID, 0, "memfd", "bad memfd name or size");
    }
    int fd = -1;
    if (kvist_fault_point("memfd.create")) {
        errno = EMFILE;
    } else {
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    }
    if (fd < 0) {
        return kvist_error_set_errno(err, errno, "memfd_create", "cannot create shared memory");
    }
    if (ftruncate(fd, (off_t)bytes) != 0 || fchmod(fd, MEMFD_MODE) != 0) {
        int error_number = errno;
        (void)close(fd);
        return size_failed(error_number, err);
    }
    *fd_out = fd;
    return KVIST_OK;
}

enum kvist_status kvist_memfd_seal(int fd, uint64_t bytes, struct kvist_error *err)
{
    if (kvist_fault_point("memfd.seal")) {
        errno = ENOMEM;
    } else if (ftruncate(fd, (off_t)bytes) == 0 && fcntl(fd, F_ADD_SEALS, MEMFD_SEALS) == 0) {
        return KVIST_OK;
    }
    return size_failed(errno, err);
}

enum kvist_status
kvist_memfd_create(const char *name, uint64_t bytes, int *fd_out, struct kvist_error *err)
{
    int fd = -1;
    enum kvist_status status = kvist_memfd_create_open(name, bytes, &fd, err);
    if (status != KVIST_OK) {
        return status;
    }
    status = kvist_memfd_seal(fd, bytes, err);
    if (status != KVIST_OK) {
        (void)close(fd);
        return status;
    }
    *fd_out = fd;
    return KVIST_OK;
}

enum kvist_status kvist_memfd_reopen_read_only(int fd, int *fd_out, struct kvist_error *err)
{
    char path[32];
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int read_only =
        kvist_fault_point("memfd.reopen") ? (errno = EMFILE, -1) : open(path, O_RDONLY | O_CLOEXEC);
    if (read_only < 0) {
        return kvist_error_set_errno(err, errno, "open", "cannot reopen shared memory read-only");
    }
    *fd_out = read_only;
    return KVIST_OK;
}

enum kvist_status kvist_memfd_check(int fd, uint64_t *bytes_out, struct kvist_error *err)
{
    struct stat info;
    if (fstat(fd, &info) != 0) {
        return kvist_error_set_errno(err, errno, "fstat", "cannot inspect shared memory");
    }
    int seals = fcntl(fd, F_GET_SEALS);
    if (!S_ISREG(info.st_mode) || seals < 0 || (seals & F_SEAL_SHRINK) == 0 || info.st_size <= 0) {
        return kvist_error_set(
            err, KVIST_CORRUPT, 0, "peer", "a peer sent an fd that is no sealed shared memory");
    }
    *bytes_out = (uint64_t)info.st_size;
    return KVIST_OK;
}

enum kvist_status kvist_memfd_map(
    int fd, uint64_t bytes, enum kvist_memfd_access access, void **map_out, struct kvist_error *err)
{
    int protection = access == KVIST_MEMFD_WRITE ? PROT_READ | PROT_WRITE : PROT_READ;
    void *map = kvist_fault_point("memfd.map") ? (errno = ENOMEM, MAP_FAILED)
                                               : mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        return kvist_error_set_errno(err,
                                     errno,
                                     "mmap",
                                     "cannot map %llu bytes of shared memory",
                                     (unsigned long long)bytes);
    }
    /* Both are wishes: an old kernel or a system without huge pages may refuse them. */
    (void)madvise(map, bytes, MADV_DONTDUMP);
    if (bytes >= HUGE_PAGE_BYTES) {
        (void)madvise(map, bytes, MADV_HUGEPAGE);
    }
    *map_out = map;
    return KVIST_OK;
}

enum kvist_status kvist_memfd_check_own(int fd, uint64_t bytes, struct kvist_error *err)
{
    struct stat info = {.st_mode = 0};
    uint64_t found = 0;
    enum kvist_status status = kvist_memfd_check(fd, &found, err);
    if (status == KVIST_OK &&
        (found != bytes || (fcntl(fd, F_GET_SEALS) & MEMFD_SEALS) != MEMFD_SEALS ||
         fstat(fd, &info) != 0 || (info.st_mode & ALLPERMS) != MEMFD_MODE)) {
        status = kvist_error_set(err,
                                 KVIST_CORRUPT,
                                 0,
                                 "memfd",
                                 "shared memory of %llu bytes, not %llu, or not sealed, or not of "
                                 "mode %04o",
                                 (unsigned long long)found,
                                 (unsigned long long)bytes,
                                 MEMFD_MODE);
    }
    return status;
}

enum kvist_status
kvist_memfd_make_private(int fd, void *map, uint64_t bytes, struct kvist_error *err)
{
    void *again =
        mmap(map, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, 0);
    return again == map ? KVIST_OK
                        : kvist_error_set_errno(err, errno, "mmap", "cannot copy shared memory");
}

void kvist_memfd_unmap(void **map, uint64_t bytes)
{
    if (*map != NULL) {
        (void)munmap(*map, bytes);
        *map = NULL;
    }
}

enum kvist_status
kvist_memfd_populate(void *map, uint64_t bytes, const _Atomic bool *stop, struct kvist_error *err)
{
    for (uint64_t done = 0; done < bytes;) {
        if (stop != NULL && *stop) {
            return kvist_error_set(err, KVIST_CLOSED, 0, "memfd", "stopped while populating");
        }
        uint64_t step = bytes - done < POPULATE_STEP ? bytes - done : POPULATE_STEP;
        int failed = kvist_fault_point("memfd.populate")
                         ? (errno = ENOMEM, -1)
                         : madvise((char *)map + done, step, MADV_POPULATE_WRITE);
        if (failed != 0 && errno != EINTR && errno != EAGAIN) {
            return kvist_error_set_errno(
                err, errno, "madvise", "cannot allocate pages for the arena");
        }
        if (failed == 0) {
            done += step;
        }
    }
    return KVIST_OK;
}

void kvist_memfd_populate_page_table(void *map, uint64_t bytes)
{
    (void)madvise(map, bytes, MADV_POPULATE_READ);
}
