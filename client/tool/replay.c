/* kvist replay: what an eviction policy of kvistd would have found in memory, by a trace. */
#include "client/tool/replay_cache.h"
#include "client/tool/tool.h"
#include "proto/base/check.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define POLICIES  (KVIST_EVICTIONS + 1U) /* and MIN, which no daemon can run */
#define PLOT_ROWS 16U
#define PLOT_STEP 8U /* columns */

#define ENOUGH_MORE 64U /* blocks: headroom of the smallest caches */

/* Shares of the distinct blocks, in thousandths. */
static const uint32_t sweep_shares[] = {10, 30, 50, 100, 200, 400, 1000};
#define SIZES KVIST_ARRAY_COUNT(sweep_shares)

struct replay {
    struct kvist_tool *tool;
    const char *path;
    struct kvist_replay_trace trace;
    bool headroom;
    uint32_t blocks[SIZES];
    uint64_t hits[SIZES][POLICIES];
};

static const char *policy_name(uint32_t policy)
{
    return policy < KVIST_EVICTIONS ? kvist_policies[policy]->name : "min";
}

/* @return POLICIES when there is none of that name */
static uint32_t policy_lookup(const char *name)
{
    uint32_t policy = 0;
    while (policy < POLICIES && strcmp(policy_name(policy), name) != 0) {
        policy++;
    }
    return policy;
}

static double percent(const struct replay *replay, uint64_t hits)
{
    return 100.0 * (double)hits / replay->trace.access_count;
}

/* --- Running ------------------------------------------------------------------------------- */

static bool
run_policy(const struct replay *replay, uint32_t policy, uint32_t slot_count, uint64_t *hits_out)
{
    const struct kvist_replay_trace *trace = &replay->trace;
    if (policy == KVIST_EVICTIONS) {
        return kvist_replay_min(trace, slot_count, hits_out) == KVIST_OK;
    }
    struct kvist_replay_cache *cache = NULL;
    /* What holds twice the blocks that there are never evicts, and more of it would only cost. */
    uint64_t enough = 2 * (uint64_t)trace->block_count + ENOUGH_MORE;
    slot_count = slot_count < enough ? slot_count : (uint32_t)enough;
    if (kvist_replay_cache_create(kvist_policies[policy], slot_count, trace->block_count, &cache) !=
        KVIST_OK) {
        return false;
    }
    uint64_t hits = 0;
    for (uint32_t request = 0; request < trace->request_count; request++) {
        const uint32_t *blocks = NULL;
        uint32_t count = kvist_replay_trace_request(trace, request, &blocks);
        hits += kvist_replay_cache_request(cache, blocks, count, replay->headroom);
    }
    kvist_replay_cache_destroy(&cache);
    *hits_out = hits;
    return true;
}

static bool run_sweep(struct replay *replay)
{
    bool told = isatty(STDERR_FILENO) == 1;
    for (uint32_t size = 0; size < SIZES; size++) {
        uint64_t blocks = (uint64_t)replay->trace.block_count * sweep_shares[size] / 1000;
        replay->blocks[size] = blocks > 0 ? (uint32_t)blocks : 1;
        for (uint32_t policy = 0; policy < POLICIES; policy++) {
            if (told) {
                (void)fprintf(stderr,
                              "\r%u of %u: %s over %u blocks\033[K",
                              size * POLICIES + policy + 1,
                              (uint32_t)SIZES * POLICIES,
                              policy_name(policy),
                              replay->blocks[size]);
            }
            if (!run_policy(replay, policy, replay->blocks[size], &replay->hits[size][policy])) {
                return false;
            }
        }
    }
    if (told) {
        (void)fputs("\r\033[K", stderr);
    }
    return true;
}

/* --- Printing ------------------------------------------------------------------------------ */

static void json_head(const struct replay *replay, struct kvist_json *json)
{
    kvist_json_init(json, stdout);
    kvist_json_object(json, NULL);
    kvist_json_text(json, "trace", replay->path);
    kvist_json_number(json, "requests", replay->trace.request_count);
    kvist_json_number(json, "accesses", replay->trace.access_count);
    kvist_json_number(json, "distinct_blocks", replay->trace.block_count);
    kvist_json_bool(json, "headroom", replay->headroom);
}

