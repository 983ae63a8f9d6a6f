/* replay: traces, the cache that a policy drives, MIN; and how the policies do on workloads. */
#include "client/tool/replay_cache.h"
#include "proto/base/check.h"
#include "tests/support/traces.h"
#include "tests/support/unit.h"

#include <stdio.h>
#include <string.h>

static const char *tool_path;

/* --- Traces ---------------------------------------------------------------------------------- */

static enum kvist_status
read_text(const char *text, struct kvist_replay_trace *trace_out, struct kvist_error *err)
{
    char copy[1024];
    size_t length = strlen(text);
    KVIST_TEST_FATAL(length < sizeof(copy));
    memcpy(copy, text, length + 1);
    FILE *in = fmemopen(copy, length, "r");
    KVIST_TEST_FATAL(in != NULL);
    enum kvist_status status = kvist_replay_trace_read(in, trace_out, err);
    (void)fclose(in);
    return status;
}

static void requests_are_read(void)
{
    struct kvist_replay_trace trace;
    const uint32_t *blocks = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_FATAL(
        read_text("{\"timestamp\": 0, \"hash_ids\": [18446744073709551615, 7]}\r\n\n"
                  "{\"x\": {\"y\": [1, {\"hash_ids\": \"}\\\"]\"}]}, \"hash_ids\":[7,0,9] , "
                  "\"z\": [true, null, -1.5e3, 0, -0.0E-7, {}]}\n"
                  "{\"hash_ids\": []}",
                  &trace,
                  &err) == KVIST_OK);
    KVIST_TEST_EQUAL(trace.request_count, 3);
    KVIST_TEST_EQUAL(trace.access_count, 5);
    KVIST_TEST_EQUAL(trace.block_count, 4);
    KVIST_TEST_EQUAL(kvist_replay_trace_request(&trace, 0, &blocks), 2);
    KVIST_TEST_TRUE(blocks[0] == 0 && blocks[1] == 1);
    KVIST_TEST_EQUAL(kvist_replay_trace_request(&trace, 1, &blocks), 3);
    KVIST_TEST_TRUE(blocks[0] == 1 && blocks[1] == 2 && blocks[2] == 3);
    KVIST_TEST_EQUAL(kvist_replay_trace_request(&trace, 2, &blocks), 0);
    kvist_replay_trace_free(&trace);
}

static void what_is_wrong_is_said_with_its_line(void)
{
    static const struct {
        const char *text;
        const char *said;
    } rows[] = {
        {"{\"hash_ids\": [1]}\n\n[1]", "line 3: a line is no JSON object"},
        {"{\"hash_ids\": [1]}\n{\"a\": 1}", "line 2: there is no hash_ids"},
        {"{}", "line 1: a name is no text"},
        {"{\"hash_ids\": 1}", "line 1: hash_ids is no array"},
        {"{\"hash_ids\": [1, -2]}", "line 1: hash_ids has what is no unsigned integer"},
        {"{\"hash_ids\": [1.5]}", "line 1: hash_ids has what is no unsigned integer"},
        {"{\"hash_ids\": [1e3]}", "line 1: hash_ids has what is no unsigned integer"},
        {"{\"hash_ids\": [18446744073709551616]}", "no unsigned integer"},
        {"{\"hash_ids\": [01]}", "line 1: hash_ids has what is no unsigned integer"},
        {"{\"x\":-, \"hash_ids\": [1]}", "line 1: a value is missing"},
        {"{\"x\":+1, \"hash_ids\": [1]}", "line 1: a value is missing"},
        {"{\"x\":1., \"hash_ids\": [1]}", "line 1: a value is missing"},
        {"{\"x\":.5, \"hash_ids\": [1]}", "line 1: a value is missing"},
        {"{\"x\":-01, \"hash_ids\": [1]}", "line 1: a value is missing"},
        {"{\"x\":1e, \"hash_ids\": [1]}", "line 1: a value is missing"},
        {"{\"x\":[1,2e+], \"hash_ids\": [1]}", "line 1: a value is missing"},
        {"{\"hash_ids\": [\"a\"]}", "line 1: hash_ids has what is no unsigned integer"},
        {"{\"hash_ids\": [1", "line 1: hash_ids does not end"},
        {"{\"hash_ids\": [1 2]}", "line 1: hash_ids does not end"},
        {"{\"hash_ids\": [1]", "line 1: the object does not end"},
        {"{\"hash_ids\": [1]} x", "line 1: the object does not end, or something follows"},
        {"{\"hash_ids\": [1], \"hash_ids\": [2]}", "line 1: hash_ids is there twice"},
        {"{\"hash_ids\" [1]}", "line 1: a name has no value"},
        {"{\"a\": , \"hash_ids\": [1]}", "line 1: a value is missing"},
        {"{\"a\": \"b", "line 1: a text does not end"},
        {"{\"a\": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1", "line 1: values are nested too deep"},
        {"\n", "no request of it has blocks"},
        {"{\"hash_ids\": []}", "no request of it has blocks"},
    };
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(rows); index++) {
        struct kvist_replay_trace trace;
        struct kvist_error err = KVIST_ERROR_INIT;
        KVIST_TEST_STATUS(read_text(rows[index].text, &trace, &err), KVIST_INVALID);
        KVIST_TEST_TRUE(strstr(err.text, rows[index].said) != NULL);
    }
}

