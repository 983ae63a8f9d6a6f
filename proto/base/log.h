/*
 * log - logfmt lines to one sink.
 *
 * Role        the daemon logs once, where a failure is decided; libraries fill kvist_error and log
 *             nothing above debug. The client library never sets a sink and so never prints.
 * Format      one lowercase sentence, then key=value pairs with units in the key.
 *             Never keys, tokens or KV bytes.
 * Threads     any; the sink is called under no lock and must be thread-safe
 */
#ifndef KVIST_BASE_LOG_H
#define KVIST_BASE_LOG_H

#include <stdbool.h>

enum kvist_log_level {
    KVIST_LOG_ERROR, /* an operator must act */
    KVIST_LOG_WARN,  /* degraded, going on */
    KVIST_LOG_INFO,  /* life cycle */
    KVIST_LOG_DEBUG  /* per object */
};

typedef void kvist_log_sink_fn(enum kvist_log_level level, const char *line, void *ctx);

/**
 * Set the sink and the most verbose level that reaches it; NULL silences everything.
 * Called before any thread is started, and by tests.
 */
void kvist_log_set_sink(kvist_log_sink_fn *sink, void *ctx, enum kvist_log_level level);

/** Change the level alone (reload). */
void kvist_log_set_level(enum kvist_log_level level);

/** True when a line of this level would reach the sink. */
bool kvist_log_wants(enum kvist_log_level level);

/** Format a line and hand it to the sink; cut at 1,024 bytes. Newlines become spaces. */
void kvist_log(enum kvist_log_level level, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
