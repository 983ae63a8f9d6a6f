#include "daemon/notify.h"

#include "proto/base/clock.h"
#include "proto/base/log.h"

#include <systemd/sd-daemon.h>

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATIENCE_US 10000000U /* the manager reads in less, or the log says so */

struct kvist_notice {
    struct kvist_notice *next;
    int fd; /* -1: none */
    bool words;
    char text[];
};

/* --- The socket ------------------------------------------------------------------------------ */

static void open_socket(struct kvist_notify *notify)
{
    if (notify->fd < 0 && notify->address_bytes > 0) {
        notify->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    }
}

void kvist_notify_init(struct kvist_notify *notify)
{
    *notify = (struct kvist_notify){.address = {.sun_family = AF_UNIX}, .fd = -1};
    notify->end = &notify->first;
    const char *path = getenv("NOTIFY_SOCKET"); /* NOLINT(concurrency-mt-unsafe): no threads */
    size_t length = path != NULL ? strlen(path) : 0;
    if (length < 2 || length >= sizeof(notify->address.sun_path) ||
        (path[0] != '/' && path[0] != '@')) {
        return;
    }
    memcpy(notify->address.sun_path, path, length);
    if (path[0] == '@') {
        notify->address.sun_path[0] = '\0'; /* an abstract name ends with the address */
    }
    notify->address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    open_socket(notify);
}

static ssize_t send_with_fd(struct kvist_notify *notify, const char *text, int fd)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    struct iovec words = {.iov_base = (void *)(uintptr_t)text, .iov_len = strlen(text)};
    const struct msghdr message = {.msg_name = &notify->address,
                                   .msg_namelen = notify->address_bytes,
                                   .msg_iov = &words,
                                   .msg_iovlen = 1,
                                   .msg_control = control.bytes,
                                   .msg_controllen = sizeof(control.bytes)};
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
    return sendmsg(notify->fd, &message, MSG_NOSIGNAL);
}

/* @return 0, or an errno */
static int send_now(struct kvist_notify *notify, const char *text, int fd)
{
    open_socket(notify);
    if (notify->fd < 0) {
        return ENOBUFS;
    }
    ssize_t sent = fd >= 0 ? send_with_fd(notify, text, fd)
                           : sendto(notify->fd,
                                    text,
                                    strlen(text),
                                    MSG_NOSIGNAL,
                                    (const struct sockaddr *)&notify->address,
                                    notify->address_bytes);
    return sent >= 0 ? 0 : errno;
}

/* Whether the manager may take later what it does not take now. */
static bool may_pass(int error_number)
{
    return error_number == EAGAIN || error_number == EINTR || error_number == ENOBUFS ||
           error_number == ENOMEM || error_number == ETOOMANYREFS;
}

/* --- What waits ------------------------------------------------------------------------------ */

static void end_notice(struct kvist_notify *notify, struct kvist_notice **link)
{
    struct kvist_notice *notice = *link;
    *link = notice->next;
    if (notify->end == &notice->next) {
        notify->end = link;
    }
    notify->waiting--;
    notify->words_waiting -= notice->words;
    if (notice->fd >= 0) {
        (void)close(notice->fd);
    }
    free(notice);
}

static struct kvist_notice *make_notice(const char *text, int fd, bool words)
{
    size_t bytes = strlen(text) + 1;
    struct kvist_notice *notice = malloc(sizeof(*notice) + bytes);
    if (notice == NULL) {
        return NULL;
    }
    *notice = (struct kvist_notice){.fd = -1, .words = words};
    memcpy(notice->text, text, bytes);
    if (fd >= 0) {
        notice->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        if (notice->fd < 0) {
            free(notice);
            return NULL;
        }
    }
    return notice;
}

static enum kvist_status
wait_in_line(struct kvist_notify *notify, const char *text, int fd, bool words)
{
    bool full = notify->waiting >= KVIST_NOTIFY_WAITING_MAX ||
                (words && notify->words_waiting >= KVIST_NOTIFY_WORDS_MAX);
    struct kvist_notice *notice = full ? NULL : make_notice(text, fd, words);
    if (notice == NULL) {
        return KVIST_NO_SPACE;
    }
    if (notify->waiting == 0) {
        notify->waiting_since_us = kvist_clock_now_us();
    }
    *notify->end = notice;
    notify->end = &notice->next;
    notify->waiting++;
    notify->words_waiting += words;
    return KVIST_OK;
}

