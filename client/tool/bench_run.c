#include "client/tool/bench_run.h"

#include "proto/base/clock.h"
#include "proto/shm/memfd.h"

#include <kvist/client.h>

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define BATCH            16U
#define PROBE_KEYS       512U
#define WINDOW_BYTES_MIN (64ULL << 20)
#define WINDOW_BYTES_MAX (256ULL << 20)
#define WAIT_US          60000000U /* for the daemon, before the benchmark gives up */
#define TAKE_WAIT_US     10000000U
#define SAMPLES_MAX      65536U

struct bench {
    const struct kvist_bench_options *options;
    struct kvist_bench_result *result;
    struct kvist_client *client;
    struct kvist_pool *pool;
    uint64_t window_blocks;
    uint64_t window_bytes; /* of either private buffer: a multiple of the block */
    int fds[2];
    void *windows[2];  /* what is put comes from the first, what is got goes to the second */
    uint64_t cursor;   /* next block in the windows */
    uint64_t key_next; /* keys are numbers: below it all were put */
    uint64_t key_salt;
    uint64_t recent; /* how many of the latest keys gets ask for */
    uint64_t random;
};

/* --- Keys and memory ----------------------------------------------------------------------- */

static void make_key(const struct bench *bench, uint64_t number, uint8_t key_out[KVIST_KEY_BYTES])
{
    uint64_t words[4] = {(number ^ bench->key_salt) * 0x9e3779b97f4a7c15ULL,
                         (number + bench->key_salt) * 0xbf58476d1ce4e5b9ULL,
                         number,
                         bench->key_salt};
    memcpy(key_out, words, KVIST_KEY_BYTES);
}

static uint64_t next_random(struct bench *bench)
{
    bench->random ^= bench->random << 13;
    bench->random ^= bench->random >> 7;
    bench->random ^= bench->random << 17;
    return bench->random;
}

static void *window_block(struct bench *bench, unsigned window)
{
    return (char *)bench->windows[window] +
           bench->cursor % bench->window_blocks * bench->options->block_bytes;
}

static enum kvist_status make_windows(struct bench *bench, struct kvist_error *err)
{
    uint64_t bytes = bench->options->arena_bytes / 2;
    bytes = bytes < WINDOW_BYTES_MIN ? WINDOW_BYTES_MIN : bytes;
    bytes = bytes > WINDOW_BYTES_MAX ? WINDOW_BYTES_MAX : bytes;
    uint64_t blocks = bytes / bench->options->block_bytes;
    bench->window_blocks = blocks < 2 ? 2 : blocks;
    bench->window_bytes = bench->window_blocks * bench->options->block_bytes;
    for (unsigned window = 0; window < 2; window++) {
        enum kvist_status status =
            kvist_memfd_create("bench", bench->window_bytes, &bench->fds[window], err);
        if (status == KVIST_OK) {
            status = kvist_memfd_map(bench->fds[window],
                                     bench->window_bytes,
                                     KVIST_MEMFD_WRITE,
                                     &bench->windows[window],
                                     err);
        }
        if (status != KVIST_OK) {
            return status;
        }
        memset(bench->windows[window], (int)window + 1, bench->window_bytes);
    }
    return KVIST_OK;
}

/* --- Connecting ---------------------------------------------------------------------------- */

static enum kvist_status open_engine(struct bench *bench, struct kvist_error *err)
{
    struct kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
    options.socket_path = bench->options->socket_path;
    options.role = KVIST_ROLE_ENGINE;
    options.name = "kvist bench";
    if (getrandom(options.session_id, sizeof(options.session_id), 0) !=
        (ssize_t)sizeof(options.session_id)) {
        return kvist_error_set(err, KVIST_SYSTEM, 0, "getrandom", "no random numbers");
    }
    memcpy(&bench->key_salt, options.session_id, sizeof(bench->key_salt));
    bench->random = bench->key_salt | 1;
    const struct kvist_pool_field fields[] = {
        {"engine", "kvist bench", 11},
        {"session", options.session_id, sizeof(options.session_id)},
    };
    struct kvist_pool_options pool = KVIST_POOL_OPTIONS_INIT;
    pool.fields = fields;
    pool.field_count = 2;
    pool.slot_bytes = bench->options->block_bytes;
    enum kvist_status status = kvist_client_create(&options, &bench->client, err);
    if (status == KVIST_OK) {
        status = kvist_client_thread_start(bench->client, err);
    }
    if (status == KVIST_OK) {
        status = kvist_client_wait(bench->client, WAIT_US / 6, err);
    }
    if (status == KVIST_OK) {
        status = kvist_pool_open(bench->client, &pool, &bench->pool, err);
    }
    if (status == KVIST_OK) {
        status = kvist_pool_wait(bench->pool, WAIT_US, err);
    }
    return status;
}