static struct kvist_replay_trace make_trace(enum kvist_test_workload workload, uint32_t requests)
{
    char *text = NULL;
    size_t length = 0;
    uint64_t ids[KVIST_TEST_CHAIN_MAX];
    FILE *out = open_memstream(&text, &length);
    KVIST_TEST_FATAL(out != NULL);
    struct kvist_test_trace *source = kvist_test_trace_create(workload, 1, requests);
    for (size_t count = 0; (count = kvist_test_trace_next(source, ids)) > 0;) {
        for (size_t index = 0; index < count; index++) {
            (void)fprintf(out,
                          "%s%llu",
                          index == 0 ? "{\"hash_ids\": [" : ", ",
                          (unsigned long long)ids[index]);
        }
        (void)fputs("]}\n", out);
    }
    kvist_test_trace_destroy(&source);
    KVIST_TEST_FATAL(fclose(out) == 0);
    FILE *in = fmemopen(text, length, "r");
    struct kvist_replay_trace trace;
    KVIST_TEST_FATAL(in != NULL && kvist_replay_trace_read(in, &trace, NULL) == KVIST_OK);
    (void)fclose(in);
    free(text);
    return trace;
}

/* --- The cache ------------------------------------------------------------------------------- */

static void a_hit_is_a_block_of_the_longest_prefix(void)
{
    struct kvist_replay_cache *cache = NULL;
    KVIST_TEST_FATAL(kvist_replay_cache_create(&kvist_policy_lru, 4, 10, &cache) == KVIST_OK);
    KVIST_TEST_EQUAL(kvist_replay_cache_request(cache, (uint32_t[]){0, 1, 2}, 3, false), 0);
    KVIST_TEST_EQUAL(kvist_replay_cache_request(cache, (uint32_t[]){0, 1, 5}, 3, false), 2);
    KVIST_TEST_EQUAL(kvist_replay_cache_free(cache), 0);
    /* The leaf that nobody used again goes first. */
    KVIST_TEST_EQUAL(kvist_replay_cache_evict(cache, 1), 1);
    KVIST_TEST_TRUE(!kvist_replay_cache_has(cache, 2) && kvist_replay_cache_has(cache, 1));
    /* Behind a hole nothing is a hit, and what is there is used all the same. */
    KVIST_TEST_EQUAL(kvist_replay_cache_request(cache, (uint32_t[]){9, 1}, 2, false), 0);
    KVIST_TEST_EQUAL(kvist_replay_cache_evict(cache, 2), 2);
    KVIST_TEST_TRUE(kvist_replay_cache_has(cache, 9) && kvist_replay_cache_has(cache, 1));
    KVIST_TEST_EQUAL(kvist_replay_cache_evict(cache, 9), 2);
    KVIST_TEST_EQUAL(kvist_replay_cache_free(cache), 4);
    kvist_replay_cache_destroy(&cache);
    kvist_replay_cache_destroy(&cache);
}