bool kvist_notify_withdraw(struct kvist_notify *notify, const char *beginning)
{
    struct kvist_notice **link = &notify->first;
    while (*link != NULL && strncmp((*link)->text, beginning, strlen(beginning)) != 0) {
        link = &(*link)->next;
    }
    bool found = *link != NULL;
    if (found) {
        end_notice(notify, link);
    }
    return found;
}

void kvist_notify_turn(struct kvist_notify *notify)
{
    uint64_t now_us = notify->first != NULL ? kvist_clock_now_us() : 0;
    while (notify->first != NULL) {
        int failed = send_now(notify, notify->first->text, notify->first->fd);
        if (failed != 0 && may_pass(failed)) {
            break;
        }
        notify->dropped_total += failed != 0;
        end_notice(notify, &notify->first);
        notify->waiting_since_us = now_us;
    }
    bool late = notify->first != NULL && now_us - notify->waiting_since_us > PATIENCE_US;
    if (late && !notify->complained) {
        kvist_log(KVIST_LOG_WARN,
                  "the service manager does not read what it is told messages=%u action=retried",
                  notify->waiting);
    }
    notify->complained = notify->first != NULL && (late || notify->complained);
}

void kvist_notify_fini(struct kvist_notify *notify)
{
    if (notify->end == NULL) {
        return;
    }
    kvist_notify_turn(notify);
    while (notify->first != NULL) {
        end_notice(notify, &notify->first);
    }
    if (notify->fd >= 0) {
        (void)close(notify->fd);
        notify->fd = -1;
    }
}

/* --- What is said ---------------------------------------------------------------------------- */

static enum kvist_status tell(struct kvist_notify *notify, const char *text, int fd, bool words)
{
    if (!kvist_notify_has_manager(notify)) {
        return KVIST_OK;
    }
    kvist_notify_turn(notify);
    int error_number = notify->first == NULL ? send_now(notify, text, fd) : EAGAIN;
    enum kvist_status status = KVIST_OK;
    if (error_number != 0) {
        status = may_pass(error_number) ? wait_in_line(notify, text, fd, words) : KVIST_NO_SPACE;
    }
    notify->dropped_total += status != KVIST_OK;
    return status;
}

enum kvist_status kvist_notify_send(struct kvist_notify *notify, const char *text, int fd)
{
    return tell(notify, text, fd, false);
}

static void say(struct kvist_notify *notify, const char *text)
{
    (void)tell(notify, text, -1, true);
}

void kvist_notify_ready(struct kvist_notify *notify, const char *status)
{
    char text[KVIST_NOTIFY_TEXT_BYTES];
    (void)snprintf(text, sizeof(text), "READY=1\nSTATUS=%s", status);
    say(notify, text);
}

void kvist_notify_status(struct kvist_notify *notify, const char *status)
{
    char text[KVIST_NOTIFY_TEXT_BYTES];
    (void)snprintf(text, sizeof(text), "STATUS=%s", status);
    (void)kvist_notify_withdraw(notify, "STATUS="); /* only the last one counts */
    say(notify, text);
}

void kvist_notify_reloading(struct kvist_notify *notify)
{
    char text[KVIST_NOTIFY_TEXT_BYTES];
    (void)snprintf(text,
                   sizeof(text),
                   "RELOADING=1\nMONOTONIC_USEC=%llu",
                   (unsigned long long)kvist_clock_now_us());
    say(notify, text);
}

void kvist_notify_stopping(struct kvist_notify *notify, const char *status, uint64_t extend_us)
{
    char text[KVIST_NOTIFY_TEXT_BYTES];
    (void)snprintf(text,
                   sizeof(text),
                   "STOPPING=1\nSTATUS=%s\nEXTEND_TIMEOUT_USEC=%llu",
                   status,
                   (unsigned long long)extend_us);
    say(notify, text);
}

bool kvist_notify_alive(struct kvist_notify *notify)
{
    return !kvist_notify_has_manager(notify) || send_now(notify, "WATCHDOG=1", -1) == 0;
}

uint64_t kvist_notify_interval_us(void)
{
    uint64_t timeout_us = 0;
    return sd_watchdog_enabled(0, &timeout_us) > 0 ? timeout_us / 3 : 0;
}
