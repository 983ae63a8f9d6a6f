#include "daemon/fdstore.h"

#include "proto/base/clock.h"
#include "proto/base/fault.h"
#include "proto/base/log.h"

#include <systemd/sd-daemon.h>

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATIENCE_US 10000000U /* the manager answers a barrier in less, or the log says so */

/* --- Start ----------------------------------------------------------------------------------- */

void kvist_fdstore_init(struct kvist_fdstore *fdstore, struct kvist_notify *notify)
{
    *fdstore = (struct kvist_fdstore){.notify = notify, .barrier_fd = -1};
    const char *max = getenv("FDSTORE"); /* NOLINT(concurrency-mt-unsafe): no threads */
    if (kvist_notify_has_manager(notify) && max != NULL) {
        unsigned long count = strtoul(max, NULL, 10);
        fdstore->max = count < KVIST_FDSTORE_MAX ? (uint32_t)count : KVIST_FDSTORE_MAX;
    }
}

bool kvist_fdstore_offer(struct kvist_fdstore *fdstore, const char *name, int fd)
{
    struct kvist_kept_fd kept = {.fd = fd};
    if (fdstore->max == 0 || strlen(name) >= sizeof(kept.name) ||
        strspn(name + (name[0] != '\0'), "0123456789abcdef") + 1 != strlen(name) ||
        sd_is_socket(fd, AF_UNSPEC, 0, -1) > 0) {
        return false;
    }
    struct kvist_kept_fd *more =
        realloc(fdstore->passed, (fdstore->passed_count + 1) * sizeof(*more));
    if (more == NULL) {
        return false;
    }
    memcpy(kept.name, name, strlen(name) + 1);
    fdstore->passed = more;
    fdstore->passed[fdstore->passed_count++] = kept;
    fdstore->count++;
    return true;
}

static uint64_t memory_of(int fd)
{
    struct stat info;
    return fd >= 0 && fcntl(fd, F_GET_SEALS) >= 0 && fstat(fd, &info) == 0
               ? (uint64_t)info.st_blocks * 512
               : 0;
}

static bool was_passed(const struct kvist_fdstore *fdstore, const char *name)
{
    for (size_t index = 0; index < fdstore->passed_count; index++) {
        if (strcmp(fdstore->passed[index].name, name) == 0) {
            return true;
        }
    }
    return false;
}

static bool remove_from_store(struct kvist_fdstore *fdstore, const char *name)
{
    char text[KVIST_NOTIFY_TEXT_BYTES];
    (void)snprintf(text, sizeof(text), "FDSTOREREMOVE=1\nFDNAME=%s", name);
    return kvist_notify_send(fdstore->notify, text, -1) == KVIST_OK;
}

/* Also where there is no store by our account: the manager has one, or nothing hears this. */
void kvist_fdstore_let_go(struct kvist_fdstore *fdstore, const char *name, int fd)
{
    fdstore->let_go_bytes += memory_of(fd);
    (void)close(fd);
    if (name[0] != '\0' && !was_passed(fdstore, name)) {
        (void)remove_from_store(fdstore, name);
    }
}

int kvist_fdstore_take(struct kvist_fdstore *fdstore, const char *name)
{
    for (size_t index = 0; index < fdstore->passed_count; index++) {
        if (strcmp(fdstore->passed[index].name, name) == 0) {
            int fd = fdstore->passed[index].fd;
            fdstore->passed[index] = fdstore->passed[--fdstore->passed_count];
            return fd;
        }
    }
    return -1;
}

uint64_t kvist_fdstore_passed_bytes(const struct kvist_fdstore *fdstore)
{
    uint64_t bytes = fdstore->let_go_bytes;
    for (size_t index = 0; index < fdstore->passed_count; index++) {
        bytes += memory_of(fdstore->passed[index].fd);
    }
    return bytes;
}

enum kvist_status kvist_fdstore_fit(const struct kvist_fdstore *fdstore,
                                    uint64_t segments,
                                    struct kvist_error *err)
{
    if (fdstore->max == 0 || segments + KVIST_FDSTORE_SPARE <= fdstore->max) {
        return KVIST_OK;
    }
    return kvist_error_set(err,
                           KVIST_INVALID,
                           0,
                           "fdstore",
                           "an arena of this size has up to %llu segments, which with %u fds more "
                           "do not fit the %u that the service manager keeps: raise "
                           "FileDescriptorStoreMax= and FDSTORE= (up to %u), or lower "
                           "memory.arena_bytes",
                           (unsigned long long)segments,
                           KVIST_FDSTORE_SPARE,
                           fdstore->max,
                           KVIST_FDSTORE_MAX);
}