static void close_bench(struct bench *bench)
{
    kvist_client_destroy(&bench->client);
    for (unsigned window = 0; window < 2; window++) {
        kvist_memfd_unmap(&bench->windows[window], bench->window_bytes);
        if (bench->fds[window] >= 0) {
            (void)close(bench->fds[window]);
        }
    }
}

/* --- Put ----------------------------------------------------------------------------------- */

static enum kvist_status gone(struct kvist_error *err)
{
    return kvist_error_set(
        err, KVIST_UNAVAILABLE, 0, "kvistd", "kvistd stopped, or stopped granting, under way");
}

/* Take up to `want` slots; waits while the grant is used up. */
static enum kvist_status take_some(struct bench *bench,
                                   size_t want,
                                   struct kvist_take *takes,
                                   size_t *count_out,
                                   struct kvist_error *err)
{
    uint64_t start_us = kvist_clock_now_us();
    for (;;) {
        enum kvist_status status = kvist_pool_take(bench->pool, want, takes, count_out);
        uint64_t waited_us = kvist_clock_now_us() - start_us;
        if (status != KVIST_OK || *count_out > 0) {
            bench->result->take_waits_us += waited_us > 1 ? waited_us : 0;
            return status;
        }
        if (waited_us > TAKE_WAIT_US || *bench->options->stop) {
            return gone(err);
        }
        struct timespec pause = {.tv_nsec = 20000};
        (void)nanosleep(&pause, NULL);
    }
}

static void fill(struct bench *bench, const struct kvist_take *take, uint64_t number)
{
    void *slot = kvist_pool_slot_address(bench->pool, take->instance, take->slot);
    if (slot != NULL) {
        memcpy(slot, window_block(bench, 0), bench->options->block_bytes);
        memcpy(slot, &number, sizeof(number)); /* what a get checks */
        /* A mark of a grant that is gone is refused at the commit. */
        enum kvist_status status = kvist_pool_mark(bench->pool, take);
        (void)status;
    }
    bench->cursor++;
}

static enum kvist_status put_batch(struct bench *bench, size_t want, struct kvist_error *err)
{
    struct kvist_take takes[BATCH];
    uint8_t keys[BATCH][KVIST_KEY_BYTES];
    uint8_t parent[KVIST_KEY_BYTES];
    size_t count = 0;
    enum kvist_status status = take_some(bench, want, takes, &count, err);
    if (status != KVIST_OK) {
        return status;
    }
    uint64_t instance = takes[0].instance;
    status = kvist_pool_pin(bench->pool, instance);
    if (status != KVIST_OK) {
        return gone(err);
    }
    for (size_t index = 0; index < count; index++) {
        make_key(bench, bench->key_next + index, keys[index]);
        fill(bench, &takes[index], bench->key_next + index);
    }
    kvist_pool_unpin(bench->pool, instance);
    make_key(bench, bench->key_next - 1, parent);
    bench->key_next += count;
    bench->result->blocks_put += count;
    status =
        kvist_pool_commit(bench->pool, takes, keys[0], count, parent, bench->options->block_bytes);
    return status == KVIST_OK ? KVIST_OK : gone(err);
}

/* Commits are handled in order: when the last key is found, all were there. */
static enum kvist_status wait_last(struct bench *bench, struct kvist_error *err)
{
    uint8_t key[KVIST_KEY_BYTES];
    uint8_t probe = KVIST_PROBE_MISS;
    uint64_t deadline_us = kvist_clock_now_us() + TAKE_WAIT_US;
    make_key(bench, bench->key_next - 1, key);
    while (kvist_clock_now_us() < deadline_us && !*bench->options->stop) {
        if (kvist_pool_probe(bench->pool, key, 1, &probe) == KVIST_OK &&
            probe == KVIST_PROBE_READY) {
            return KVIST_OK;
        }
        struct timespec pause = {.tv_nsec = 20000};
        (void)nanosleep(&pause, NULL);
    }
    return gone(err);
}