static void print_one(const struct replay *replay, uint32_t policy, uint32_t blocks, uint64_t hits)
{
    if (replay->tool->json) {
        struct kvist_json json;
        json_head(replay, &json);
        kvist_json_text(&json, "policy", policy_name(policy));
        kvist_json_number(&json, "blocks", blocks);
        kvist_json_number(&json, "hits", hits);
        kvist_json_real(&json, "hit_percent", percent(replay, hits));
        kvist_json_close(&json);
        return;
    }
    (void)printf("%s with %u blocks: %llu hits of %u (%.2f %%), %u distinct blocks\n",
                 policy_name(policy),
                 blocks,
                 (unsigned long long)hits,
                 replay->trace.access_count,
                 percent(replay, hits),
                 replay->trace.block_count);
}

static void json_sweep(const struct replay *replay)
{
    struct kvist_json json;
    json_head(replay, &json);
    kvist_json_array(&json, "sizes");
    for (uint32_t size = 0; size < SIZES; size++) {
        kvist_json_object(&json, NULL);
        kvist_json_number(&json, "blocks", replay->blocks[size]);
        kvist_json_object(&json, "hits");
        for (uint32_t policy = 0; policy < POLICIES; policy++) {
            kvist_json_number(&json, policy_name(policy), replay->hits[size][policy]);
        }
        kvist_json_close(&json);
        kvist_json_close(&json);
    }
    kvist_json_close(&json);
    kvist_json_close(&json);
}

static void print_gap(const uint64_t *hits)
{
    uint64_t lru = hits[KVIST_EVICTION_LRU];
    if (hits[KVIST_EVICTIONS] > lru) {
        double gap = (double)(hits[KVIST_EVICTIONS] - lru);
        double closed = (double)hits[KVIST_EVICTION_REUSE] - (double)lru;
        (void)printf("%10.0f %%", 100 * closed / gap);
    }
    (void)putchar('\n');
}

static void print_table(const struct replay *replay)
{
    (void)printf(
        "%u requests, %u blocks asked for, %u distinct. Hits, in %%:\n\n   size      blocks",
        replay->trace.request_count,
        replay->trace.access_count,
        replay->trace.block_count);
    for (uint32_t policy = 0; policy < POLICIES; policy++) {
        (void)printf("%*s", (int)PLOT_STEP, policy_name(policy));
    }
    (void)puts("   of lru's gap to min reuse closes");
    for (uint32_t size = 0; size < SIZES; size++) {
        (void)printf("%5.0f %%%12u", sweep_shares[size] / 10.0, replay->blocks[size]);
        for (uint32_t policy = 0; policy < POLICIES; policy++) {
            (void)printf("%*.2f", (int)PLOT_STEP, percent(replay, replay->hits[size][policy]));
        }
        print_gap(replay->hits[size]);
    }
}

/* Of a plot's rows, in %: a round number that takes the most in PLOT_ROWS of them. */
static double plot_unit(double most)
{
    static const double units[] = {0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5};
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(units); index++) {
        if (units[index] * PLOT_ROWS >= most) {
            return units[index];
        }
    }
    return 10;
}

static void print_plot_row(const struct replay *replay, double unit, uint32_t row)
{
    (void)printf("%6.1f %% |", unit * row);
    for (uint32_t size = 0; size < SIZES; size++) {
        char cell[PLOT_STEP + 1] = "";
        size_t length = 0;
        for (uint32_t policy = 0; policy < POLICIES; policy++) {
            if ((uint32_t)(percent(replay, replay->hits[size][policy]) / unit + 0.5) == row) {
                cell[length++] = policy_name(policy)[0];
            }
        }
        (void)printf("%*s", (int)PLOT_STEP, cell);
    }
    (void)putchar('\n');
}

