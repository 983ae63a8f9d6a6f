#include "client/tool/bench_engine.h"

#include "client/tool/request.h"
#include "proto/base/clock.h"
#include "proto/key/checksum.h"
#include "proto/shm/memfd.h"

#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define WAIT_US      60000000U /* for the daemon, before a benchmark gives up */
#define TAKE_WAIT_US 10000000U

/* --- Keys and memory ----------------------------------------------------------------------- */

void kvist_bench_key(const struct kvist_bench_engine *engine,
                     uint64_t number,
                     uint8_t key_out[KVIST_KEY_BYTES])
{
    uint64_t salt = engine->setup.salt;
    uint64_t words[4] = {(number ^ salt) * 0x9e3779b97f4a7c15ULL,
                         (number + salt) * 0xbf58476d1ce4e5b9ULL,
                         number,
                         salt};
    memcpy(key_out, words, KVIST_KEY_BYTES);
}

uint64_t kvist_bench_random(struct kvist_bench_engine *engine)
{
    engine->random ^= engine->random << 13;
    engine->random ^= engine->random >> 7;
    engine->random ^= engine->random << 17;
    return engine->random;
}

static void *window_block(const struct kvist_bench_engine *engine, unsigned window)
{
    return (char *)engine->windows[window] +
           engine->cursor % engine->window_blocks * engine->setup.block_bytes;
}

static enum kvist_status make_windows(struct kvist_bench_engine *engine, struct kvist_error *err)
{
    uint64_t blocks = engine->setup.window_bytes / engine->setup.block_bytes;
    engine->window_blocks = blocks < 2 ? 2 : blocks;
    engine->window_bytes = engine->window_blocks * engine->setup.block_bytes;
    for (unsigned window = 0; window < 2; window++) {
        enum kvist_status status =
            kvist_memfd_create("bench", engine->window_bytes, &engine->fds[window], err);
        if (status == KVIST_OK) {
            status = kvist_memfd_map(engine->fds[window],
                                     engine->window_bytes,
                                     KVIST_MEMFD_WRITE,
                                     &engine->windows[window],
                                     err);
        }
        if (status != KVIST_OK) {
            return status;
        }
        memset(engine->windows[window], (int)window + 1, engine->window_bytes);
    }
    return KVIST_OK;
}

/* --- Connecting ---------------------------------------------------------------------------- */

static enum kvist_status connect_pool(struct kvist_bench_engine *engine,
                                      const struct kvist_client_options *options,
                                      struct kvist_error *err)
{
    const struct kvist_pool_field fields[] = {
        {"engine", "kvist bench", 11},
        {"salt", &engine->setup.salt, sizeof(engine->setup.salt)},
    };
    struct kvist_pool_options pool = KVIST_POOL_OPTIONS_INIT;
    pool.fields = fields;
    pool.field_count = 2;
    pool.slot_bytes = engine->setup.block_bytes;
    pool.read_only = engine->setup.read_only;
    enum kvist_status status = kvist_client_create(options, &engine->client, err);
    if (status == KVIST_OK) {
        status = kvist_client_thread_start(engine->client, err);
    }
    if (status == KVIST_OK) {
        status = kvist_client_wait(engine->client, WAIT_US / 6, err);
    }
    if (status == KVIST_OK) {
        status = kvist_pool_open(engine->client, &pool, &engine->pool, err);
    }
    if (status == KVIST_OK) {
        status = kvist_pool_wait(engine->pool, WAIT_US, err);
    }
    return status;
}

enum kvist_status kvist_bench_engine_open(const struct kvist_bench_setup *setup,
                                          struct kvist_bench_engine *engine,
                                          struct kvist_error *err)
{
    *engine = (struct kvist_bench_engine){
        .setup = *setup,
        .fds = {-1, -1},
        .key_next = setup->key_first > 0 ? setup->key_first : 1,
    };
    struct kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
    options.socket_path = setup->socket_path;
    options.role = KVIST_ROLE_ENGINE;
    options.name = "kvist bench";
    if (getrandom(options.session_id, sizeof(options.session_id), 0) !=
        (ssize_t)sizeof(options.session_id)) {
        return kvist_error_set(err, KVIST_SYSTEM, 0, "getrandom", "no random numbers");
    }
    memcpy(&engine->random, options.session_id, sizeof(engine->random));
    engine->random |= 1;
    engine->setup.salt = setup->salt != 0 ? setup->salt : engine->random;
    enum kvist_status status = make_windows(engine, err);
    return status == KVIST_OK ? connect_pool(engine, &options, err) : status;
}