static double gigabytes(uint64_t blocks, uint64_t block_bytes, uint64_t ns)
{
    return ns > 0 ? (double)blocks * (double)block_bytes / (double)ns : 0;
}

static enum kvist_status measure_put(struct bench *bench, uint32_t run, struct kvist_error *err)
{
    uint64_t start_ns = kvist_clock_now_ns();
    uint64_t budget_ns = (uint64_t)(bench->options->seconds * 1e9);
    uint64_t before = bench->key_next;
    enum kvist_status status = KVIST_OK;
    while (status == KVIST_OK && kvist_clock_now_ns() - start_ns < budget_ns) {
        status = put_batch(bench, BATCH, err);
    }
    if (status == KVIST_OK) {
        status = wait_last(bench, err);
    }
    bench->result->figures[KVIST_BENCH_PUT][run] = gigabytes(
        bench->key_next - before, bench->options->block_bytes, kvist_clock_now_ns() - start_ns);
    return status;
}

/* --- Get ----------------------------------------------------------------------------------- */

/* Get a run of keys that follow each other. @return blocks */
static size_t get_batch(struct bench *bench, uint64_t first, size_t want)
{
    uint8_t keys[BATCH][KVIST_KEY_BYTES];
    struct kvist_lease leases[BATCH];
    enum kvist_probe stop = KVIST_PROBE_MISS;
    size_t count = 0;
    for (size_t index = 0; index < want; index++) {
        make_key(bench, first + index, keys[index]);
    }
    if (kvist_pool_acquire(bench->pool, keys[0], want, leases, &count, &stop) != KVIST_OK ||
        count == 0) {
        return 0;
    }
    size_t got = 0;
    if (kvist_pool_pin(bench->pool, leases[0].instance) == KVIST_OK) {
        for (; got < count; got++) {
            const void *slot =
                kvist_pool_slot_address(bench->pool, leases[got].instance, leases[got].slot);
            uint64_t number = first + got;
            void *target = window_block(bench, 1);
            if (slot == NULL) {
                break;
            }
            memcpy(target, slot, bench->options->block_bytes);
            bench->result->wrong_blocks += memcmp(target, &number, sizeof(number)) != 0;
            bench->cursor++;
        }
        kvist_pool_unpin(bench->pool, leases[0].instance);
    }
    kvist_pool_release(bench->pool, leases, count);
    return got;
}

static enum kvist_status measure_get(struct bench *bench, uint32_t run, struct kvist_error *err)
{
    uint64_t start_ns = kvist_clock_now_ns();
    uint64_t budget_ns = (uint64_t)(bench->options->seconds * 1e9);
    uint64_t got = 0;
    uint64_t at = 0;
    size_t want = bench->recent < BATCH ? (size_t)bench->recent : BATCH;
    while (kvist_clock_now_ns() - start_ns < budget_ns) {
        at = at + want > bench->recent ? 0 : at;
        size_t count = get_batch(bench, bench->key_next - bench->recent + at, want);
        bench->result->get_misses += want - count;
        got += count;
        at += want;
    }
    bench->result->blocks_got += got;
    bench->result->figures[KVIST_BENCH_GET][run] =
        gigabytes(got, bench->options->block_bytes, kvist_clock_now_ns() - start_ns);
    return got > 0 ? KVIST_OK : gone(err);
}

/* --- Memcpy, probe, lease ------------------------------------------------------------------ */

static void measure_memcpy(struct bench *bench, uint32_t run)
{
    uint64_t start_ns = kvist_clock_now_ns();
    uint64_t budget_ns = (uint64_t)(bench->options->seconds * 1e9);
    uint64_t copied = 0;
    while (kvist_clock_now_ns() - start_ns < budget_ns) {
        for (unsigned index = 0; index < BATCH; index++) {
            memcpy(window_block(bench, 1), window_block(bench, 0), bench->options->block_bytes);
            bench->cursor++;
        }
        copied += BATCH;
    }
    bench->result->figures[KVIST_BENCH_MEMCPY][run] =
        gigabytes(copied, bench->options->block_bytes, kvist_clock_now_ns() - start_ns);
}

