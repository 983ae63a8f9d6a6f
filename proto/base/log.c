#include "proto/base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>

#define LOG_LINE_BYTES 1024

static struct {
    kvist_log_sink_fn *sink;
    void *ctx;
    _Atomic int level;
} log_state;

void kvist_log_set_sink(kvist_log_sink_fn *sink, void *ctx, enum kvist_log_level level)
{
    log_state.sink = sink;
    log_state.ctx = ctx;
    kvist_log_set_level(level);
}

void kvist_log_set_level(enum kvist_log_level level)
{
    atomic_store_explicit(&log_state.level, (int)level, memory_order_relaxed);
}

bool kvist_log_wants(enum kvist_log_level level)
{
    return log_state.sink != NULL &&
           (int)level <= atomic_load_explicit(&log_state.level, memory_order_relaxed);
}

void kvist_log(enum kvist_log_level level, const char *format, ...)
{
    if (!kvist_log_wants(level)) {
        return;
    }
    char line[LOG_LINE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    if (length < 0) {
        return;
    }
    for (char *at = line; *at != '\0'; at++) {
        if ((unsigned char)*at < 0x20) {
            *at = ' ';
        }
    }
    log_state.sink(level, line, log_state.ctx);
}