static uint64_t run_policy(const struct kvist_policy_ops *ops,
                           const struct kvist_replay_trace *trace,
                           uint32_t slots,
                           bool headroom)
{
    struct kvist_replay_cache *cache = NULL;
    uint64_t hits = 0;
    KVIST_TEST_FATAL(kvist_replay_cache_create(ops, slots, trace->block_count, &cache) == KVIST_OK);
    for (uint32_t request = 0; request < trace->request_count; request++) {
        const uint32_t *blocks = NULL;
        uint32_t count = kvist_replay_trace_request(trace, request, &blocks);
        hits += kvist_replay_cache_request(cache, blocks, count, headroom);
        uint32_t low = slots / 16;
        KVIST_TEST_FATAL(!headroom || kvist_replay_cache_free(cache) >= low);
    }
    kvist_replay_cache_destroy(&cache);
    return hits;
}

/* An LRU of its own: by the time of the last use, looked for one by one. */
static uint64_t run_plain_lru(const struct kvist_replay_trace *trace, uint32_t slots)
{
    uint64_t *used = calloc(trace->block_count, sizeof(used[0])); /* 0: not there */
    uint64_t now = 0;
    uint64_t hits = 0;
    uint32_t there = 0;
    KVIST_TEST_FATAL(used != NULL);
    for (uint32_t request = 0; request < trace->request_count; request++) {
        const uint32_t *blocks = NULL;
        uint32_t count = kvist_replay_trace_request(trace, request, &blocks);
        uint32_t found = 0;
        while (found < count && used[blocks[found]] != 0) {
            found++;
        }
        hits += found;
        for (uint32_t left = count; left > 0; left--) {
            there += used[blocks[left - 1]] == 0;
            used[blocks[left - 1]] = ++now;
        }
        for (; there > slots; there--) {
            uint32_t oldest = UINT32_MAX;
            for (uint32_t block = 0; block < trace->block_count; block++) {
                bool older = oldest == UINT32_MAX || used[block] < used[oldest];
                oldest = used[block] != 0 && older ? block : oldest;
            }
            used[oldest] = 0;
        }
    }
    free(used);
    return hits;
}

static void lru_agrees_with_a_plain_one(void)
{
    for (uint32_t workload = 0; workload < KVIST_TEST_WORKLOADS; workload++) {
        struct kvist_replay_trace trace = make_trace((enum kvist_test_workload)workload, 300);
        /* It evicts as it stores and the plain one afterwards: the same while a request fits. */
        uint32_t slots = 2 * KVIST_TEST_CHAIN_MAX;
        KVIST_TEST_EQUAL(run_policy(&kvist_policy_lru, &trace, slots, false),
                         run_plain_lru(&trace, slots));
        kvist_replay_trace_free(&trace);
    }
}

static void min_knows_the_future(void)
{
    struct kvist_replay_trace trace;
    uint64_t hits = 0;
    KVIST_TEST_FATAL(read_text("{\"hash_ids\":[1]}\n{\"hash_ids\":[2]}\n{\"hash_ids\":[3]}\n"
                               "{\"hash_ids\":[1]}\n{\"hash_ids\":[2]}\n{\"hash_ids\":[3]}\n",
                               &trace,
                               NULL) == KVIST_OK);
    KVIST_TEST_STATUS(kvist_replay_min(&trace, 1, &hits), KVIST_OK);
    KVIST_TEST_EQUAL(hits, 1);
    KVIST_TEST_STATUS(kvist_replay_min(&trace, 2, &hits), KVIST_OK);
    KVIST_TEST_EQUAL(hits, 2);
    KVIST_TEST_STATUS(kvist_replay_min(&trace, 3, &hits), KVIST_OK);
    KVIST_TEST_EQUAL(hits, 3);
    kvist_replay_trace_free(&trace);
}

