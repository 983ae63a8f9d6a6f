/*
 * The caller's thread: every call of the data path, a million times, while the daemon is idle,
 * busy, stopped and killed. A call that was preempted (an involuntary context switch) says nothing
 * of the library and is counted apart; one that waited (a voluntary switch) is counted too.
 */
#include "proto/base/clock.h"
#include "tests/bench/rows.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#define WINDOW_BYTES (1ULL << 20)
#define KEYS         16U
#define TAKES        4U
#define BUSY_BYTES   (64U << 10)
#define BUSY_MEMBERS 2U

struct watch {
    uint64_t calls;
    uint64_t max_ns; /* of calls that were not preempted */
    const char *max_name;
    uint64_t preempted;
    uint64_t preempted_max_ns;
    uint64_t waits;
    uint64_t start_ns;
    struct rusage start;
};

static void watch_begin(struct watch *watch)
{
    (void)getrusage(RUSAGE_THREAD, &watch->start);
    watch->start_ns = kvist_clock_now_ns();
}

static void watch_end(struct watch *watch, const char *name)
{
    uint64_t ns = kvist_clock_now_ns() - watch->start_ns;
    struct rusage end;
    (void)getrusage(RUSAGE_THREAD, &end);
    watch->calls++;
    watch->waits += (uint64_t)(end.ru_nvcsw - watch->start.ru_nvcsw);
    if (end.ru_nivcsw != watch->start.ru_nivcsw) {
        watch->preempted++;
        watch->preempted_max_ns = ns > watch->preempted_max_ns ? ns : watch->preempted_max_ns;
    } else if (ns > watch->max_ns) {
        watch->max_ns = ns;
        watch->max_name = name;
    }
}

/* What a call answers is another row's matter: with the daemon gone, most say so. */
#define WATCH(watch, name, call)                                                                   \
    do {                                                                                           \
        watch_begin(watch);                                                                        \
        call;                                                                                      \
        watch_end(watch, name);                                                                    \
    } while (0)

static void read_turn(struct kvist_bench_engine *engine, struct watch *watch)
{
    uint8_t keys[KEYS][KVIST_KEY_BYTES];
    uint8_t probes[KEYS];
    struct kvist_lease leases[KEYS];
    enum kvist_probe stop = KVIST_PROBE_MISS;
    enum kvist_status status = KVIST_OK;
    size_t count = 0;
    void *slot = NULL;
    uint64_t first =
        engine->key_next - engine->recent + kvist_bench_random(engine) % (engine->recent - KEYS);
    for (uint32_t index = 0; index < KEYS; index++) {
        kvist_bench_key(engine, first + index, keys[index]);
    }
    WATCH(watch, "probe", status = kvist_pool_probe(engine->pool, keys[0], KEYS, probes));
    WATCH(watch,
          "acquire",
          status = kvist_pool_acquire(engine->pool, keys[0], KEYS, leases, &count, &stop));
    if (count > 0) {
        WATCH(watch, "pin", status = kvist_pool_pin(engine->pool, leases[0].instance));
        if (status == KVIST_OK) {
            WATCH(watch,
                  "slot_address",
                  slot = kvist_pool_slot_address(engine->pool, leases[0].instance, leases[0].slot));
            WATCH(watch, "unpin", kvist_pool_unpin(engine->pool, leases[0].instance));
        }
        WATCH(watch, "release", kvist_pool_release(engine->pool, leases, count));
    }
    (void)slot;
    WATCH(watch, "touch", kvist_pool_touch(engine->pool, keys[0], KEYS));
    kvist_bench_key(engine, (1ULL << 50) + first, keys[0]);
    WATCH(watch, "prefetch", status = kvist_pool_prefetch(engine->pool, keys[0], 1));
}

