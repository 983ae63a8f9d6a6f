/* Rows about the NVMe tier. tests/bench/run puts fio between the runs. */
#include "proto/base/clock.h"
#include "tests/bench/rows.h"

#include <stdio.h>
#include <string.h>

#define WINDOW_BYTES   (64ULL << 20)
#define IN_FLIGHT      8U
#define PROMOTE_US_MAX 3000000U
#define SAMPLES_MAX    65536U
#define OWN_BYTES      (64ULL << 10) /* blocks of whom the tier's load is to disturb */
#define PACE_GBPS      1.0           /* of puts while the tier is loaded: near what it writes */

/* --- Spill --------------------------------------------------------------------------------- */

/* Put at the full speed of memory, and see how much of it goes to NVMe. */
enum kvist_status rows_spill(const struct rows_options *options, struct kvist_error *err)
{
    struct kvist_bench_engine engine;
    struct kvist_bench_setup setup = rows_setup(options, WINDOW_BYTES);
    enum kvist_status status = kvist_bench_engine_open(&setup, &engine, err);
    if (status == KVIST_OK) {
        status = kvist_bench_fill_arena(&engine, options->arena_bytes, err);
    }
    for (uint64_t run = 0; status == KVIST_OK && run < options->run_count && rows_gate(options);
         run++) {
        double put_gbps = 0;
        uint64_t bytes = rows_metric(options, "spill_bytes_total");
        uint64_t skipped = rows_metric(options, "spill_skipped_total");
        uint64_t start_ns = kvist_clock_now_ns();
        status = kvist_bench_put_for(&engine, rows_seconds(options), &put_gbps, err);
        bytes = rows_metric(options, "spill_bytes_total") - bytes;
        double seconds = (double)(kvist_clock_now_ns() - start_ns) / 1e9;
        if (status == KVIST_OK) {
            (void)printf(
                "row=spill figure=%.3f bytes=%llu put_gbps=%.3f skipped=%llu\n",
                (double)bytes / seconds / 1e9,
                (unsigned long long)bytes,
                put_gbps,
                (unsigned long long)(rows_metric(options, "spill_skipped_total") - skipped));
        }
    }
    kvist_bench_engine_close(&engine);
    return status;
}

/* --- Promote ------------------------------------------------------------------------------- */

struct flight {
    uint64_t number; /* 0: none */
    uint64_t asked_us;
};

struct storm {
    struct kvist_bench_engine *engine;
    uint64_t key_count;
    struct flight flights[IN_FLIGHT];
    uint64_t done;
    uint64_t lost; /* asked for, and never came */
};

static uint8_t probe_one(struct storm *storm, const uint8_t *key)
{
    uint8_t probe = KVIST_PROBE_MISS;
    enum kvist_status status = kvist_pool_probe(storm->engine->pool, key, 1, &probe);
    return status == KVIST_OK ? probe : (uint8_t)KVIST_PROBE_MISS;
}

static void storm_ask(struct storm *storm, struct flight *flight)
{
    uint8_t key[KVIST_KEY_BYTES];
    for (unsigned tries = 0; tries < 64; tries++) {
        uint64_t number = 1 + kvist_bench_random(storm->engine) % storm->key_count;
        kvist_bench_key(storm->engine, number, key);
        if (probe_one(storm, key) == KVIST_PROBE_NVME &&
            kvist_pool_prefetch(storm->engine->pool, key, 1) == KVIST_OK) {
            *flight = (struct flight){number, kvist_clock_now_us()};
            return;
        }
    }
}

/* Lease what has come, ask for others in its place. */
static void storm_turn(struct storm *storm)
{
    for (unsigned index = 0; index < IN_FLIGHT; index++) {
        struct flight *flight = &storm->flights[index];
        uint8_t key[KVIST_KEY_BYTES];
        if (flight->number != 0) {
            struct kvist_lease lease;
            enum kvist_probe stop = KVIST_PROBE_MISS;
            size_t count = 0;
            kvist_bench_key(storm->engine, flight->number, key);
            if (kvist_pool_acquire(storm->engine->pool, key, 1, &lease, &count, &stop) ==
                    KVIST_OK &&
                count == 1) {
                kvist_pool_release(storm->engine->pool, &lease, 1);
                storm->done++;
                flight->number = 0;
            } else if (stop == KVIST_PROBE_MISS ||
                       kvist_clock_now_us() - flight->asked_us > PROMOTE_US_MAX) {
                storm->lost++;
                flight->number = 0;
            }
        }
        if (flight->number == 0) {
            storm_ask(storm, flight);
        }
    }
}

