#include "storage/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define PATH_BYTES  4096
#define PROBE_BYTES 65536

enum kvist_status
kvist_disk_check(const char *directory, uint64_t free_bytes, struct kvist_error *err)
{
    struct statvfs room;
    if (statvfs(directory, &room) != 0) {
        return kvist_error_set_errno(
            err, errno, "statvfs", "cannot look at the tier's directory %.100s", directory);
    }
    if ((uint64_t)room.f_bavail * room.f_frsize < free_bytes) {
        return kvist_error_set_errno(err,
                                     ENOSPC,
                                     "statvfs",
                                     "the disk of %.100s has less than %llu MiB left: free space "
                                     "there, or lower nvme.bytes",
                                     directory,
                                     (unsigned long long)(free_bytes >> 20));
    }
    return KVIST_OK;
}

/* 0 or errno. */
static int probe_write(int fd)
{
    static const uint8_t zeros[PROBE_BYTES];
    ssize_t written = write(fd, zeros, sizeof(zeros));
    if (written != (ssize_t)sizeof(zeros)) {
        return written < 0 ? errno : ENOSPC;
    }
    return fsync(fd) == 0 ? 0 : errno;
}

enum kvist_status
kvist_disk_probe(const char *directory, uint64_t free_bytes, struct kvist_error *err)
{
    char path[PATH_BYTES];
    enum kvist_status status = kvist_disk_check(directory, free_bytes, err);
    if (status != KVIST_OK) {
        return status;
    }
    int length = snprintf(path, sizeof(path), "%s/probe", directory);
    if (length < 0 || (size_t)length >= sizeof(path)) {
        return kvist_error_set(err, KVIST_INVALID, 0, "tier", "the tier's path is too long");
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    int failure = errno;
    if (fd >= 0) {
        failure = probe_write(fd);
        (void)close(fd);
        (void)unlink(path);
    }
    if (failure != 0) {
        return kvist_error_set_errno(
            err, failure, "write", "cannot write to the tier's directory %.100s", directory);
    }
    return KVIST_OK;
}