void kvist_bench_engine_close(struct kvist_bench_engine *engine)
{
    kvist_client_destroy(&engine->client);
    engine->pool = NULL;
    for (unsigned window = 0; window < 2; window++) {
        kvist_memfd_unmap(&engine->windows[window], engine->window_bytes);
        if (engine->fds[window] >= 0) {
            (void)close(engine->fds[window]);
            engine->fds[window] = -1;
        }
    }
}

uint64_t kvist_bench_metric(const char *socket_path, uint64_t timeout_us, const char *name)
{
    uint64_t value = 0;
    struct kvist_request *request = NULL;
    Kvist__Wire__Envelope *reply = NULL;
    Kvist__Wire__Stat stat;
    Kvist__Wire__Envelope envelope;
    kvist__wire__stat__init(&stat);
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_STAT;
    envelope.stat = &stat;
    if (kvist_request_open(socket_path, timeout_us, &request, NULL) == KVIST_OK &&
        kvist_request_call(
            request, &envelope, KVIST__WIRE__ENVELOPE__BODY_STAT_REPLY, timeout_us, &reply, NULL) ==
            KVIST_OK) {
        for (size_t index = 0; index < reply->stat_reply->n_metrics; index++) {
            const Kvist__Wire__Metric *metric = reply->stat_reply->metrics[index];
            if (strcmp(metric->name, name) == 0 && metric->value > 0) {
                value = (uint64_t)metric->value;
            }
        }
    }
    kvist_message_free(&reply);
    kvist_request_close(&request);
    return value;
}

/* --- Put ----------------------------------------------------------------------------------- */

static bool is_stopped(const struct kvist_bench_engine *engine)
{
    return engine->setup.stop != NULL && *engine->setup.stop;
}

static enum kvist_status gone(struct kvist_error *err)
{
    return kvist_error_set(err, KVIST_UNAVAILABLE, 0, "kvistd", "kvistd stopped under way");
}

/* It was waited for in vain, and may well be running. */
static enum kvist_status stuck(const char *what, struct kvist_error *err)
{
    return kvist_error_set(err,
                           KVIST_TIMED_OUT,
                           0,
                           "kvistd",
                           "%s for %u s: kvistd has stopped, or its arena is taken by others",
                           what,
                           TAKE_WAIT_US / 1000000);
}

/* Take up to `want` slots; waits while the grant is used up. */
static enum kvist_status take_some(struct kvist_bench_engine *engine,
                                   size_t want,
                                   struct kvist_take *takes,
                                   size_t *count_out,
                                   struct kvist_error *err)
{
    uint64_t start_us = kvist_clock_now_us();
    for (;;) {
        enum kvist_status status = kvist_pool_take(engine->pool, want, takes, count_out);
        uint64_t waited_us = kvist_clock_now_us() - start_us;
        if (status != KVIST_OK || *count_out > 0) {
            engine->take_waits_us += waited_us > 1 ? waited_us : 0;
            return status;
        }
        if (waited_us > TAKE_WAIT_US || is_stopped(engine)) {
            return stuck("there was no slot to put a block in", err);
        }
        struct timespec pause = {.tv_nsec = 20000};
        (void)nanosleep(&pause, NULL);
    }
}

static void fill(struct kvist_bench_engine *engine, const struct kvist_take *take, uint64_t number)
{
    void *slot = kvist_pool_slot_address(engine->pool, take->instance, take->slot);
    if (slot != NULL) {
        memcpy(slot, window_block(engine, 0), engine->setup.block_bytes);
        memcpy(slot, &number, sizeof(number)); /* what a get checks */
        /* A mark of a grant that is gone is refused at the commit. */
        enum kvist_status status = kvist_pool_mark(engine->pool, take);
        (void)status;
    }
    engine->cursor++;
}

