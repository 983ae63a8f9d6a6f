/* Rows about single calls: how long they take, and how soon others see what they did. */
#include "proto/base/clock.h"
#include "proto/shm/memfd.h"
#include "tests/bench/rows.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define WINDOW_BYTES (1ULL << 20)
#define KEYS_AT_ONCE 65536U
#define CHAIN_KEYS   512U
#define SAMPLES_MAX  65536U
#define ENTRY_BYTES  64U
#define FOUND_US_MAX 5000000U
#define WARM_BLOCKS                                                                                \
    4096U /* put at full speed, so that grants grow to what such an engine needs                   \
           */
#define MESSAGE_BYTES (256U << 10)

static enum kvist_status no_memory(struct kvist_error *err)
{
    return kvist_error_set(err, KVIST_NO_MEMORY, 0, "malloc", "no memory");
}

/* --- Filling ------------------------------------------------------------------------------- */

/* With an NVMe tier, put no faster than it writes: what it is too busy for is not written. */
static void wait_written(const struct rows_options *options, uint64_t put)
{
    uint64_t slots = options->arena_bytes / options->block_bytes;
    while (rows_metric(options, "nvme_present") != 0 && put > slots / 4 &&
           rows_metric(options, "nvme_writes_total") < put - slots / 4) {
        rows_pause_us(2000);
    }
}

/* Put `count` blocks, then hold them until told to go on. */
enum kvist_status rows_fill(const struct rows_options *options, struct kvist_error *err)
{
    struct kvist_bench_engine engine;
    struct kvist_bench_setup setup = rows_setup(options, WINDOW_BYTES);
    uint64_t start_us = kvist_clock_now_us();
    enum kvist_status status = kvist_bench_engine_open(&setup, &engine, err);
    uint64_t checked = 0;
    while (status == KVIST_OK && engine.blocks_put < options->count) {
        status = kvist_bench_put(&engine, KVIST_BENCH_BATCH, err);
        if (engine.blocks_put - checked >= 4096) {
            checked = engine.blocks_put;
            wait_written(options, checked);
        }
    }
    if (status == KVIST_OK) {
        status = kvist_bench_put_wait(&engine, err);
    }
    if (status == KVIST_OK) {
        (void)printf("row=fill blocks=%llu us=%llu\n",
                     (unsigned long long)engine.blocks_put,
                     (unsigned long long)(kvist_clock_now_us() - start_us));
        (void)rows_gate(options);
    }
    kvist_bench_engine_close(&engine);
    return status;
}

/* --- Probe --------------------------------------------------------------------------------- */

/* A cycle through random places of as much memory as the pool's index takes. */
struct maze {
    uint64_t *words;
    uint64_t entries;
    uint64_t bytes;
    int fd;
    uint64_t at;
};

static enum kvist_status make_maze(uint64_t blocks,
                                   struct kvist_bench_engine *engine,
                                   struct maze *maze,
                                   struct kvist_error *err)
{
    maze->entries = 1;
    while (maze->entries * 3 < blocks * 4) {
        maze->entries *= 2;
    }
    maze->bytes = maze->entries * ENTRY_BYTES;
    enum kvist_status status = kvist_memfd_create("bench", maze->bytes, &maze->fd, err);
    if (status == KVIST_OK) {
        void *map = NULL;
        status = kvist_memfd_map(maze->fd, maze->bytes, KVIST_MEMFD_WRITE, &map, err);
        maze->words = map;
    }
    if (status != KVIST_OK) {
        return status;
    }
    const uint64_t step = ENTRY_BYTES / sizeof(uint64_t);
    for (uint64_t index = 0; index < maze->entries; index++) {
        maze->words[index * step] = index;
    }
    for (uint64_t index = maze->entries - 1; index > 0; index--) { /* Sattolo: one cycle */
        uint64_t other = kvist_bench_random(engine) % index;
        uint64_t held = maze->words[index * step];
        maze->words[index * step] = maze->words[other * step];
        maze->words[other * step] = held;
    }
    return KVIST_OK;
}

