/* kvist bench: put, get, probe and lease, beside the machine's memcpy from the same run. */
#include "client/tool/bench_daemon.h"
#include "client/tool/bench_engine.h"
#include "client/tool/bench_run.h"
#include "client/tool/tool.h"
#include "proto/base/check.h"

#include <kvist/limits.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define SIZES_MAX         16U
#define RUNS_DEFAULT      5U
#define SECONDS_DEFAULT   0.5
#define SECONDS_MAX       600.0
#define ARENA_BYTES_LEAST (64ULL << 20)
#define ARENA_BYTES_MOST  (512ULL << 20)
#define ARENA_BLOCKS_MIN  32U /* with fewer, what was put is evicted before it can be got */

static volatile bool stopped; /* set by the signal handler alone */

static void stop(int number)
{
    (void)number;
    stopped = true;
}

struct plan {
    uint64_t sizes[SIZES_MAX];
    size_t size_count;
    uint64_t arena_bytes; /* 0: choose */
    double seconds;
    uint32_t run_count;
    char daemon_path[4096]; /* "": use the socket */
};

static const struct {
    const char *name; /* in JSON */
    double scale;
} figure_rows[KVIST_BENCH_FIGURES] = {
    [KVIST_BENCH_MEMCPY] = {"memcpy_gb_per_s", 1},
    [KVIST_BENCH_PUT] = {"put_gb_per_s", 1},
    [KVIST_BENCH_PUT_RATIO] = {"put_to_memcpy", 1},
    [KVIST_BENCH_GET] = {"get_gb_per_s", 1},
    [KVIST_BENCH_GET_RATIO] = {"get_to_memcpy", 1},
    [KVIST_BENCH_PROBE_NS] = {"probe_hit_ns", 1},
    [KVIST_BENCH_PROBE_MISS_NS] = {"probe_miss_ns", 1},
    [KVIST_BENCH_LEASE_NS] = {"lease_release_ns", 1},
    [KVIST_BENCH_LEASE_P99_NS] = {"lease_release_p99_ns", 1},
};

/* --- Plan ---------------------------------------------------------------------------------- */

static bool parse_sizes(const char *text, struct plan *plan)
{
    while (*text != '\0') {
        char one[32];
        size_t length = strcspn(text, ",");
        if (length == 0 || length >= sizeof(one) || plan->size_count == SIZES_MAX) {
            return false;
        }
        memcpy(one, text, length);
        one[length] = '\0';
        uint64_t bytes = 0;
        if (!kvist_tool_parse_size(one, &bytes) || bytes < KVIST_BLOCK_BYTES_MIN ||
            bytes > KVIST_BLOCK_BYTES_MAX || bytes % KVIST_SLOT_ALIGN_BYTES != 0) {
            return false;
        }
        plan->sizes[plan->size_count++] = bytes;
        text += length + (text[length] == ',');
    }
    return plan->size_count > 0;
}

static bool parse_real(const char *text, double least, double most, double *value_out)
{
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !(value >= least) || value > most) {
        return false;
    }
    *value_out = value;
    return true;
}

static uint64_t available_bytes(void)
{
    unsigned long long kib = 0;
    char line[128];
    FILE *info = fopen("/proc/meminfo", "re");
    while (info != NULL && fgets(line, sizeof(line), info) != NULL) {
        if (strncmp(line, "MemAvailable:", 13) == 0) {
            kib = strtoull(line + 13, NULL, 10);
        }
    }
    if (info != NULL) {
        (void)fclose(info);
    }
    return kib << 10;
}

/* An eighth of what is free, within bounds; at least some blocks. */
static uint64_t choose_arena(uint64_t block_bytes)
{
    uint64_t bytes = available_bytes() / 8;
    bytes = bytes > ARENA_BYTES_MOST ? ARENA_BYTES_MOST : bytes;
    bytes = bytes < ARENA_BYTES_LEAST ? ARENA_BYTES_LEAST : bytes;
    uint64_t least = block_bytes * ARENA_BLOCKS_MIN;
    return bytes < least ? least : bytes;
}

