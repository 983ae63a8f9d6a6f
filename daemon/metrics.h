/*
 * metrics - figures and health, for people and machines.
 *
 * Role        reads the store's and the daemon's figures into the rows of metrics.def, and writes
 *             them as Prometheus text. Also decides what counts as degraded.
 * Threads     loop
 * Source      Prometheus text exposition format 0.0.4
 */
#ifndef KVIST_DAEMON_METRICS_H
#define KVIST_DAEMON_METRICS_H

#include "daemon/counters.h"
#include "storage/store.h"

#include <stdio.h>

#define KVIST_HEALTH_BYTES (KVIST_ERROR_TEXT_BYTES + 16)

enum kvist_metric_kind { KVIST_METRIC_COUNTER, KVIST_METRIC_GAUGE };

struct kvist_metric_row {
    const char *name;
    enum kvist_metric_kind kind;
    const char *unit;
    const char *help;
};

struct kvist_process_figures {
    uint64_t resident_bytes;
    uint64_t private_bytes;
    uint64_t open_files;
};

/* Where the figures are read from; all borrowed. Figures of the process cost a walk through /proc,
   and are read once a second at most, however often they are asked for. */
struct kvist_metrics {
    struct kvist_store *store;
    const struct kvist_counters *counters;
    const uint32_t *connection_count;
    uint64_t started_us;
    uint64_t files_max;
    struct kvist_process_figures process;
    uint64_t process_us; /* when it was read; 0: not yet */
};

enum {
#define KVIST_METRIC(name, kind, unit, help, value) KVIST_METRIC_##name,
#include "daemon/metrics.def"
#undef KVIST_METRIC
    KVIST_METRIC_COUNT
};

extern const struct kvist_metric_row kvist_metric_rows[KVIST_METRIC_COUNT];

void kvist_metrics_read(struct kvist_metrics *metrics, double values_out[KVIST_METRIC_COUNT]);

/** "ok", or "degraded: " and why. */
void kvist_metrics_health(const struct kvist_metrics *metrics, char text_out[KVIST_HEALTH_BYTES]);

/** All rows as Prometheus text. */
void kvist_metrics_print(struct kvist_metrics *metrics, const char *version, FILE *file);

#endif
