/* Rows that move blocks through memory. */
#include "proto/base/clock.h"
#include "tests/bench/rows.h"

#include <stdio.h>

#define WINDOW_BYTES       (128ULL << 20)
#define SMALL_WINDOW_BYTES (8ULL << 20) /* where 64 run at once */
#define KEYS_APART         (1ULL << 40) /* numbers of one member */
#define CHECKSUMS_US_MAX   60000000U

/* --- Cold ---------------------------------------------------------------------------------- */

/* An arena of new memory, put to for the first time. */
enum kvist_status rows_cold(const struct rows_options *options, struct kvist_error *err)
{
    struct kvist_bench_engine engine;
    struct kvist_bench_setup setup = rows_setup(options, WINDOW_BYTES);
    enum kvist_status status = kvist_bench_engine_open(&setup, &engine, err);
    uint64_t start_ns = kvist_clock_now_ns();
    while (status == KVIST_OK && engine.blocks_put * options->block_bytes < options->count) {
        status = kvist_bench_put(&engine, KVIST_BENCH_BATCH, err);
    }
    if (status == KVIST_OK) {
        status = kvist_bench_put_wait(&engine, err);
    }
    uint64_t ns = kvist_clock_now_ns() - start_ns;
    double figure = (double)(engine.blocks_put * options->block_bytes) / (double)ns;
    if (status == KVIST_OK) {
        (void)printf("row=put_cold limit=%.3f figure=%.3f waits_us=%llu\n",
                     kvist_bench_memcpy_for(&engine, rows_seconds(options)),
                     figure,
                     (unsigned long long)engine.take_waits_us);
    }
    kvist_bench_engine_close(&engine);
    return status;
}

/* --- Two clients --------------------------------------------------------------------------- */

enum { MEMCPY, PUT, GET, WAITED };

static enum kvist_status open_share(struct rows_crew *crew,
                                    unsigned member,
                                    uint64_t window_bytes,
                                    struct kvist_bench_engine *engine,
                                    struct kvist_error *err)
{
    struct kvist_bench_setup setup = rows_setup(crew->options, window_bytes);
    setup.salt = crew->options->one_pool != 0 ? crew->options->salt : 0;
    setup.key_first = 1 + member * KEYS_APART;
    enum kvist_status status = kvist_bench_engine_open(&setup, engine, err);
    return status == KVIST_OK
               ? kvist_bench_fill_arena(engine, crew->options->arena_bytes / crew->count, err)
               : status;
}

static enum kvist_status
pair_member(struct rows_crew *crew, unsigned member, struct kvist_error *err)
{
    double seconds = rows_seconds(crew->options);
    struct kvist_bench_engine engine;
    enum kvist_status status = open_share(crew, member, WINDOW_BYTES, &engine, err);
    for (uint64_t run = 0; status == KVIST_OK && run < crew->options->run_count; run++) {
        double *figures = crew->figures[member][run];
        rows_crew_meet(crew);
        figures[MEMCPY] = kvist_bench_memcpy_for(&engine, seconds);
        rows_crew_meet(crew);
        uint64_t waits_us = engine.take_waits_us;
        status = kvist_bench_put_for(&engine, seconds, &figures[PUT], err);
        figures[WAITED] = (double)(engine.take_waits_us - waits_us) / 1e6 / seconds / crew->count;
        rows_crew_meet(crew);
        if (status == KVIST_OK) {
            status = kvist_bench_get_for(&engine, seconds, &figures[GET], err);
        }
    }
    kvist_bench_engine_close(&engine);
    return status;
}

static double sum(const struct rows_crew *crew, uint64_t run, unsigned what)
{
    double total = 0;
    for (unsigned member = 0; member < crew->count; member++) {
        total += crew->figures[member][run][what];
    }
    return total;
}

enum kvist_status rows_pair(const struct rows_options *options, struct kvist_error *err)
{
    struct rows_crew *crew = rows_crew_create(options, 2, 2);
    enum kvist_status status =
        crew != NULL ? KVIST_OK : kvist_error_set(err, KVIST_NO_MEMORY, 0, "mmap", "no memory");
    for (unsigned member = 0; status == KVIST_OK && member < 2; member++) {
        status = rows_crew_start(crew, member, pair_member, err);
    }
    if (status == KVIST_OK) {
        status = rows_crew_wait(crew, err);
    }
    const char *pools = options->one_pool != 0 ? "one" : "own";
    for (uint64_t run = 0; status == KVIST_OK && run < options->run_count; run++) {
        double limit = sum(crew, run, MEMCPY);
        (void)printf("row=two_put_%s limit=%.3f figure=%.3f waited=%.3f\n",
                     pools,
                     limit,
                     sum(crew, run, PUT),
                     sum(crew, run, WAITED));
        (void)printf("row=two_get_%s limit=%.3f figure=%.3f\n", pools, limit, sum(crew, run, GET));
    }
    rows_crew_destroy(&crew);
    return status;
}

/* --- Many sessions ------------------------------------------------------------------------- */