enum kvist_status rows_promote(const struct rows_options *options, struct kvist_error *err)
{
    struct kvist_bench_engine engine;
    struct kvist_bench_setup setup = rows_setup(options, WINDOW_BYTES);
    setup.read_only = true;
    enum kvist_status status = kvist_bench_engine_open(&setup, &engine, err);
    struct storm storm = {.engine = &engine, .key_count = options->count};
    for (uint64_t run = 0; status == KVIST_OK && run < options->run_count && rows_gate(options);
         run++) {
        uint64_t done = storm.done;
        uint64_t lost = storm.lost;
        uint64_t start_ns = kvist_clock_now_ns();
        uint64_t end_ns = start_ns + options->seconds_ms * 1000000;
        while (kvist_clock_now_ns() < end_ns) {
            storm_turn(&storm);
            rows_pause_us(50);
        }
        double seconds = (double)(kvist_clock_now_ns() - start_ns) / 1e9;
        (void)printf("row=promote figure=%.3f blocks=%llu lost=%llu\n",
                     (double)((storm.done - done) * options->block_bytes) / seconds / 1e9,
                     (unsigned long long)(storm.done - done),
                     (unsigned long long)(storm.lost - lost));
    }
    kvist_bench_engine_close(&engine);
    return status;
}

/* --- Calls beside a loaded tier ------------------------------------------------------------ */

/* Member 0 promotes at random, member 1 puts what is to be spilled. */
static enum kvist_status
load_member(struct rows_crew *crew, unsigned member, struct kvist_error *err)
{
    struct kvist_bench_engine engine;
    struct kvist_bench_setup setup = rows_setup(crew->options, WINDOW_BYTES);
    setup.read_only = member == 0;
    setup.key_first = crew->options->count + 1;
    enum kvist_status status = kvist_bench_engine_open(&setup, &engine, err);
    struct storm storm = {.engine = &engine, .key_count = crew->options->count};
    uint64_t pause_us =
        (uint64_t)((double)crew->options->block_bytes * KVIST_BENCH_BATCH / PACE_GBPS / 1e3);
    while (status == KVIST_OK && !crew->over) {
        if (!crew->working) {
            rows_pause_us(1000);
        } else if (member == 0) {
            storm_turn(&storm);
            rows_pause_us(100);
        } else {
            status = kvist_bench_put(&engine, KVIST_BENCH_BATCH, err);
            rows_pause_us(pause_us);
        }
    }
    kvist_bench_engine_close(&engine);
    return status;
}

enum { PROBE, LEASE, COMMIT, KINDS };

struct laps {
    uint64_t samples[KINDS][SAMPLES_MAX];
    size_t counts[KINDS];
};

static void lap(struct laps *laps, unsigned kind, uint64_t start_ns)
{
    if (laps->counts[kind] < SAMPLES_MAX) {
        laps->samples[kind][laps->counts[kind]++] = kvist_clock_now_ns() - start_ns;
    }
}