static double maze_ns(struct maze *maze, uint64_t reads)
{
    uint64_t start_ns = kvist_clock_now_ns();
    uint64_t at = maze->at;
    for (uint64_t read = 0; read < reads; read++) {
        at = maze->words[at * (ENTRY_BYTES / sizeof(uint64_t))];
    }
    maze->at = at;
    return (double)(kvist_clock_now_ns() - start_ns) / (double)reads;
}

/* One key a call; which key comes next depends on what the last call found. */
static double probe_ns(struct kvist_bench_engine *engine,
                       const uint8_t (*keys)[KVIST_KEY_BYTES],
                       uint64_t *found_out)
{
    uint64_t found = 0;
    uint8_t probe = KVIST_PROBE_MISS;
    uint64_t start_ns = kvist_clock_now_ns();
    for (uint32_t index = 0; index < KEYS_AT_ONCE; index++) {
        uint32_t next = index ^ (probe == KVIST_PROBE_NVME ? 1U : 0U);
        if (kvist_pool_probe(engine->pool, keys[next], 1, &probe) != KVIST_OK) {
            return 0;
        }
        found += probe != KVIST_PROBE_MISS;
    }
    *found_out = found;
    return (double)(kvist_clock_now_ns() - start_ns) / KEYS_AT_ONCE;
}

static void probe_run(const struct rows_options *options,
                      struct kvist_bench_engine *engine,
                      struct maze *maze,
                      uint8_t (*keys)[KVIST_KEY_BYTES])
{
    uint64_t found = 0;
    uint64_t not_found = 0;
    for (uint32_t index = 0; index < KEYS_AT_ONCE; index++) {
        kvist_bench_key(engine, 1 + kvist_bench_random(engine) % options->count, keys[index]);
    }
    double limit = maze_ns(maze, KEYS_AT_ONCE);
    double hit = probe_ns(engine, (const uint8_t(*)[KVIST_KEY_BYTES])keys, &found);
    for (uint32_t index = 0; index < KEYS_AT_ONCE; index++) {
        kvist_bench_key(engine, (1ULL << 50) + (kvist_bench_random(engine) >> 16), keys[index]);
    }
    limit = (limit + maze_ns(maze, KEYS_AT_ONCE)) / 2;
    double miss = probe_ns(engine, (const uint8_t(*)[KVIST_KEY_BYTES])keys, &not_found);
    (void)printf("row=probe_hit limit=%.1f figure=%.1f found=%.3f\n",
                 limit,
                 hit,
                 (double)found / KEYS_AT_ONCE);
    (void)printf("row=probe_miss limit=%.1f figure=%.1f found=%.3f\n",
                 limit,
                 miss,
                 (double)not_found / KEYS_AT_ONCE);
}

enum kvist_status rows_probe(const struct rows_options *options, struct kvist_error *err)
{
    struct kvist_bench_engine engine;
    struct maze maze = {.fd = -1};
    struct kvist_bench_setup setup = rows_setup(options, WINDOW_BYTES);
    setup.read_only = true;
    uint8_t(*keys)[KVIST_KEY_BYTES] = calloc(KEYS_AT_ONCE, KVIST_KEY_BYTES);
    enum kvist_status status = kvist_bench_engine_open(&setup, &engine, err);
    if (status == KVIST_OK) {
        status = keys != NULL ? make_maze(options->count, &engine, &maze, err) : no_memory(err);
    }
    for (uint64_t run = 0; status == KVIST_OK && run < options->run_count; run++) {
        probe_run(options, &engine, &maze, keys);
    }
    void *map = maze.words;
    kvist_memfd_unmap(&map, maze.bytes);
    if (maze.fd >= 0) {
        (void)close(maze.fd);
    }
    free(keys);
    kvist_bench_engine_close(&engine);
    return status;
}

/* --- Chain --------------------------------------------------------------------------------- */