/* Put a batch, get it back, for seconds. @return GB/s of both */
static enum kvist_status mixed_for(struct kvist_bench_engine *engine,
                                   double seconds,
                                   double *gbps_out,
                                   struct kvist_error *err)
{
    uint64_t start_ns = kvist_clock_now_ns();
    uint64_t before = engine->blocks_put + engine->blocks_got;
    enum kvist_status status = KVIST_OK;
    while (status == KVIST_OK && kvist_clock_now_ns() - start_ns < (uint64_t)(seconds * 1e9)) {
        uint64_t first = engine->key_next;
        status = kvist_bench_put(engine, KVIST_BENCH_BATCH, err);
        /* The batch before: found by now, as a rule. */
        (void)kvist_bench_get(engine, first - KVIST_BENCH_BATCH, KVIST_BENCH_BATCH);
    }
    uint64_t blocks = engine->blocks_put + engine->blocks_got - before;
    *gbps_out =
        (double)(blocks * engine->setup.block_bytes) / (double)(kvist_clock_now_ns() - start_ns);
    return status;
}

enum { ALONE, TOGETHER };

static enum kvist_status
session_member(struct rows_crew *crew, unsigned member, struct kvist_error *err)
{
    double seconds = rows_seconds(crew->options);
    struct kvist_bench_engine engine;
    enum kvist_status status = open_share(crew, member, SMALL_WINDOW_BYTES, &engine, err);
    for (uint64_t run = 0; status == KVIST_OK && run < crew->options->run_count; run++) {
        double *figures = crew->figures[member][run];
        rows_crew_meet(crew);
        if (member == 0) {
            status = mixed_for(&engine, seconds, &figures[ALONE], err);
        }
        rows_crew_meet(crew);
        if (status == KVIST_OK) {
            status = mixed_for(&engine, seconds, &figures[TOGETHER], err);
        }
    }
    kvist_bench_engine_close(&engine);
    return status;
}

enum kvist_status rows_sessions(const struct rows_options *options, struct kvist_error *err)
{
    unsigned count = (unsigned)options->count;
    struct rows_crew *crew =
        count > 0 && count <= ROWS_MEMBERS_MAX ? rows_crew_create(options, count, count) : NULL;
    enum kvist_status status =
        crew != NULL ? KVIST_OK : kvist_error_set(err, KVIST_INVALID, 0, "count", "1 to 64");
    for (unsigned member = 0; status == KVIST_OK && member < count; member++) {
        status = rows_crew_start(crew, member, session_member, err);
    }
    if (status == KVIST_OK) {
        status = rows_crew_wait(crew, err);
    }
    for (uint64_t run = 0; status == KVIST_OK && run < options->run_count; run++) {
        (void)printf("row=sessions limit=%.3f figure=%.3f\n",
                     sum(crew, run, ALONE),
                     sum(crew, run, TOGETHER));
    }
    rows_crew_destroy(&crew);
    return status;
}

/* --- Verified gets ------------------------------------------------------------------------- */

/* Every block that was put has its checksum: the default takes them when nothing else runs. */
static void wait_checksums(const struct rows_options *options)
{
    uint64_t deadline_us = kvist_clock_now_us() + CHECKSUMS_US_MAX;
    uint64_t before = 0;
    uint64_t now = rows_metric(options, "checksums_total");
    while ((now != before || now == 0) && kvist_clock_now_us() < deadline_us) {
        before = now;
        rows_pause_us(500000);
        now = rows_metric(options, "checksums_total");
    }
}

enum kvist_status rows_verify(const struct rows_options *options, struct kvist_error *err)
{
    double seconds = rows_seconds(options);
    struct kvist_bench_engine engine;
    struct kvist_bench_setup setup = rows_setup(options, WINDOW_BYTES);
    enum kvist_status status = kvist_bench_engine_open(&setup, &engine, err);
    if (status == KVIST_OK) {
        status = kvist_bench_fill_arena(&engine, options->arena_bytes, err);
    }
    if (status == KVIST_OK) {
        wait_checksums(options);
    }
    for (uint64_t run = 0; status == KVIST_OK && run < options->run_count; run++) {
        double plain = 0;
        double verified = 0;
        double limit = kvist_bench_checksum_for(&engine, seconds);
        uint64_t got = engine.blocks_got;
        uint64_t unverified = engine.unverified_gets;
        engine.setup.verify = true;
        status = kvist_bench_get_for(&engine, seconds, &verified, err);
        got = engine.blocks_got - got;
        unverified = engine.unverified_gets - unverified;
        engine.setup.verify = false;
        if (status == KVIST_OK) {
            status = kvist_bench_get_for(&engine, seconds, &plain, err);
        }
        (void)printf("row=get_verify limit=%.3f figure=%.3f unverified=%.3f default=%.3f\n",
                     limit,
                     verified,
                     got > 0 ? (double)unverified / (double)got : 0,
                     plain);
    }
    if (status == KVIST_OK && engine.wrong_blocks > 0) {
        status = kvist_error_set(err, KVIST_CORRUPT, 0, "verify", "wrong bytes");
    }
    kvist_bench_engine_close(&engine);
    return status;
}