/* A probe and a lease of 16 keys; every so often a put, until it is found. */
static enum kvist_status laps_run(const struct rows_options *options,
                                  struct kvist_bench_engine *engine,
                                  struct laps *laps,
                                  struct kvist_error *err)
{
    enum kvist_status status = KVIST_OK;
    uint64_t end_ns = kvist_clock_now_ns() + options->seconds_ms * 1000000;
    memset(laps->counts, 0, sizeof(laps->counts));
    for (uint64_t turn = 0; status == KVIST_OK && kvist_clock_now_ns() < end_ns; turn++) {
        uint8_t keys[KVIST_BENCH_BATCH][KVIST_KEY_BYTES];
        uint8_t probes[KVIST_BENCH_BATCH];
        struct kvist_lease leases[KVIST_BENCH_BATCH];
        enum kvist_probe stop = KVIST_PROBE_MISS;
        size_t count = 0;
        uint64_t first = engine->key_next - engine->recent +
                         kvist_bench_random(engine) % (engine->recent - KVIST_BENCH_BATCH);
        for (unsigned index = 0; index < KVIST_BENCH_BATCH; index++) {
            kvist_bench_key(engine, first + index, keys[index]);
        }
        uint64_t start_ns = kvist_clock_now_ns();
        status = kvist_pool_probe(engine->pool, keys[0], KVIST_BENCH_BATCH, probes);
        lap(laps, PROBE, start_ns);
        start_ns = kvist_clock_now_ns();
        if (kvist_pool_acquire(engine->pool, keys[0], KVIST_BENCH_BATCH, leases, &count, &stop) ==
            KVIST_OK) {
            kvist_pool_release(engine->pool, leases, count);
        }
        lap(laps, LEASE, start_ns);
        if (turn % 16 == 0) {
            status = kvist_bench_put(engine, 1, err);
            start_ns = kvist_clock_now_ns();
            status = status == KVIST_OK ? kvist_bench_put_wait(engine, err) : status;
            lap(laps, COMMIT, start_ns);
            rows_pause_us(500);
        }
    }
    return status;
}

static enum kvist_status flat_run(const struct rows_options *options,
                                  struct kvist_bench_engine *engine,
                                  struct rows_crew *crew,
                                  struct kvist_error *err)
{
    static const char *const names[KINDS] = {"probe", "lease", "commit"};
    static struct laps laps;
    double p99[2][KINDS] = {{0}};
    enum kvist_status status = KVIST_OK;
    uint64_t tier_bytes = 0;
    for (unsigned loaded = 0; status == KVIST_OK && loaded < 2; loaded++) {
        crew->working = loaded != 0;
        rows_pause_us(200000);
        uint64_t before = rows_metric(options, "nvme_write_bytes_total") +
                          rows_metric(options, "nvme_read_bytes_total");
        status = laps_run(options, engine, &laps, err);
        tier_bytes = rows_metric(options, "nvme_write_bytes_total") +
                     rows_metric(options, "nvme_read_bytes_total") - before;
        for (unsigned kind = 0; kind < KINDS; kind++) {
            p99[loaded][kind] =
                (double)bench_quantile(laps.samples[kind], laps.counts[kind], 0.99) / 1e3;
        }
    }
    crew->working = false;
    for (unsigned kind = 0; status == KVIST_OK && kind < KINDS; kind++) {
        (void)printf("row=flat_%s limit=%.2f figure=%.2f tier_gbps=%.2f\n",
                     names[kind],
                     p99[0][kind],
                     p99[1][kind],
                     (double)tier_bytes / rows_seconds(options) / 1e9);
    }
    return status;
}

enum kvist_status rows_flat(const struct rows_options *options, struct kvist_error *err)
{
    struct kvist_bench_engine engine = {.fds = {-1, -1}};
    struct rows_crew *crew = rows_crew_create(options, 2, 1);
    enum kvist_status status =
        crew != NULL ? KVIST_OK : kvist_error_set(err, KVIST_NO_MEMORY, 0, "mmap", "no memory");
    for (unsigned member = 0; status == KVIST_OK && member < 2; member++) {
        status = rows_crew_start(crew, member, load_member, err);
    }
    struct kvist_bench_setup setup = rows_setup(options, WINDOW_BYTES);
    setup.block_bytes = OWN_BYTES;
    setup.salt = 0;
    if (status == KVIST_OK) {
        status = kvist_bench_engine_open(&setup, &engine, err);
    }
    if (status == KVIST_OK) {
        status = kvist_bench_fill_arena(&engine, options->arena_bytes / 8, err);
    }
    for (uint64_t run = 0; status == KVIST_OK && run < options->run_count; run++) {
        status = flat_run(options, &engine, crew, err);
    }
    if (crew != NULL) {
        crew->over = true;
    }
    if (status == KVIST_OK) {
        status = rows_crew_wait(crew, err);
    }
    kvist_bench_engine_close(&engine);
    rows_crew_destroy(&crew);
    return status;
}