/* --- Output -------------------------------------------------------------------------------- */

static int compare_reals(const void *one, const void *other)
{
    const double *a = one;
    const double *b = other;
    return (*a > *b) - (*a < *b);
}

struct spread {
    double median;
    double min;
    double max;
};

static struct spread spread_of(const double *values, uint32_t count)
{
    double sorted[KVIST_BENCH_RUNS_MAX];
    memcpy(sorted, values, count * sizeof(values[0]));
    qsort(sorted, count, sizeof(sorted[0]), compare_reals);
    return (struct spread){
        .median =
            count % 2 == 1 ? sorted[count / 2] : (sorted[count / 2 - 1] + sorted[count / 2]) / 2,
        .min = sorted[0],
        .max = sorted[count - 1],
    };
}

/* What the medians were made of: figures of one run belong together. */
static void json_runs(struct kvist_json *json,
                      const struct plan *plan,
                      const struct kvist_bench_result *result)
{
    kvist_json_object(json, "runs");
    for (size_t figure = 0; figure < KVIST_BENCH_FIGURES; figure++) {
        kvist_json_array(json, figure_rows[figure].name);
        for (uint32_t run = 0; run < plan->run_count; run++) {
            kvist_json_real(json, NULL, result->figures[figure][run]);
        }
        kvist_json_close(json);
    }
    kvist_json_close(json);
}

static void json_result(struct kvist_json *json,
                        const struct plan *plan,
                        const struct kvist_bench_result *result,
                        uint64_t evictions)
{
    kvist_json_object(json, NULL);
    kvist_json_number(json, "block_bytes", result->block_bytes);
    for (size_t figure = 0; figure < KVIST_BENCH_FIGURES; figure++) {
        struct spread spread = spread_of(result->figures[figure], plan->run_count);
        kvist_json_object(json, figure_rows[figure].name);
        kvist_json_real(json, "median", spread.median);
        kvist_json_real(json, "min", spread.min);
        kvist_json_real(json, "max", spread.max);
        kvist_json_close(json);
    }
    json_runs(json, plan, result);
    kvist_json_number(json, "blocks_put", result->blocks_put);
    kvist_json_number(json, "blocks_got", result->blocks_got);
    kvist_json_number(json, "get_misses", result->get_misses);
    kvist_json_number(json, "take_waits_us", result->take_waits_us);
    kvist_json_number(json, "wrong_blocks", result->wrong_blocks);
    kvist_json_number(json, "evictions", evictions);
    kvist_json_close(json);
}

static void print_spread(const struct kvist_bench_result *result,
                         const struct plan *plan,
                         enum kvist_bench_figure figure,
                         int digits)
{
    struct spread spread = spread_of(result->figures[figure], plan->run_count);
    char text[64];
    (void)snprintf(text,
                   sizeof(text),
                   "%.*f (%.*f-%.*f)",
                   digits,
                   spread.median,
                   digits,
                   spread.min,
                   digits,
                   spread.max);
    (void)printf("  %-18s", text);
}

static void print_result(const struct plan *plan, const struct kvist_bench_result *result)
{
    char size[32];
    (void)printf("%-9s", kvist_tool_size(result->block_bytes, size));
    print_spread(result, plan, KVIST_BENCH_MEMCPY, 2);
    print_spread(result, plan, KVIST_BENCH_PUT, 2);
    print_spread(result, plan, KVIST_BENCH_PUT_RATIO, 2);
    print_spread(result, plan, KVIST_BENCH_GET, 2);
    print_spread(result, plan, KVIST_BENCH_GET_RATIO, 2);
    print_spread(result, plan, KVIST_BENCH_PROBE_NS, 0);
    print_spread(result, plan, KVIST_BENCH_PROBE_MISS_NS, 0);
    print_spread(result, plan, KVIST_BENCH_LEASE_NS, 0);
    print_spread(result, plan, KVIST_BENCH_LEASE_P99_NS, 0);
    (void)putchar('\n');
    (void)fflush(stdout);
}