static double probe_ns(struct bench *bench, uint64_t first, uint64_t count)
{
    static uint8_t keys[PROBE_KEYS][KVIST_KEY_BYTES];
    uint8_t probes[PROBE_KEYS];
    uint64_t budget_ns = (uint64_t)(bench->options->seconds * 1e9 / 4);
    uint64_t spent_ns = 0;
    uint64_t probed = 0;
    while (spent_ns < budget_ns) {
        for (unsigned index = 0; index < PROBE_KEYS; index++) {
            make_key(bench, first + next_random(bench) % count, keys[index]);
        }
        uint64_t start_ns = kvist_clock_now_ns();
        if (kvist_pool_probe(bench->pool, keys[0], PROBE_KEYS, probes) != KVIST_OK) {
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

static void measure_lease(struct bench *bench, uint32_t run)
{
    static uint64_t samples[SAMPLES_MAX]; /* 512 KiB; one thread */
    uint64_t budget_ns = (uint64_t)(bench->options->seconds * 1e9 / 4);
    uint64_t spent_ns = 0;
    uint32_t sample_count = 0;
    while (spent_ns < budget_ns && sample_count < SAMPLES_MAX) {
        uint8_t key[KVIST_KEY_BYTES];
        struct kvist_lease lease;
        enum kvist_probe stop = KVIST_PROBE_MISS;
        size_t count = 0;
        make_key(bench, bench->key_next - bench->recent + next_random(bench) % bench->recent, key);
        uint64_t start_ns = kvist_clock_now_ns();
        enum kvist_status status = kvist_pool_acquire(bench->pool, key, 1, &lease, &count, &stop);
        if (status == KVIST_OK) {
            kvist_pool_release(bench->pool, &lease, count);
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
        bench->result->figures[KVIST_BENCH_LEASE_NS][run] = (double)samples[middle];
        bench->result->figures[KVIST_BENCH_LEASE_P99_NS][run] = (double)samples[high];
    }
}

/* --- All ----------------------------------------------------------------------------------- */

static enum kvist_status measure(struct bench *bench, uint32_t run, struct kvist_error *err)
{
    double(*figures)[KVIST_BENCH_RUNS_MAX] = bench->result->figures;
    measure_memcpy(bench, run);
    enum kvist_status status = measure_put(bench, run, err);
    if (status == KVIST_OK) {
        status = measure_get(bench, run, err);
    }
    if (status == KVIST_OK) {
        double memcpy_speed = figures[KVIST_BENCH_MEMCPY][run];
        figures[KVIST_BENCH_PUT_RATIO][run] = figures[KVIST_BENCH_PUT][run] / memcpy_speed;
        figures[KVIST_BENCH_GET_RATIO][run] = figures[KVIST_BENCH_GET][run] / memcpy_speed;
        figures[KVIST_BENCH_PROBE_NS][run] =
            probe_ns(bench, bench->key_next - bench->recent, bench->recent);
        figures[KVIST_BENCH_PROBE_MISS_NS][run] =
            probe_ns(bench, bench->key_next + (1ULL << 40), 1ULL << 40);
        measure_lease(bench, run);
    }
    return status;
}

/* Put once around the arena, so that every put that is measured evicts. */
static enum kvist_status fill_arena(struct bench *bench, struct kvist_error *err)
{
    uint64_t blocks = bench->options->arena_bytes / bench->options->block_bytes;
    enum kvist_status status = KVIST_OK;
    bench->recent = blocks / 2 > 0 ? blocks / 2 : 1;
    while (status == KVIST_OK && bench->key_next <= blocks + blocks / 4) {
        status = put_batch(bench, BATCH, err);
    }
    return status == KVIST_OK ? wait_last(bench, err) : status;
}

enum kvist_status kvist_bench_run(const struct kvist_bench_options *options,
                                  struct kvist_bench_result *result_out,
                                  struct kvist_error *err)
{
    struct bench bench = {
        .options = options,
        .result = result_out,
        .fds = {-1, -1},
        .key_next = 1,
    };
    memset(result_out, 0, sizeof(*result_out));
    result_out->block_bytes = options->block_bytes;
    enum kvist_status status = make_windows(&bench, err);
    if (status == KVIST_OK) {
        status = open_engine(&bench, err);
    }
    if (status == KVIST_OK) {
        status = fill_arena(&bench, err);
    }
    for (uint32_t run = 0; status == KVIST_OK && run < options->run_count; run++) {
        status = measure(&bench, run, err);
    }
    close_bench(&bench);
    return status;
}