static void print_plot(const struct replay *replay)
{
    double most = percent(replay, replay->hits[SIZES - 1][KVIST_EVICTIONS]);
    double unit = plot_unit(most);
    (void)puts("");
    for (uint32_t policy = 0; policy < POLICIES; policy++) {
        (void)printf("  %c: %s", policy_name(policy)[0], policy_name(policy));
    }
    (void)puts("; hits, by the size of the cache in % of the distinct blocks");
    for (uint32_t row = (uint32_t)(most / unit + 0.5) + 1; row > 0; row--) {
        print_plot_row(replay, unit, row - 1);
    }
    (void)printf("%10s", "");
    for (uint32_t size = 0; size < SIZES; size++) {
        (void)printf("%*.0f %%", (int)PLOT_STEP - 2, sweep_shares[size] / 10.0);
    }
    (void)putchar('\n');
}

/* --- The command --------------------------------------------------------------------------- */

static bool parse_count(const char *text, uint32_t *count_out)
{
    char *end = NULL;
    errno = 0;
    unsigned long long count = strtoull(text, &end, 10);
    bool whole = text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0;
    if (!whole || count == 0 || count > KVIST_REPLAY_ACCESSES_MAX) {
        return false;
    }
    *count_out = (uint32_t)count;
    return true;
}

static int read_trace(struct replay *replay)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    FILE *in = strcmp(replay->path, "-") == 0 ? stdin : fopen(replay->path, "re");
    if (in == NULL) {
        (void)fprintf(stderr, "kvist: %s cannot be opened: %m\n", replay->path);
        return KVIST_EXIT_FAILED;
    }
    enum kvist_status status = kvist_replay_trace_read(in, &replay->trace, &err);
    if (in != stdin) {
        (void)fclose(in);
    }
    if (status != KVIST_OK) {
        (void)fprintf(stderr, "kvist: %s: %s\n", replay->path, err.text);
        return KVIST_EXIT_FAILED;
    }
    return KVIST_EXIT_OK;
}

static int replay_trace(struct replay *replay, bool sweep, uint32_t policy, uint32_t blocks)
{
    uint64_t hits = 0;
    if (sweep ? !run_sweep(replay) : !run_policy(replay, policy, blocks, &hits)) {
        (void)fputs("kvist: there is not enough memory for that many blocks\n", stderr);
        return KVIST_EXIT_FAILED;
    }
    if (!sweep) {
        print_one(replay, policy, blocks, hits);
    } else if (replay->tool->json) {
        json_sweep(replay);
    } else {
        print_table(replay);
        print_plot(replay);
    }
    return KVIST_EXIT_OK;
}

int kvist_tool_replay(struct kvist_tool *tool,
                      const struct kvist_tool_command *command,
                      int argc,
                      char **argv)
{
    struct replay replay = {.tool = tool};
    const char *size = NULL;
    const char *name = NULL;
    const char *sweep = NULL;
    const char *headroom = NULL;
    const struct kvist_tool_option options[] = {
        {"blocks N", true, "size of the cache", &size},
        {"policy NAME", true, "reuse (the default), lru, s3fifo, or min, the bound", &name},
        {"sweep", false, "every policy, over sizes from 1 % of the distinct blocks", &sweep},
        {"headroom", false, "evict as kvistd does: in batches, a sixteenth kept free", &headroom},
    };
    int exit_code =
        kvist_tool_parse(tool, command, argc, argv, options, KVIST_ARRAY_COUNT(options), 1);
    if (exit_code >= 0) {
        return exit_code;
    }
    if (optind == argc) {
        return kvist_tool_usage(command, "which trace? A file of JSON lines, or - for stdin");
    }
    uint32_t policy = name == NULL ? KVIST_EVICTION_REUSE : policy_lookup(name);
    uint32_t blocks = 0;
    if (policy == POLICIES) {
        return kvist_tool_usage(command, "there is no policy \"%s\"", name);
    }
    if (sweep != NULL && (size != NULL || name != NULL)) {
        return kvist_tool_usage(command, "--sweep runs every policy and chooses the sizes");
    }
    if (sweep == NULL && (size == NULL || !parse_count(size, &blocks))) {
        return kvist_tool_usage(command, "say --blocks N, 1 to %u", KVIST_REPLAY_ACCESSES_MAX);
    }
    replay.path = argv[optind];
    replay.headroom = headroom != NULL;
    exit_code = read_trace(&replay);
    if (exit_code == KVIST_EXIT_OK) {
        exit_code = replay_trace(&replay, sweep != NULL, policy, blocks);
    }
    kvist_replay_trace_free(&replay.trace);
    return exit_code;
}