/* Probe, lease and release one chain. @return ns; 0: not all of it was there */
static uint64_t chain_ns(struct kvist_bench_engine *engine, uint64_t first)
{
    static uint8_t keys[CHAIN_KEYS][KVIST_KEY_BYTES];
    static struct kvist_lease leases[CHAIN_KEYS];
    static uint8_t probes[CHAIN_KEYS];
    enum kvist_probe stop = KVIST_PROBE_MISS;
    size_t count = 0;
    for (uint32_t index = 0; index < CHAIN_KEYS; index++) {
        kvist_bench_key(engine, first + index, keys[index]);
    }
    uint64_t start_ns = kvist_clock_now_ns();
    enum kvist_status status = kvist_pool_probe(engine->pool, keys[0], CHAIN_KEYS, probes);
    if (status == KVIST_OK) {
        status = kvist_pool_acquire(engine->pool, keys[0], CHAIN_KEYS, leases, &count, &stop);
    }
    kvist_pool_release(engine->pool, leases, count);
    uint64_t ns = kvist_clock_now_ns() - start_ns;
    return status == KVIST_OK && count == CHAIN_KEYS ? ns : 0;
}

enum kvist_status rows_chain(const struct rows_options *options, struct kvist_error *err)
{
    static uint64_t samples[SAMPLES_MAX];
    struct kvist_bench_engine engine;
    struct kvist_bench_setup setup = rows_setup(options, WINDOW_BYTES);
    enum kvist_status status = kvist_bench_engine_open(&setup, &engine, err);
    for (uint64_t run = 0; status == KVIST_OK && run < options->run_count; run++) {
        uint64_t end_ns = kvist_clock_now_ns() + options->seconds_ms * 1000000;
        size_t count = 0;
        while (kvist_clock_now_ns() < end_ns && count < SAMPLES_MAX) {
            uint64_t first = 1 + kvist_bench_random(&engine) % (options->count - CHAIN_KEYS);
            samples[count] = chain_ns(&engine, first);
            count += samples[count] != 0;
        }
        uint64_t middle = bench_quantile(samples, count, 0.5);
        if (count == 0) {
            status = kvist_error_set(err, KVIST_NOT_FOUND, 0, "chain", "no chain was whole");
        } else {
            (void)printf("row=chain_c figure=%.1f p99=%.1f\n",
                         (double)middle / 1e3,
                         (double)bench_quantile(samples, count, 0.99) / 1e3);
        }
    }
    kvist_bench_engine_close(&engine);
    return status;
}

/* --- Found --------------------------------------------------------------------------------- */

static enum kvist_status
find_member(struct rows_crew *crew, unsigned member, struct kvist_error *err)
{
    (void)member;
    struct kvist_bench_engine engine;
    struct kvist_bench_setup setup = rows_setup(crew->options, WINDOW_BYTES);
    setup.read_only = true;
    enum kvist_status status = kvist_bench_engine_open(&setup, &engine, err);
    crew->ready = true;
    while (status == KVIST_OK && !crew->over) {
        uint8_t key[KVIST_KEY_BYTES];
        uint8_t probe = KVIST_PROBE_MISS;
        uint64_t number = crew->asked;
        if (number == 0 || crew->found_ns != 0) {
            rows_pause_us(50);
            continue;
        }
        kvist_bench_key(&engine, number, key);
        while (probe != KVIST_PROBE_READY && !crew->over) {
            status = kvist_pool_probe(engine.pool, key, 1, &probe);
        }
        crew->found_ns = kvist_clock_now_ns();
    }
    kvist_bench_engine_close(&engine);
    return status;
}

static enum kvist_status take_all(struct kvist_bench_engine *engine,
                                  struct kvist_take *takes,
                                  size_t count,
                                  struct kvist_error *err)
{
    uint64_t end_us = kvist_clock_now_us() + FOUND_US_MAX;
    while (kvist_clock_now_us() < end_us) {
        size_t taken = 0;
        for (unsigned tries = 0; taken < count && tries < 20; tries++) {
            size_t more = 0;
            enum kvist_status status =
                kvist_pool_take(engine->pool, count - taken, takes + taken, &more);
            if (status != KVIST_OK) {
                return status;
            }
            taken += more;
            if (taken < count) {
                rows_pause_us(200);
            }
        }
        if (taken == count) {
            return KVIST_OK;
        }
        kvist_pool_untake(engine->pool, takes, taken);
        uint64_t end = engine->blocks_put + WARM_BLOCKS;
        while (engine->blocks_put < end) {
            enum kvist_status status = kvist_bench_put(engine, KVIST_BENCH_BATCH, err);
            if (status != KVIST_OK) {
                return status;
            }
        }
    }
    return kvist_error_set(err, KVIST_TIMED_OUT, 0, "found", "not enough slots granted");
}

