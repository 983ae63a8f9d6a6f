#include "daemon/cleared.h"

#include "proto/base/clock.h"
#include "proto/base/fault.h"
#include "proto/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NAME     KVIST_TIER_CLEARED_NAME
#define NEW_NAME KVIST_TIER_CLEARED_NAME ".new"
#define AGAIN_US 10000000U /* no peer has a bad disk asked more often */
#define FILE_MAX (KVIST_CLEARED_MAX * (KVIST_TENANT_BYTES_MAX + 1) + 1)

static void set_all(struct kvist_cleared *cleared)
{
    cleared->tenants[0][0] = '\0';
    cleared->count = 1;
}

/* @return false: it is no such file */
static bool parse(struct kvist_cleared *cleared, char *text, size_t bytes)
{
    if (bytes == 0 || bytes >= FILE_MAX || text[bytes - 1] != '\n' ||
        memchr(text, '\0', bytes) != NULL) {
        return false;
    }
    text[bytes - 1] = '\0';
    for (char *line = text; line != NULL; cleared->count++) {
        char *end = strchr(line, '\n');
        size_t length = end != NULL ? (size_t)(end - line) : strlen(line);
        if (cleared->count == KVIST_CLEARED_MAX || length > KVIST_TENANT_BYTES_MAX) {
            return false;
        }
        memcpy(cleared->tenants[cleared->count], line, length);
        cleared->tenants[cleared->count][length] = '\0';
        line = end != NULL ? end + 1 : NULL;
    }
    return true;
}

void kvist_cleared_init(struct kvist_cleared *cleared)
{
    char path[PATH_MAX + sizeof(NAME) + 1];
    char text[FILE_MAX];
    *cleared = (struct kvist_cleared){.count = 0};
    const char *directories = getenv("STATE_DIRECTORY"); /* NOLINT(concurrency-mt-unsafe) */
    size_t length = directories != NULL ? strcspn(directories, ":") : 0;
    if (length == 0 || length >= sizeof(cleared->directory)) {
        return;
    }
    memcpy(cleared->directory, directories, length);
    (void)snprintf(path, sizeof(path), "%s/" NAME, cleared->directory);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 && errno == ENOENT) {
        return;
    }
    ssize_t bytes = fd >= 0 ? read(fd, text, sizeof(text)) : -1;
    if (bytes < 0 || !parse(cleared, text, (size_t)bytes)) {
        set_all(cleared);
        kvist_log(KVIST_LOG_WARN, "cannot read %s, so all is cleared on nvme", path);
    }
    if (fd >= 0) {
        (void)close(fd);
    }
}

void kvist_cleared_tell(const struct kvist_cleared *cleared, struct kvist_store *store)
{
    for (uint32_t index = 0; index < cleared->count; index++) {
        kvist_store_clear_rest(store, cleared->tenants[index]);
    }
}

static bool has(const struct kvist_cleared *cleared, const char *tenant)
{
    for (uint32_t index = 0; index < cleared->count; index++) {
        if (cleared->tenants[index][0] == '\0' || strcmp(cleared->tenants[index], tenant) == 0) {
            return true;
        }
    }
    return false;
}

static bool write_new(int directory_fd, const struct kvist_cleared *cleared)
{
    char text[FILE_MAX];
    size_t bytes = 0;
    for (uint32_t index = 0; index < cleared->count; index++) {
        bytes +=
            (size_t)snprintf(text + bytes, sizeof(text) - bytes, "%s\n", cleared->tenants[index]);
    }
    int fd =
        openat(directory_fd, NEW_NAME, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) {
        return false;
    }
    errno = EIO; /* unless something says why */
    ssize_t written = kvist_fault_point("cleared.write") ? -1 : write(fd, text, bytes);
    bool good = written == (ssize_t)bytes && fsync(fd) == 0;
    int code = errno;
    (void)close(fd);
    errno = code;
    return good && renameat(directory_fd, NEW_NAME, directory_fd, NAME) == 0 &&
           fsync(directory_fd) == 0;
}

enum kvist_status
kvist_cleared_note(struct kvist_cleared *cleared, const char *tenant, struct kvist_error *err)
{
    if (cleared->directory[0] == '\0' || has(cleared, tenant)) {
        return KVIST_OK;
    }
    uint64_t now_us = kvist_clock_now_us();
    if (now_us < cleared->again_us) {
        return kvist_error_set(err, KVIST_BUSY, 0, "cleared", "the last note of a clear failed");
    }
    struct kvist_cleared more = *cleared;
    if (tenant[0] == '\0' || strchr(tenant, '\n') != NULL || more.count == KVIST_CLEARED_MAX) {
        set_all(&more);
    } else {
        (void)snprintf(more.tenants[more.count++], sizeof(more.tenants[0]), "%s", tenant);
    }
    int directory_fd = open(cleared->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool good = directory_fd >= 0 && write_new(directory_fd, &more);
    int code = errno;
    if (directory_fd >= 0) {
        (void)close(directory_fd);
    }
    if (!good) {
        cleared->again_us = now_us + AGAIN_US;
        return kvist_error_set_errno(
            err, code, "cleared", "cannot note a clear in %.100s", cleared->directory);
    }
    *cleared = more;
    return KVIST_OK;
}

void kvist_cleared_forget(struct kvist_cleared *cleared)
{
    char path[PATH_MAX + sizeof(NAME) + 1];
    (void)snprintf(path, sizeof(path), "%s/" NAME, cleared->directory);
    if (cleared->count > 0 && (unlink(path) == 0 || errno == ENOENT)) {
        /* Should it be there again after a crash, more is dropped than need be. */
        cleared->count = 0;
    }
}