static void print_head(const struct plan *plan)
{
    (void)printf("medians (lowest-highest) of %u runs of %g s a figure; speeds in GB/s, times in "
                 "ns a key; blocks are evicted all the time\n"
                 "%-9s  %-18s  %-18s  %-18s  %-18s  %-18s  %-18s  %-18s  %-18s  %-18s\n",
                 plan->run_count,
                 plan->seconds,
                 "block",
                 "memcpy",
                 "put",
                 "put/memcpy",
                 "get",
                 "get/memcpy",
                 "probe hit",
                 "probe miss",
                 "lease+release",
                 "its p99");
    (void)fflush(stdout);
}

static enum kvist_status
check_arena(uint64_t arena_bytes, uint64_t block_bytes, struct kvist_error *err)
{
    char arena[32];
    char block[32];
    char least[32];
    uint64_t least_bytes = block_bytes * ARENA_BLOCKS_MIN;
    return arena_bytes >= least_bytes
               ? KVIST_OK
               : kvist_error_set(err,
                                 KVIST_INVALID,
                                 0,
                                 "kvist",
                                 "blocks of %s need an arena of %s at least, and this one has %s: "
                                 "set a larger --arena, or smaller --block-bytes",
                                 kvist_tool_size(block_bytes, block),
                                 kvist_tool_size(least_bytes, least),
                                 kvist_tool_size(arena_bytes, arena));
}

/* --- Run ----------------------------------------------------------------------------------- */

/* Measure one size, with a daemon of its own where none was named. */
static enum kvist_status run_size(const struct kvist_tool *tool,
                                  const struct plan *plan,
                                  uint64_t block_bytes,
                                  struct kvist_bench_result *result,
                                  uint64_t *evictions_out,
                                  struct kvist_error *err)
{
    struct kvist_bench_daemon daemon = {.notify_fd = -1};
    struct kvist_bench_options options = {
        .socket_path = tool->socket_path,
        .block_bytes = block_bytes,
        .arena_bytes = plan->arena_bytes != 0 ? plan->arena_bytes : choose_arena(block_bytes),
        .seconds = plan->seconds,
        .run_count = plan->run_count,
        .stop = &stopped,
    };
    enum kvist_status status = KVIST_OK;
    if (plan->daemon_path[0] != '\0') {
        status = kvist_bench_daemon_start(plan->daemon_path, options.arena_bytes, &daemon, err);
        options.socket_path = daemon.socket_path;
    } else if (plan->arena_bytes == 0) {
        uint64_t arena_bytes =
            kvist_bench_metric(options.socket_path, tool->timeout_us, "arena_bytes");
        options.arena_bytes = arena_bytes != 0 ? arena_bytes : options.arena_bytes;
    }
    if (status == KVIST_OK) {
        status = check_arena(options.arena_bytes, block_bytes, err);
    }
    if (status == KVIST_OK) {
        uint64_t before =
            kvist_bench_metric(options.socket_path, tool->timeout_us, "evictions_total");
        status = kvist_bench_run(&options, result, err);
        *evictions_out =
            kvist_bench_metric(options.socket_path, tool->timeout_us, "evictions_total") - before;
    }
    kvist_bench_daemon_stop(&daemon);
    return status;
}

