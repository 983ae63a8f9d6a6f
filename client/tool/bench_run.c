#include "client/tool/bench_run.h"

#include "client/tool/bench_engine.h"
#include "proto/base/clock.h"

#include <stdlib.h>
#include <string.h>

#define PROBE_KEYS       512U
#define WINDOW_BYTES_MIN (64ULL << 20)
#define WINDOW_BYTES_MAX (256ULL << 20)
#define SAMPLES_MAX      65536U

static double
probe_ns(struct kvist_bench_engine *engine, double seconds, uint64_t first, uint64_t count)
{
    static uint8_t keys[PROBE_KEYS][KVIST_KEY_BYTES];
    uint8_t probes[PROBE_KEYS];
    uint64_t budget_ns = (uint64_t)(seconds * 1e9 / 4);
    uint64_t spent_ns = 0;
    uint64_t probed = 0;
    while (spent_ns < budget_ns) {
        for (unsigned index = 0; index < PROBE_KEYS; index++) {
            kvist_bench_key(engine, first + kvist_bench_random(engine) % count, keys[index]);
        }
        uint64_t start_ns = kvist_clock_now_ns();
        if (kvist_pool_probe(engine->pool, keys[0], PROBE_KEYS, probes) != KVIST_OK) {
            return 0;
        }
        spent_ns += kvist_clock_now_ns() - start_ns;
        probed += PROBE_KEYS;
    }
    return (double)spent_ns / (double)probed;
}

static int compare_samples(const void *one, const void *other)
{
    const uint64_t *a = one;
    const uint64_t *b = other;
    return (*a > *b) - (*a < *b);
}

static void measure_lease(struct kvist_bench_engine *engine,
                          double seconds,
                          double (*figures)[KVIST_BENCH_RUNS_MAX],
                          uint32_t run)
{
    static uint64_t samples[SAMPLES_MAX]; /* 512 KiB; one thread */
    uint64_t budget_ns = (uint64_t)(seconds * 1e9 / 4);
    uint64_t spent_ns = 0;
    uint32_t sample_count = 0;
    while (spent_ns < budget_ns && sample_count < SAMPLES_MAX) {
        uint8_t key[KVIST_KEY_BYTES];
        struct kvist_lease lease;
        enum kvist_probe stop = KVIST_PROBE_MISS;
        size_t count = 0;
        kvist_bench_key(engine,
                        engine->key_next - engine->recent +
                            kvist_bench_random(engine) % engine->recent,
                        key);
        uint64_t start_ns = kvist_clock_now_ns();
        enum kvist_status status = kvist_pool_acquire(engine->pool, key, 1, &lease, &count, &stop);
        if (status == KVIST_OK) {
            kvist_pool_release(engine->pool, &lease, count);
        }
        uint64_t took_ns = kvist_clock_now_ns() - start_ns;
        spent_ns += took_ns;
        if (count == 1) {
            samples[sample_count++] = took_ns;
        }
    }
    if (sample_count > 0) {
        uint32_t middle = sample_count / 2;
        uint32_t high = sample_count - 1 - sample_count / 100;
        qsort(samples, sample_count, sizeof(samples[0]), compare_samples);
        figures[KVIST_BENCH_LEASE_NS][run] = (double)samples[middle];
        figures[KVIST_BENCH_LEASE_P99_NS][run] = (double)samples[high];
    }
}

static enum kvist_status measure(struct kvist_bench_engine *engine,
                                 double seconds,
                                 double (*figures)[KVIST_BENCH_RUNS_MAX],
                                 uint32_t run,
                                 struct kvist_error *err)
{
    double memcpy_speed = kvist_bench_memcpy_for(engine, seconds);
    enum kvist_status status =
        kvist_bench_put_for(engine, seconds, &figures[KVIST_BENCH_PUT][run], err);
    if (status == KVIST_OK) {
        status = kvist_bench_get_for(engine, seconds, &figures[KVIST_BENCH_GET][run], err);
    }
    if (status == KVIST_OK) {
        figures[KVIST_BENCH_MEMCPY][run] = memcpy_speed;
        figures[KVIST_BENCH_PUT_RATIO][run] = figures[KVIST_BENCH_PUT][run] / memcpy_speed;
        figures[KVIST_BENCH_GET_RATIO][run] = figures[KVIST_BENCH_GET][run] / memcpy_speed;
        figures[KVIST_BENCH_PROBE_NS][run] =
            probe_ns(engine, seconds, engine->key_next - engine->recent, engine->recent);
        figures[KVIST_BENCH_PROBE_MISS_NS][run] =
            probe_ns(engine, seconds, engine->key_next + (1ULL << 40), 1ULL << 40);
        measure_lease(engine, seconds, figures, run);
    }
    return status;
}

enum kvist_status kvist_bench_run(const struct kvist_bench_options *options,
                                  struct kvist_bench_result *result_out,
                                  struct kvist_error *err)
{
    struct kvist_bench_engine engine;
    struct kvist_bench_setup setup = {
        .socket_path = options->socket_path,
        .block_bytes = options->block_bytes,
        .window_bytes = options->arena_bytes / 2,
        .stop = options->stop,
    };
    setup.window_bytes =
        setup.window_bytes < WINDOW_BYTES_MIN ? WINDOW_BYTES_MIN : setup.window_bytes;
    setup.window_bytes =
        setup.window_bytes > WINDOW_BYTES_MAX ? WINDOW_BYTES_MAX : setup.window_bytes;
    memset(result_out, 0, sizeof(*result_out));
    result_out->block_bytes = options->block_bytes;
    enum kvist_status status = kvist_bench_engine_open(&setup, &engine, err);
    if (status == KVIST_OK) {
        status = kvist_bench_fill_arena(&engine, options->arena_bytes, err);
    }
    for (uint32_t run = 0; status == KVIST_OK && run < options->run_count; run++) {
        status = measure(&engine, options->seconds, result_out->figures, run, err);
    }
    result_out->blocks_put = engine.blocks_put;
    result_out->blocks_got = engine.blocks_got;
    result_out->get_misses = engine.get_misses;
    result_out->take_waits_us = engine.take_waits_us;
    result_out->wrong_blocks = engine.wrong_blocks;
    kvist_bench_engine_close(&engine);
    return status;
}
