#include "daemon/metrics.h"

#include "daemon/logging.h"
#include "daemon/machine.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#include <dirent.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#define PROCESS_US   1000000ULL
#define REFUSED_US   60000000ULL /* health tells of a refusal for so long */

struct daemon_figures {
    double up_us;
    bool degraded;
    uint64_t open_files_max;
    uint64_t log_dropped;
    uint32_t connections;
};

const struct kvist_metric_row kvist_metric_rows[KVIST_METRIC_COUNT] = {
#define KVIST_METRIC(name, kind, unit, help, value) {#name, KVIST_METRIC_##kind, unit, help},
#include "daemon/metrics.def"
#undef KVIST_METRIC
};

/* statm: size resident shared, in pages. */
static void read_memory(struct kvist_process_figures *figures)
{
    FILE *file = fopen("/proc/self/statm", "re");
    if (file == NULL) {
        return;
    }
    unsigned long long resident = 0;
    unsigned long long shared = 0;
    if (fscanf(file, "%*u %llu %llu", &resident, &shared) == 2) {
        uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
        figures->resident_bytes = resident * page_bytes;
        figures->private_bytes = (resident - shared) * page_bytes;
    }
    (void)fclose(file);
}

static uint64_t count_files(void)
{
    DIR *directory = opendir("/proc/self/fd");
    if (directory == NULL) {
        return 0;
    }
    uint64_t count = 0;
    while (readdir(directory) != NULL) { /* NOLINT(concurrency-mt-unsafe): our own stream */
        count++;
    }
    (void)closedir(directory);
    return count > 3 ? count - 3 : 0; /* ".", ".." and the directory itself */
}

/* Why health is not ok, or NULL. */
static const char *find_fault(const struct kvist_metrics *metrics,
                              const struct kvist_store_stats *stats)
{
    if (stats->has_tier && stats->tier.degraded[0] != '\0') {
        return stats->tier.degraded;
    }
    if (stats->arena_used_bytes > stats->arena_bytes) {
        return "more memory is in use than memory.arena_bytes allows: engines have not let go of it";
    }
    if (metrics->files_max < KVIST_FILES_WANTED) {
        return "the limit of open files is low: raise LimitNOFILE";
    }
    const struct kvist_counters *counters = metrics->counters;
    if (counters->share_refused_us != 0 &&
        kvist_clock_now_us() - counters->share_refused_us < REFUSED_US) {
        return counters->share_refused;
    }
    return NULL;
}

static void read_process(struct kvist_metrics *metrics, uint64_t now_us)
{
    if (metrics->process_us != 0 && now_us - metrics->process_us < PROCESS_US) {
        return;
    }
    metrics->process_us = now_us;
    read_memory(&metrics->process);
    metrics->process.open_files = count_files();
}

void kvist_metrics_read(struct kvist_metrics *metrics, double values_out[KVIST_METRIC_COUNT])
{
    uint64_t now_us = kvist_clock_now_us();
    struct kvist_store_stats stats;
    kvist_store_stats(metrics->store, &stats);
    read_process(metrics, now_us);
    const struct daemon_figures figures = {
        .up_us = (double)(now_us - metrics->started_us),
        .degraded = find_fault(metrics, &stats) != NULL,
        .open_files_max = metrics->files_max,
        .log_dropped = kvist_logging_dropped_total(),
        .connections = *metrics->connection_count,
    };
    const struct kvist_store_stats *s = &stats;
    const struct kvist_counters *c = metrics->counters;
    const struct kvist_process_figures *p = &metrics->process;
    const struct daemon_figures *d = &figures;
#define KVIST_METRIC(name, kind, unit, help, value)                                                \
    values_out[KVIST_METRIC_##name] = (double)(value);
#include "daemon/metrics.def"
#undef KVIST_METRIC
}

void kvist_metrics_health(const struct kvist_metrics *metrics, char text_out[KVIST_HEALTH_BYTES])
{
    struct kvist_store_stats stats;
    kvist_store_stats(metrics->store, &stats);
    const char *fault = find_fault(metrics, &stats);
    (void)snprintf(text_out,
                   KVIST_HEALTH_BYTES,
                   "%s%s",
                   fault != NULL ? "degraded: " : "ok",
                   fault != NULL ? fault : "");
}

static void print_head(const struct kvist_metric_row *row, FILE *file)
{
    (void)fprintf(file,
                  "# HELP kvist_%s %s\n# TYPE kvist_%s %s\n",
                  row->name,
                  row->help,
                  row->name,
                  row->kind == KVIST_METRIC_COUNTER ? "counter" : "gauge");
}

/* Rows that have a label. */
static void print_tenants(struct kvist_store *store, FILE *file)
{
    static const struct {
        struct kvist_metric_row row;
        size_t offset; /* in struct kvist_store_tenant_info */
    } rows[] = {
#define KVIST_TENANT_METRIC(name, kind, unit, help, field)                                         \
    {{#name, KVIST_METRIC_##kind, unit, help}, offsetof(struct kvist_store_tenant_info, field)},
#include "daemon/tenants.def"
#undef KVIST_TENANT_METRIC
    };
    for (size_t row = 0; row < KVIST_ARRAY_COUNT(rows); row++) {
        const struct kvist_metric_row *about = &rows[row].row;
        struct kvist_store_tenant_info info;
        print_head(about, file);
        for (uint32_t index = 0; kvist_store_tenant_info(store, index, &info); index++) {
            uint64_t value = 0;
            memcpy(&value, (const char *)&info + rows[row].offset, sizeof(value));
            (void)fprintf(file,
                          "kvist_%s{tenant=\"%s\"} %llu\n",
                          about->name,
                          info.limits.name,
                          (unsigned long long)value);
        }
    }
}

void kvist_metrics_print(struct kvist_metrics *metrics, const char *version, FILE *file)
{
    double values[KVIST_METRIC_COUNT];
    kvist_metrics_read(metrics, values);
    (void)fprintf(file,
                  "# HELP kvist_build_info Version of kvistd.\n# TYPE kvist_build_info gauge\n"
                  "kvist_build_info{version=\"%s\"} 1\n",
                  version);
    for (size_t index = 0; index < KVIST_METRIC_COUNT; index++) {
        const struct kvist_metric_row *row = &kvist_metric_rows[index];
        print_head(row, file);
        (void)fprintf(file,
                      "kvist_%s %.*f\n",
                      row->name,
                      values[index] == (double)(uint64_t)values[index] ? 0 : 6,
                      values[index]);
    }
    print_tenants(metrics->store, file);
}