enum kvist_status
kvist_bench_put(struct kvist_bench_engine *engine, size_t want, struct kvist_error *err)
{
    struct kvist_take takes[KVIST_BENCH_BATCH];
    uint8_t keys[KVIST_BENCH_BATCH][KVIST_KEY_BYTES];
    uint8_t parent[KVIST_KEY_BYTES];
    size_t count = 0;
    want = want < KVIST_BENCH_BATCH ? want : KVIST_BENCH_BATCH;
    enum kvist_status status = take_some(engine, want, takes, &count, err);
    if (status != KVIST_OK) {
        return status;
    }
    uint64_t instance = takes[0].instance;
    status = kvist_pool_pin(engine->pool, instance);
    if (status != KVIST_OK) {
        return gone(err);
    }
    for (size_t index = 0; index < count; index++) {
        kvist_bench_key(engine, engine->key_next + index, keys[index]);
        fill(engine, &takes[index], engine->key_next + index);
    }
    kvist_pool_unpin(engine->pool, instance);
    kvist_bench_key(engine, engine->key_next - 1, parent);
    engine->key_next += count;
    engine->blocks_put += count;
    status =
        kvist_pool_commit(engine->pool, takes, keys[0], count, parent, engine->setup.block_bytes);
    return status == KVIST_OK ? KVIST_OK : gone(err);
}

enum kvist_status kvist_bench_put_wait(struct kvist_bench_engine *engine, struct kvist_error *err)
{
    uint8_t key[KVIST_KEY_BYTES];
    uint8_t probe = KVIST_PROBE_MISS;
    uint64_t deadline_us = kvist_clock_now_us() + TAKE_WAIT_US;
    kvist_bench_key(engine, engine->key_next - 1, key);
    while (kvist_clock_now_us() < deadline_us && !is_stopped(engine)) {
        if (kvist_pool_probe(engine->pool, key, 1, &probe) == KVIST_OK &&
            probe == KVIST_PROBE_READY) {
            return KVIST_OK;
        }
        struct timespec pause = {.tv_nsec = 20000};
        (void)nanosleep(&pause, NULL);
    }
    return stuck("what was put could not be found", err);
}

enum kvist_status kvist_bench_fill_arena(struct kvist_bench_engine *engine,
                                         uint64_t arena_bytes,
                                         struct kvist_error *err)
{
    uint64_t blocks = arena_bytes / engine->setup.block_bytes;
    uint64_t end = engine->key_next + blocks + blocks / 4;
    enum kvist_status status = KVIST_OK;
    engine->recent = blocks / 2 > 0 ? blocks / 2 : 1;
    while (status == KVIST_OK && engine->key_next <= end) {
        status = kvist_bench_put(engine, KVIST_BENCH_BATCH, err);
    }
    return status == KVIST_OK ? kvist_bench_put_wait(engine, err) : status;
}

/* --- Get ----------------------------------------------------------------------------------- */

static void check_copy(struct kvist_bench_engine *engine,
                       const struct kvist_lease *lease,
                       uint64_t number,
                       const void *copy)
{
    engine->wrong_blocks += memcmp(copy, &number, sizeof(number)) != 0;
    if (engine->setup.verify) {
        uint8_t key[KVIST_KEY_BYTES];
        kvist_bench_key(engine, number, key);
        enum kvist_status status = kvist_pool_verify(
            engine->pool, key, lease->instance, lease->slot, copy, engine->setup.block_bytes);
        engine->wrong_blocks += status == KVIST_CORRUPT;
        engine->unverified_gets += status == KVIST_NOT_FOUND;
    }
}

size_t kvist_bench_get(struct kvist_bench_engine *engine, uint64_t first, size_t want)
{
    uint8_t keys[KVIST_BENCH_BATCH][KVIST_KEY_BYTES];
    struct kvist_lease leases[KVIST_BENCH_BATCH];
    enum kvist_probe stop = KVIST_PROBE_MISS;
    size_t count = 0;
    want = want < KVIST_BENCH_BATCH ? want : KVIST_BENCH_BATCH;
    for (size_t index = 0; index < want; index++) {
        kvist_bench_key(engine, first + index, keys[index]);
    }
    if (kvist_pool_acquire(engine->pool, keys[0], want, leases, &count, &stop) != KVIST_OK ||
        count == 0) {
        return 0;
    }
    size_t got = 0;
    if (kvist_pool_pin(engine->pool, leases[0].instance) == KVIST_OK) {
        for (; got < count; got++) {
            const void *slot =
                kvist_pool_slot_address(engine->pool, leases[got].instance, leases[got].slot);
            void *target = window_block(engine, 1);
            if (slot == NULL) {
                break;
            }
            memcpy(target, slot, engine->setup.block_bytes);
            check_copy(engine, &leases[got], first + got, target);
            engine->cursor++;
        }
        kvist_pool_unpin(engine->pool, leases[0].instance);
    }
    kvist_pool_release(engine->pool, leases, count);
    engine->blocks_got += got;
    return got;
}

