#include "daemon/logging.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 1152 /* a line of kvist_log(), a prefix, a newline */

static struct {
    bool journal;
    _Atomic uint64_t dropped;
} logging;

/* systemd says which device and inode the journal's stream is; stderr may be redirected since. */
static bool stderr_is_journal(void)
{
    const char *stream =
        getenv("JOURNAL_STREAM"); /* NOLINT(concurrency-mt-unsafe): no threads yet */
    unsigned long long device = 0;
    unsigned long long inode = 0;
    struct stat info;
    return stream != NULL && sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
           fstat(STDERR_FILENO, &info) == 0 && info.st_dev == device && info.st_ino == inode;
}

static size_t write_prefix(enum kvist_log_level level, char *line, size_t bytes)
{
    static const char priorities[] = {'3', '4', '6', '7'};
    static const char *const names[] = {"error", "warn", "info", "debug"};
    if (logging.journal) {
        return (size_t)snprintf(line, bytes, "<%c>", priorities[level]);
    }
    struct timespec now;
    struct tm parts;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    (void)gmtime_r(&now.tv_sec, &parts);
    size_t length = strftime(line, bytes, "%Y-%m-%dT%H:%M:%S", &parts);
    length += (size_t)snprintf(
        line + length, bytes - length, ".%03ldZ %s: ", now.tv_nsec / 1000000, names[level]);
    return length;
}

static void write_line(enum kvist_log_level level, const char *text, void *ctx)
{
    (void)ctx;
    char line[LINE_BYTES];
    size_t length = write_prefix(level, line, sizeof(line));
    size_t room = sizeof(line) - length - 1;
    size_t text_bytes = strnlen(text, room);
    memcpy(line + length, text, text_bytes);
    length += text_bytes;
    line[length++] = '\n';
    /* A pipe that says it is writable takes PIPE_BUF at once, and a line is shorter. */
    struct pollfd ready = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&ready, 1, 0) != 1 || (ready.revents & POLLOUT) == 0 ||
        write(STDERR_FILENO, line, length) != (ssize_t)length) {
        atomic_fetch_add_explicit(&logging.dropped, 1, memory_order_relaxed);
    }
}

void kvist_logging_start(enum kvist_log_level level)
{
    logging.journal = stderr_is_journal();
    kvist_log_set_sink(write_line, NULL, level);
}

uint64_t kvist_logging_dropped_total(void)
{
    return atomic_load_explicit(&logging.dropped, memory_order_relaxed);
}

bool kvist_log_limit_take(struct kvist_log_limit *limit, uint32_t uid, uint64_t now_us)
{
    uint32_t place = (uid * 2654435761U) >> 26;
    _Static_assert(KVIST_LOG_LIMIT_USERS == 1U << (32 - 26), "places");
    if (now_us - limit->users[place].window_us >= KVIST_LOG_LIMIT_US) {
        limit->users[place].lines = 0;
        limit->users[place].window_us = now_us;
    }
    if (limit->users[place].lines >= KVIST_LOG_LIMIT_LINES) {
        limit->users[place].suppressed++;
        limit->users[place].uid = uid;
        return false;
    }
    limit->users[place].lines++;
    return true;
}

void kvist_log_limit_sum_up(struct kvist_log_limit *limit, uint64_t now_us)
{
    for (uint32_t place = 0; place < KVIST_LOG_LIMIT_USERS; place++) {
        if (limit->users[place].suppressed == 0 ||
            now_us - limit->users[place].window_us < KVIST_LOG_LIMIT_US) {
            continue;
        }
        kvist_log(KVIST_LOG_WARN,
                  "%llu more lines about peers were withheld uid=%u",
                  (unsigned long long)limit->users[place].suppressed,
                  limit->users[place].uid);
        limit->users[place].suppressed = 0;
    }
}