static int run_plan(const struct kvist_tool *tool, const struct plan *plan)
{
    static struct kvist_bench_result result;
    struct kvist_json json;
    struct kvist_error err = KVIST_ERROR_INIT;
    enum kvist_status status = KVIST_OK;
    kvist_json_init(&json, stdout);
    if (!tool->json) {
        print_head(plan);
    }
    for (size_t index = 0; status == KVIST_OK && index < plan->size_count; index++) {
        uint64_t evictions = 0;
        status = run_size(tool, plan, plan->sizes[index], &result, &evictions, &err);
        if (stopped) {
            status = kvist_error_set(&err, KVIST_CLOSED, 0, "kvist", "stopped by a signal");
        }
        if (status != KVIST_OK) {
            break;
        }
        if (tool->json && index == 0) {
            kvist_json_object(&json, NULL);
            kvist_json_number(&json, "run_count", plan->run_count);
            kvist_json_real(&json, "seconds", plan->seconds);
            kvist_json_array(&json, "results");
        }
        if (tool->json) {
            json_result(&json, plan, &result, evictions);
        } else {
            print_result(plan, &result);
        }
        if (result.wrong_blocks > 0) {
            status = kvist_error_set(
                &err, KVIST_CORRUPT, 0, "kvist", "got bytes that are not what was put");
        }
    }
    while (json.depth > 0) {
        kvist_json_close(&json);
    }
    return status == KVIST_OK ? KVIST_EXIT_OK : kvist_tool_fail(tool, &err);
}

static void catch_signals(void)
{
    struct sigaction action = {.sa_handler = stop};
    (void)sigaction(SIGINT, &action, NULL);
    (void)sigaction(SIGTERM, &action, NULL);
}

int kvist_tool_bench(struct kvist_tool *tool,
                     const struct kvist_tool_command *command,
                     int argc,
                     char **argv)
{
    const char *sizes = "128K,512K,2M";
    const char *seconds = NULL;
    const char *runs = NULL;
    const char *arena = NULL;
    const char *daemon = NULL;
    const struct kvist_tool_option options[] = {
        {"block-bytes LIST", true, "sizes of a block (128K,512K,2M)", &sizes},
        {"seconds S", true, "time of one figure in one run (0.5)", &seconds},
        {"runs N", true, "runs that medians are made of (5)", &runs},
        {"arena BYTES", true, "memory of the kvistd (an eighth of what is free, up to 512M)", &arena},
        {"daemon PATH", true, "kvistd to start for this (the one beside this tool)", &daemon},
    };
    static struct plan plan;
    int exit_code = kvist_tool_parse(tool, command, argc, argv, options, 5, 0);
    if (exit_code >= 0) {
        return exit_code;
    }
    double run_count = RUNS_DEFAULT;
    plan.seconds = SECONDS_DEFAULT;
    if (!parse_sizes(sizes, &plan)) {
        return kvist_tool_usage(
            command, "--block-bytes needs sizes like 128K,2M: multiples of 4K up to 256M");
    }
    if (seconds != NULL && !parse_real(seconds, 0.01, SECONDS_MAX, &plan.seconds)) {
        return kvist_tool_usage(command, "--seconds needs a number from 0.01 to 600");
    }
    if (runs != NULL && !parse_real(runs, 1, KVIST_BENCH_RUNS_MAX, &run_count)) {
        return kvist_tool_usage(
            command, "--runs needs a number from 1 to %u", KVIST_BENCH_RUNS_MAX);
    }
    plan.run_count = (uint32_t)run_count;
    if (arena != NULL && (!kvist_tool_parse_size(arena, &plan.arena_bytes) ||
                          plan.arena_bytes < KVIST_ARENA_BYTES_MIN)) {
        return kvist_tool_usage(command, "--arena needs a size of at least 16M");
    }
    struct kvist_error err = KVIST_ERROR_INIT;
    for (size_t index = 0; plan.arena_bytes != 0 && index < plan.size_count; index++) {
        if (check_arena(plan.arena_bytes, plan.sizes[index], &err) != KVIST_OK) {
            return kvist_tool_usage(command, "%s", err.text);
        }
    }
    if (daemon != NULL && tool->socket_given) {
        return kvist_tool_usage(command, "--socket and --daemon exclude each other");
    }
    if (!tool->socket_given && !kvist_bench_daemon_find(daemon, plan.daemon_path)) {
        return kvist_tool_usage(command,
                                daemon != NULL ? "%s cannot be run"
                                               : "no kvistd found beside this tool%s; name it with "
                                                 "--daemon, or a running one with --socket",
                                daemon != NULL ? daemon : "");
    }
    catch_signals();
    return run_plan(tool, &plan);
}