uint32_t kvist_fdstore_segments(const struct kvist_fdstore *fdstore)
{
    return fdstore->max > KVIST_FDSTORE_SPARE ? fdstore->max - KVIST_FDSTORE_SPARE : fdstore->max;
}

void kvist_fdstore_start(struct kvist_fdstore *fdstore,
                         struct event_base *base,
                         void (*kept)(void *ctx, uint64_t safe),
                         void *ctx)
{
    fdstore->base = base;
    fdstore->kept = kept;
    fdstore->ctx = ctx;
}

/* --- Storing --------------------------------------------------------------------------------- */

static const char *put_text(const char *name, char text_out[64])
{
    (void)snprintf(text_out, 64, "FDSTORE=1\nFDNAME=%s\nFDPOLL=0", name);
    return text_out;
}

enum kvist_status kvist_fdstore_put(struct kvist_fdstore *fdstore, const char *name, int fd)
{
    char text[64];
    if (fdstore->count >= fdstore->max) {
        return KVIST_NO_SPACE;
    }
    if (kvist_fault_point("fdstore.keep") ||
        kvist_notify_send(fdstore->notify, put_text(name, text), fd) != KVIST_OK) {
        kvist_log(KVIST_LOG_WARN, "cannot store an fd name=%s action=retried", name);
        return KVIST_NO_SPACE;
    }
    fdstore->count++;
    return KVIST_OK;
}

enum kvist_status kvist_fdstore_keep(struct kvist_fdstore *fdstore, const char *name, int fd)
{
    enum kvist_status status = kvist_fdstore_put(fdstore, name, fd);
    fdstore->keeps += status == KVIST_OK;
    return status;
}

void kvist_fdstore_forget(struct kvist_fdstore *fdstore, const char *name)
{
    char text[64];
    if (fdstore->max > 0 && (kvist_notify_withdraw(fdstore->notify, put_text(name, text)) ||
                             remove_from_store(fdstore, name))) {
        fdstore->count -= fdstore->count > 0;
    }
}

/* --- Barriers -------------------------------------------------------------------------------- */

static void end_barrier(struct kvist_fdstore *fdstore)
{
    if (fdstore->barrier != NULL) {
        event_free(fdstore->barrier);
        fdstore->barrier = NULL;
    }
    if (fdstore->barrier_fd >= 0) {
        (void)close(fdstore->barrier_fd);
        fdstore->barrier_fd = -1;
    }
}

/* The manager has closed its end: all that was sent before is stored. */
static void on_barrier(evutil_socket_t fd, short what, void *ctx)
{
    (void)fd;
    (void)what;
    struct kvist_fdstore *fdstore = ctx;
    end_barrier(fdstore);
    fdstore->safe = fdstore->asked;
    fdstore->complained = false;
    fdstore->kept(fdstore->ctx, fdstore->safe);
    kvist_fdstore_turn(fdstore);
}

static void complain(struct kvist_fdstore *fdstore)
{
    if (!fdstore->complained && kvist_clock_now_us() - fdstore->asked_us > PATIENCE_US) {
        fdstore->complained = true;
        kvist_log(KVIST_LOG_WARN,
                  "the service manager does not confirm stored fds, memory is not lent "
                  "meanwhile fds=%llu",
                  (unsigned long long)(fdstore->keeps - fdstore->safe));
    }
}

void kvist_fdstore_turn(struct kvist_fdstore *fdstore)
{
    int ends[2];
    if (fdstore->barrier_fd >= 0) {
        complain(fdstore);
        return;
    }
    if (fdstore->keeps == fdstore->safe || fdstore->base == NULL ||
        pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
        return; /* no fds for a pipe: the next turn may have */
    }
    fdstore->barrier_fd = ends[0];
    fdstore->asked = fdstore->keeps;
    fdstore->asked_us = kvist_clock_now_us();
    fdstore->barrier = event_new(fdstore->base, ends[0], EV_READ, on_barrier, fdstore);
    if (fdstore->barrier == NULL || event_add(fdstore->barrier, NULL) != 0 ||
        kvist_notify_send(fdstore->notify, "BARRIER=1", ends[1]) != KVIST_OK) {
        end_barrier(fdstore);
    }
    (void)close(ends[1]);
}

void kvist_fdstore_fini(struct kvist_fdstore *fdstore)
{
    end_barrier(fdstore);
    for (size_t index = 0; index < fdstore->passed_count; index++) {
        if (fdstore->passed[index].fd >= 0) {
            (void)close(fdstore->passed[index].fd);
        }
    }
    free(fdstore->passed);
    fdstore->passed = NULL;
    fdstore->passed_count = 0;
}