/* --- How the policies do --------------------------------------------------------------------- */

struct scores {
    double lru;
    double s3fifo;
    double reuse;
    double min;
};

static struct scores score(const struct kvist_replay_trace *trace, uint32_t slots, bool headroom)
{
    uint64_t min = 0;
    KVIST_TEST_STATUS(kvist_replay_min(trace, slots, &min), KVIST_OK);
    double scale = 100.0 / trace->access_count;
    return (struct scores){
        .lru = (double)run_policy(&kvist_policy_lru, trace, slots, headroom) * scale,
        .s3fifo = (double)run_policy(&kvist_policy_s3fifo, trace, slots, headroom) * scale,
        .reuse = (double)run_policy(&kvist_policy_reuse, trace, slots, headroom) * scale,
        .min = (double)min * scale,
    };
}

/* Whether reuse is at least as good as the better of the others, within `slack` points. */
static bool holds(const char *name, uint32_t slots, struct scores scores, double slack)
{
    double better = scores.lru > scores.s3fifo ? scores.lru : scores.s3fifo;
    bool good =
        scores.reuse >= better - slack && scores.min >= better && scores.min >= scores.reuse;
    if (!good) {
        (void)fprintf(stderr,
                      "%s, %u slots: lru %.2f s3fifo %.2f reuse %.2f min %.2f\n",
                      name,
                      slots,
                      scores.lru,
                      scores.s3fifo,
                      scores.reuse,
                      scores.min);
    }
    return good;
}

static void reuse_is_the_better_of_both_on_every_workload(void)
{
    static const uint32_t shares[] = {3, 10, 40}; /* of the distinct blocks, in % */
    for (uint32_t index = 0; index < KVIST_TEST_WORKLOADS; index++) {
        enum kvist_test_workload workload = (enum kvist_test_workload)index;
        struct kvist_replay_trace trace = make_trace(workload, 12000);
        for (size_t size = 0; size < KVIST_ARRAY_COUNT(shares); size++) {
            uint32_t slots = trace.block_count / 100 * shares[size];
            KVIST_TEST_TRUE(
                holds(kvist_test_workload_name(workload), slots, score(&trace, slots, false), 0.3));
        }
        kvist_replay_trace_free(&trace);
    }
}

static void headroom_is_kept(void)
{
    struct kvist_replay_trace trace = make_trace(KVIST_TEST_SCAN, 2000);
    (void)score(&trace, trace.block_count / 10, true);
    kvist_replay_trace_free(&trace);
}

/* The table of the trace that the Mooncake paper published, where it lies. */
static void the_published_table_is_reproduced(void)
{
    static const struct {
        uint32_t share; /* in % */
        double lru;
        double min;
    } rows[] = {{1, 5.3, 24.6},
                {3, 12.6, 34.8},
                {5, 19.6, 36.6},
                {10, 27.9, 36.6},
                {20, 34.5, 36.6},
                {40, 36.0, 36.6}};
    char path[4096];
    const char *folder = getenv("KVIST_TRACES"); /* NOLINT(concurrency-mt-unsafe): one thread */
    if (folder == NULL) {
        return;
    }
    (void)snprintf(path, sizeof(path), "%s/mooncake_conversation.jsonl", folder);
    struct kvist_replay_trace trace;
    FILE *in = fopen(path, "re");
    KVIST_TEST_FATAL(in != NULL && kvist_replay_trace_read(in, &trace, NULL) == KVIST_OK);
    (void)fclose(in);
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(rows); index++) {
        uint32_t slots = trace.block_count * rows[index].share / 100;
        struct scores scores = score(&trace, slots, false);
        KVIST_TEST_TRUE(holds(path, slots, scores, 0.3));
        KVIST_TEST_TRUE(scores.lru > rows[index].lru - 0.06 && scores.lru < rows[index].lru + 0.06);
        KVIST_TEST_TRUE(scores.min > rows[index].min - 0.06 && scores.min < rows[index].min + 0.06);
    }
    kvist_replay_trace_free(&trace);
}