/* Take, mark and commit `count` blocks at once; when the call was made. */
static enum kvist_status commit_many(struct kvist_bench_engine *engine,
                                     size_t count,
                                     struct rows_crew *crew,
                                     uint64_t *posted_ns_out,
                                     struct kvist_error *err)
{
    static struct kvist_take takes[CHAIN_KEYS];
    static uint8_t keys[CHAIN_KEYS][KVIST_KEY_BYTES];
    enum kvist_status status = take_all(engine, takes, count, err);
    if (status != KVIST_OK) {
        return status;
    }
    for (size_t index = 0; index < count; index++) {
        status = kvist_pool_mark(engine->pool, &takes[index]);
        if (status != KVIST_OK) {
            return status;
        }
        kvist_bench_key(engine, engine->key_next++, keys[index]);
    }
    crew->found_ns = 0;
    crew->asked = engine->key_next - 1;
    rows_pause_us(300); /* the finder looks by now */
    *posted_ns_out = kvist_clock_now_ns();
    return kvist_pool_commit(engine->pool, takes, keys[0], count, NULL, engine->setup.block_bytes);
}

static enum kvist_status found_once(struct kvist_bench_engine *engine,
                                    size_t count,
                                    struct rows_crew *crew,
                                    uint64_t *ns_out,
                                    struct kvist_error *err)
{
    uint64_t posted_ns = 0;
    enum kvist_status status = commit_many(engine, count, crew, &posted_ns, err);
    uint64_t end_ns = posted_ns + FOUND_US_MAX * 1000ULL;
    while (status == KVIST_OK && crew->found_ns == 0) {
        rows_pause_us(50);
        if (kvist_clock_now_ns() > end_ns) {
            status = kvist_error_set(err, KVIST_TIMED_OUT, 0, "found", "a commit was not found");
        }
    }
    *ns_out = crew->found_ns - posted_ns;
    crew->asked = 0;
    return status;
}

/* Whoever reads from a socket and writes the same back. */
static enum kvist_status echo_all(int fd)
{
    static char bytes[MESSAGE_BYTES];
    for (;;) {
        ssize_t length = read(fd, bytes, sizeof(bytes));
        if (length <= 0) {
            return KVIST_OK;
        }
        for (ssize_t sent = 0; sent < length;) {
            ssize_t more = write(fd, bytes + sent, (size_t)(length - sent));
            if (more <= 0) {
                return KVIST_OK;
            }
            sent += more;
        }
    }
}

static pid_t start_echo(int *fd_out)
{
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
        return -1;
    }
    pid_t pid = fork();
    if (pid == 0) {
        (void)close(fds[0]);
        (void)echo_all(fds[1]);
        _exit(0);
    }
    (void)close(fds[1]);
    *fd_out = fds[0];
    return pid;
}

static uint64_t echo_ns(int fd, size_t bytes)
{
    static char buffer[MESSAGE_BYTES];
    uint64_t start_ns = kvist_clock_now_ns();
    if (write(fd, buffer, bytes) != (ssize_t)bytes) {
        return 0;
    }
    for (size_t got = 0; got < bytes;) {
        ssize_t more = read(fd, buffer, bytes - got);
        if (more <= 0) {
            return 0;
        }
        got += (size_t)more;
    }
    return kvist_clock_now_ns() - start_ns;
}