static void write_turn(struct kvist_bench_engine *engine, struct watch *watch)
{
    struct kvist_take takes[TAKES];
    uint8_t keys[TAKES][KVIST_KEY_BYTES];
    enum kvist_status status = KVIST_OK;
    size_t count = 0;
    WATCH(watch, "take", status = kvist_pool_take(engine->pool, TAKES, takes, &count));
    if (status != KVIST_OK || count == 0) {
        return;
    }
    for (size_t index = 0; index < count; index++) {
        kvist_bench_key(engine, engine->key_next + index, keys[index]);
        WATCH(watch, "mark", status = kvist_pool_mark(engine->pool, &takes[index]));
    }
    if (count == TAKES) {
        WATCH(watch,
              "commit",
              status = kvist_pool_commit(
                  engine->pool, takes, keys[0], count, NULL, engine->setup.block_bytes));
        engine->key_next += count;
    } else {
        WATCH(watch, "untake", kvist_pool_untake(engine->pool, takes, count));
    }
}

static void
watch_run(const struct rows_options *options, struct kvist_bench_engine *engine, const char *state)
{
    struct watch watch = {.max_name = "none"};
    uint64_t calls = options->count / options->run_count;
    for (uint64_t turn = 0; watch.calls < calls; turn++) {
        read_turn(engine, &watch);
        if (turn % 4 == 0) {
            write_turn(engine, &watch);
        }
    }
    (void)printf("row=caller state=%s calls=%llu figure=%.1f call=%s preempted=%llu "
                 "preempted_max_us=%.1f waits=%llu\n",
                 state,
                 (unsigned long long)watch.calls,
                 (double)watch.max_ns / 1e3,
                 watch.max_name,
                 (unsigned long long)watch.preempted,
                 (double)watch.preempted_max_ns / 1e3,
                 (unsigned long long)watch.waits);
    (void)fflush(stdout);
}

/* Keeps the daemon's loop at work when asked. */
static enum kvist_status
busy_member(struct rows_crew *crew, unsigned member, struct kvist_error *err)
{
    (void)member;
    struct kvist_bench_engine engine;
    struct kvist_bench_setup setup = rows_setup(crew->options, WINDOW_BYTES);
    setup.block_bytes = BUSY_BYTES;
    setup.salt = 0;
    enum kvist_status status = kvist_bench_engine_open(&setup, &engine, err);
    while (status == KVIST_OK && !crew->over) {
        if (crew->working) {
            status = kvist_bench_put(&engine, KVIST_BENCH_BATCH, err);
        } else {
            rows_pause_us(1000);
        }
    }
    kvist_bench_engine_close(&engine);
    return status;
}

static void run_states(const struct rows_options *options,
                       struct kvist_bench_engine *engine,
                       struct rows_crew *crew)
{
    pid_t daemon = (pid_t)options->daemon_pid;
    for (uint64_t run = 0; run < options->run_count; run++) {
        watch_run(options, engine, "idle");
        crew->working = true;
        watch_run(options, engine, "busy");
        crew->working = false;
        rows_pause_us(50000);
        (void)kill(daemon, SIGSTOP);
        watch_run(options, engine, "stopped");
        (void)kill(daemon, SIGCONT);
        rows_pause_us(200000);
    }
}

enum kvist_status rows_caller(const struct rows_options *options, struct kvist_error *err)
{
    struct kvist_bench_engine engine = {.fds = {-1, -1}};
    struct rows_crew *crew = rows_crew_create(options, BUSY_MEMBERS, 1);
    enum kvist_status status = crew != NULL && options->daemon_pid > 1
                                   ? KVIST_OK
                                   : kvist_error_set(err, KVIST_INVALID, 0, "pid", "no daemon");
    for (unsigned member = 0; status == KVIST_OK && member < BUSY_MEMBERS; member++) {
        status = rows_crew_start(crew, member, busy_member, err);
    }
    struct kvist_bench_setup setup = rows_setup(options, WINDOW_BYTES);
    if (status == KVIST_OK) {
        status = kvist_bench_engine_open(&setup, &engine, err);
    }
    if (status == KVIST_OK) {
        status = kvist_bench_fill_arena(&engine, options->arena_bytes / 4, err);
    }
    if (status == KVIST_OK) {
        run_states(options, &engine, crew);
        crew->over = true;
        status = rows_crew_wait(crew, err);
    }
    if (status == KVIST_OK) {
        (void)kill((pid_t)options->daemon_pid, SIGKILL);
        for (uint64_t run = 0; run < options->run_count; run++) {
            watch_run(options, &engine, "killed");
        }
    }
    kvist_bench_engine_close(&engine);
    rows_crew_destroy(&crew);
    return status;
}