/* --- For a time ---------------------------------------------------------------------------- */

struct stretch {
    uint64_t start_ns;
    uint64_t budget_ns;
};

static struct stretch begin(double seconds)
{
    return (struct stretch){kvist_clock_now_ns(), (uint64_t)(seconds * 1e9)};
}

static bool goes_on(const struct stretch *stretch)
{
    return kvist_clock_now_ns() - stretch->start_ns < stretch->budget_ns;
}

static double
gigabytes(const struct kvist_bench_engine *engine, const struct stretch *stretch, uint64_t blocks)
{
    uint64_t ns = kvist_clock_now_ns() - stretch->start_ns;
    return ns > 0 ? (double)blocks * (double)engine->setup.block_bytes / (double)ns : 0;
}

double kvist_bench_memcpy_for(struct kvist_bench_engine *engine, double seconds)
{
    struct stretch stretch = begin(seconds);
    uint64_t copied = 0;
    while (goes_on(&stretch)) {
        for (unsigned index = 0; index < KVIST_BENCH_BATCH; index++) {
            memcpy(window_block(engine, 1), window_block(engine, 0), engine->setup.block_bytes);
            engine->cursor++;
        }
        copied += KVIST_BENCH_BATCH;
    }
    return gigabytes(engine, &stretch, copied);
}

double kvist_bench_checksum_for(struct kvist_bench_engine *engine, double seconds)
{
    struct stretch stretch = begin(seconds);
    uint64_t copied = 0;
    uint64_t sum = 0;
    while (goes_on(&stretch)) {
        for (unsigned index = 0; index < KVIST_BENCH_BATCH; index++) {
            void *target = window_block(engine, 1);
            memcpy(target, window_block(engine, 0), engine->setup.block_bytes);
            sum ^= kvist_checksum(target, engine->setup.block_bytes, sum);
            engine->cursor++;
        }
        copied += KVIST_BENCH_BATCH;
    }
    engine->random ^= sum & ~1ULL; /* used, so that it is computed */
    return gigabytes(engine, &stretch, copied);
}

enum kvist_status kvist_bench_put_for(struct kvist_bench_engine *engine,
                                      double seconds,
                                      double *gbps_out,
                                      struct kvist_error *err)
{
    struct stretch stretch = begin(seconds);
    uint64_t before = engine->key_next;
    enum kvist_status status = KVIST_OK;
    while (status == KVIST_OK && goes_on(&stretch)) {
        status = kvist_bench_put(engine, KVIST_BENCH_BATCH, err);
    }
    if (status == KVIST_OK) {
        status = kvist_bench_put_wait(engine, err);
    }
    if (status == KVIST_OK) {
        *gbps_out = gigabytes(engine, &stretch, engine->key_next - before);
    }
    return status;
}

enum kvist_status kvist_bench_get_for(struct kvist_bench_engine *engine,
                                      double seconds,
                                      double *gbps_out,
                                      struct kvist_error *err)
{
    struct stretch stretch = begin(seconds);
    uint64_t got = 0;
    uint64_t at = 0;
    while (goes_on(&stretch)) {
        at = at < engine->recent ? at : 0;
        size_t left = (size_t)(engine->recent - at);
        size_t want = left < KVIST_BENCH_BATCH ? left : (size_t)KVIST_BENCH_BATCH;
        size_t count = kvist_bench_get(engine, engine->key_next - engine->recent + at, want);
        size_t step = count > 0 ? want : 1; /* a first one that is gone hides the others */
        engine->get_misses += step - count;
        got += count;
        at += step;
    }
    if (got == 0) {
        return kvist_error_set(
            err,
            KVIST_NOT_FOUND,
            0,
            "kvistd",
            "nothing that was put was there to be got: kvistd has stopped, or its "
            "arena is taken by others");
    }
    *gbps_out = gigabytes(engine, &stretch, got);
    return KVIST_OK;
}