/* What one commit takes on the socket: the least of a few, for some have to put first. */
static enum kvist_status message_bytes(const struct rows_options *options,
                                       struct kvist_bench_engine *engine,
                                       size_t count,
                                       struct rows_crew *crew,
                                       size_t *bytes_out,
                                       struct kvist_error *err)
{
    uint64_t least = MESSAGE_BYTES + 1;
    enum kvist_status status = KVIST_OK;
    for (unsigned tries = 0; status == KVIST_OK && tries < 4; tries++) {
        uint64_t ns = 0;
        uint64_t first = rows_metric(options, "message_bytes_total");
        uint64_t before = rows_metric(options, "message_bytes_total");
        status = found_once(engine, count, crew, &ns, err);
        uint64_t after = rows_metric(options, "message_bytes_total");
        uint64_t bytes = after - before - (before - first); /* without the question's own */
        least = bytes < least ? bytes : least;
    }
    if (status == KVIST_OK && (least == 0 || least > MESSAGE_BYTES)) {
        status = kvist_error_set(err, KVIST_BUG, 0, "found", "a commit was not counted");
    }
    *bytes_out = (size_t)least;
    return status;
}

static enum kvist_status found_run(const struct rows_options *options,
                                   struct kvist_bench_engine *engine,
                                   size_t count,
                                   struct rows_crew *crew,
                                   int echo_fd,
                                   struct kvist_error *err)
{
    static uint64_t found[SAMPLES_MAX];
    static uint64_t echoed[SAMPLES_MAX];
    size_t bytes = 0;
    enum kvist_status status = message_bytes(options, engine, count, crew, &bytes, err);
    uint64_t end_ns = kvist_clock_now_ns() + options->seconds_ms * 1000000;
    size_t samples = 0;
    while (status == KVIST_OK && samples < SAMPLES_MAX &&
           (samples == 0 || kvist_clock_now_ns() < end_ns)) {
        status = found_once(engine, count, crew, &found[samples], err);
        echoed[samples] = echo_ns(echo_fd, bytes);
        samples++;
    }
    if (status == KVIST_OK) {
        (void)printf("row=found_%zu limit=%.1f figure=%.1f bytes=%zu samples=%zu p99=%.1f "
                     "least=%.1f least_limit=%.1f\n",
                     count,
                     (double)bench_quantile(echoed, samples, 0.5) / 1e3,
                     (double)bench_quantile(found, samples, 0.5) / 1e3,
                     bytes,
                     samples,
                     (double)bench_quantile(found, samples, 0.99) / 1e3,
                     (double)bench_quantile(found, samples, 0) / 1e3,
                     (double)bench_quantile(echoed, samples, 0) / 1e3);
    }
    return status;
}

enum kvist_status rows_found(const struct rows_options *options, struct kvist_error *err)
{
    struct kvist_bench_engine engine = {.fds = {-1, -1}};
    int echo_fd = -1;
    struct rows_crew *crew = rows_crew_create(options, 1, 1);
    enum kvist_status status = crew != NULL ? KVIST_OK : no_memory(err);
    pid_t echo = status == KVIST_OK ? start_echo(&echo_fd) : -1;
    if (status == KVIST_OK) {
        status = rows_crew_start(crew, 0, find_member, err);
    }
    struct kvist_bench_setup setup = rows_setup(options, WINDOW_BYTES);
    if (status == KVIST_OK) {
        status = kvist_bench_engine_open(&setup, &engine, err);
    }
    while (status == KVIST_OK && !crew->ready) {
        rows_pause_us(1000);
    }
    for (uint64_t run = 0; status == KVIST_OK && run < options->run_count; run++) {
        status = found_run(options, &engine, 1, crew, echo_fd, err);
        if (status == KVIST_OK) {
            status = found_run(options, &engine, CHAIN_KEYS, crew, echo_fd, err);
        }
    }
    if (crew != NULL) {
        crew->over = true;
    }
    if (status == KVIST_OK) {
        status = rows_crew_wait(crew, err);
    }
    kvist_bench_engine_close(&engine);
    rows_crew_destroy(&crew);
    if (echo > 0) {
        (void)close(echo_fd);
        (void)kill(echo, SIGKILL);
    }
    return status;
}