/* --- The command ----------------------------------------------------------------------------- */

static bool prints(const char *options, const char *expected, int expected_code)
{
    char command[8192];
    char text[16384];
    (void)snprintf(command,
                   sizeof(command),
                   "printf '{\"hash_ids\":[1,2]}\\n{\"hash_ids\":[1,2,3]}\\n' |"
                   " %s replay %s 2>&1",
                   tool_path,
                   options);
    FILE *out = popen(command, "re"); /* NOLINT(cert-env33-c): the tool under test */
    KVIST_TEST_FATAL(out != NULL);
    size_t length = fread(text, 1, sizeof(text) - 1, out);
    text[length] = '\0';
    int code = pclose(out);
    bool good = code == expected_code << 8 && strstr(text, expected) != NULL;
    if (!good) {
        (void)fprintf(stderr, "%s: %d, %s\n", options, code, text);
    }
    return good;
}

static void the_command_prints(void)
{
    KVIST_TEST_TRUE(
        prints("- --blocks 4", "reuse with 4 blocks: 2 hits of 5 (40.00 %), 3 distinct blocks", 0));
    KVIST_TEST_TRUE(prints("- --blocks 2 --policy min", "min with 2 blocks: 2 hits", 0));
    KVIST_TEST_TRUE(prints("--json - --blocks 4 --policy lru", "\"hits\": 2", 0));
    KVIST_TEST_TRUE(prints("- --sweep", "100 %           3   40.00   40.00", 0));
    KVIST_TEST_TRUE(prints("- --sweep", " s: s3fifo  m: min;", 0));
    KVIST_TEST_TRUE(prints("- --sweep", "   0.0 % |     rls     rls", 0));
    KVIST_TEST_TRUE(prints("- --sweep --headroom --json", "\"s3fifo\"", 0));
    KVIST_TEST_TRUE(prints("--blocks 4", "which trace?", 2));
    KVIST_TEST_TRUE(prints("-", "say --blocks N", 2));
    KVIST_TEST_TRUE(prints("- --blocks 0", "say --blocks N", 2));
    KVIST_TEST_TRUE(prints("- --blocks 4 --policy fifo", "there is no policy \"fifo\"", 2));
    KVIST_TEST_TRUE(prints("- --sweep --blocks 4", "chooses the sizes", 2));
    KVIST_TEST_TRUE(prints("/nowhere/trace --blocks 4", "/nowhere/trace cannot be opened", 1));
    KVIST_TEST_TRUE(prints("/dev/null --blocks 4", "/dev/null: no request of it has blocks", 1));
}

int main(int argc, char **argv)
{
    static const struct kvist_unit_case cases[] = {
        {"requests are read", requests_are_read},
        {"what is wrong is said with its line", what_is_wrong_is_said_with_its_line},
        {"a hit is a block of the longest prefix", a_hit_is_a_block_of_the_longest_prefix},
        {"lru agrees with a plain one", lru_agrees_with_a_plain_one},
        {"min knows the future", min_knows_the_future},
        {"reuse is the better of both on every workload",
         reuse_is_the_better_of_both_on_every_workload},
        {"headroom is kept", headroom_is_kept},
        {"the published table is reproduced", the_published_table_is_reproduced},
        {"the command prints", the_command_prints},
    };
    KVIST_TEST_FATAL(argc == 2);
    tool_path = argv[1];
    return kvist_unit_main("replay", cases, KVIST_ARRAY_COUNT(cases), NULL, NULL);
}
