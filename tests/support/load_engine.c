/*
 * load_engine - an engine in a process of its own that stores and reads as it is told.
 *
 * Usage       load_engine SOCKET BLOCK_BYTES [POOL]; commands on stdin, a line each, an answer each:
 *               put FIRST COUNT      store blocks until all of them hit   -> ok | timeout
 *               get FIRST COUNT      read and compare every byte          -> right N miss N wrong N
 *               run MS FIRST COUNT   store and read at random meanwhile   -> the same
 *               fetch FIRST COUNT    bring what is on NVMe, then as get   -> the same
 *               hold NUMBER          lease a block and keep the lease     -> ok | miss
 *               held                 compare the held block               -> right | wrong
 *               release              give it back                         -> ok
 *               take COUNT           take slots and keep them             -> ok N
 *               commit FIRST         fill, mark and commit what was taken -> ok N
 *               wait SECONDS         until connected and granted          -> ok | timeout
 *               stats                -> connects N instance N held N mapped N, and of all commands:
 *                                    bytes N (compared), lost N (misses of blocks that had hit),
 *                                    errors N (answers that the library never owes)
 * Blocks      every word of block n tells n and its place
 */
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/key/key.h"

#include <kvist/client.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <time.h>

#define PATIENCE_US 20000000U
#define TAKES_MAX   256U
#define NUMBERS_MAX 65536U /* blocks */
#define BATCH_MAX   8U     /* leases that run holds at a time */

static struct {
    struct kvist_client *client;
    struct kvist_pool *pool;
    uint64_t block_bytes;
    uint64_t random;
    struct kvist_lease held;
    uint64_t held_number;
    struct kvist_take takes[TAKES_MAX];
    size_t take_count;
    bool has_hit[NUMBERS_MAX];
    uint64_t bytes;
    uint64_t lost;
    uint64_t errors;
} engine;

struct tally {
    uint64_t right;
    uint64_t miss;
    uint64_t wrong;
};

static void pause_us(long us)
{
    struct timespec pause = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    (void)nanosleep(&pause, NULL);
}

static uint64_t next_random(void)
{
    engine.random ^= engine.random << 13;
    engine.random ^= engine.random >> 7;
    engine.random ^= engine.random << 17;
    return engine.random;
}

/* What a client may be told while its daemon dies and comes back; all else is an error. */
static bool is_ok(enum kvist_status status)
{
    if (status != KVIST_OK && status != KVIST_UNAVAILABLE && status != KVIST_BUSY &&
        status != KVIST_STALE) {
        (void)fprintf(stderr, "load_engine: %s\n", kvist_status_name(status));
        engine.errors++;
    }
    return status == KVIST_OK;
}

static void key_of(uint64_t number, uint8_t key_out[KVIST_KEY_BYTES])
{
    const uint64_t words[4] = {(number + 1) * 0x9e3779b97f4a7c15ULL, number, 5, 3};
    memcpy(key_out, words, KVIST_KEY_BYTES);
}

static void fill(uint64_t *words, uint64_t number)
{
    for (uint64_t index = 0; index < engine.block_bytes / 8; index++) {
        words[index] = (number << 32 | index) * 0xbf58476d1ce4e5b9ULL;
    }
}

static bool is_filled(const uint64_t *words, uint64_t number)
{
    uint64_t difference = 0;
    engine.bytes += engine.block_bytes;
    for (uint64_t index = 0; index < engine.block_bytes / 8; index++) {
        difference |= words[index] ^ (number << 32 | index) * 0xbf58476d1ce4e5b9ULL;
    }
    return difference == 0;
}

/* Fill, mark and commit a taken slot. */
static bool finish_put(const struct kvist_take *take, uint64_t number)
{
    uint8_t key[KVIST_KEY_BYTES];
    uint64_t *slot = NULL;
    key_of(number, key);
    if (kvist_pool_pin(engine.pool, take->instance) == KVIST_OK) {
        slot = kvist_pool_slot_address(engine.pool, take->instance, take->slot);
        if (slot != NULL) {
            fill(slot, number);
        }
        kvist_pool_unpin(engine.pool, take->instance);
    }
    if (slot == NULL || !is_ok(kvist_pool_mark(engine.pool, take))) {
        kvist_pool_untake(engine.pool, take, 1);
        return false;
    }
    return is_ok(kvist_pool_commit(engine.pool, take, key, 1, NULL, engine.block_bytes));
}

static bool put(uint64_t number)
{
    struct kvist_take take;
    size_t count = 0;
    return is_ok(kvist_pool_take(engine.pool, 1, &take, &count)) && count == 1 &&
           finish_put(&take, number);
}

/* @return READY: leased; else why not */
static enum kvist_probe acquire(uint64_t number, struct kvist_lease *lease_out)
{
    uint8_t key[KVIST_KEY_BYTES];
    enum kvist_probe stop = KVIST_PROBE_MISS;
    size_t count = 0;
    key_of(number, key);
    bool hit =
        is_ok(kvist_pool_acquire(engine.pool, key, 1, lease_out, &count, &stop)) && count == 1;
    engine.lost += !hit && engine.has_hit[number];
    engine.has_hit[number] = hit;
    return hit ? KVIST_PROBE_READY : stop;
}

/* A hit must be readable, whatever the daemon does. */
static bool holds(const struct kvist_lease *lease, uint64_t number)
{
    if (kvist_pool_pin(engine.pool, lease->instance) != KVIST_OK) {
        return false;
    }
    const uint64_t *slot = kvist_pool_slot_address(engine.pool, lease->instance, lease->slot);
    bool right = slot != NULL && is_filled(slot, number);
    kvist_pool_unpin(engine.pool, lease->instance);
    return right;
}

static void compare(const struct kvist_lease *lease, uint64_t number, struct tally *tally)
{
    bool right = holds(lease, number);
    tally->right += right;
    tally->wrong += !right;
}

static void get(uint64_t number, struct tally *tally)
{
    struct kvist_lease lease;
    if (acquire(number, &lease) != KVIST_PROBE_READY) {
        tally->miss++;
        return;
    }
    compare(&lease, number, tally);
    kvist_pool_release(engine.pool, &lease, 1);
}

static void prefetch(uint64_t number)
{
    uint8_t key[KVIST_KEY_BYTES];
    key_of(number, key);
    (void)is_ok(kvist_pool_prefetch(engine.pool, key, 1));
}

static void fetch(uint64_t number, struct tally *tally)
{
    uint8_t key[KVIST_KEY_BYTES];
    uint8_t probe = KVIST_PROBE_MISS;
    uint64_t deadline_us = kvist_clock_now_us() + PATIENCE_US;
    key_of(number, key);
    while (is_ok(kvist_pool_probe(engine.pool, key, 1, &probe)) && probe != KVIST_PROBE_READY &&
           kvist_clock_now_us() < deadline_us) {
        prefetch(number);
        pause_us(1000);
    }
    get(number, tally);
}

static bool put_all(uint64_t first, uint64_t count)
{
    uint64_t deadline_us = kvist_clock_now_us() + PATIENCE_US;
    for (uint64_t number = first; number < first + count;) {
        struct tally tally = {0};
        get(number, &tally);
        if (tally.right > 0) {
            number++;
        } else if (tally.wrong > 0 || kvist_clock_now_us() > deadline_us) {
            return false;
        } else if (put(number)) {
            for (unsigned tries = 0; tally.right == 0 && tries < 1000; tries++) {
                pause_us(1000);
                get(number, &tally);
            }
        } else {
            pause_us(1000);
        }
    }
    return true;
}

/* Every leased block is compared when it is leased and again before it is released. */
static struct tally run(uint64_t ms, uint64_t first, uint64_t count)
{
    struct tally tally = {0};
    struct kvist_lease leases[BATCH_MAX];
    uint64_t numbers[BATCH_MAX];
    uint64_t end_us = kvist_clock_now_us() + ms * 1000;
    while (kvist_clock_now_us() < end_us) {
        size_t held = 0;
        for (unsigned turn = 0; turn < BATCH_MAX; turn++) {
            uint64_t number = first + next_random() % count;
            enum kvist_probe probe = acquire(number, &leases[held]);
            if (probe == KVIST_PROBE_READY) {
                compare(&leases[held], number, &tally);
                numbers[held++] = number;
                continue;
            }
            tally.miss++;
            if (probe == KVIST_PROBE_MISS) {
                (void)put(number);
            } else {
                prefetch(number);
            }
        }
        pause_us((long)(next_random() % 3000));
        for (size_t index = 0; index < held; index++) {
            compare(&leases[index], numbers[index], &tally);
        }
        kvist_pool_release(engine.pool, leases, held);
    }
    return tally;
}

static bool wait_for(uint64_t seconds)
{
    return kvist_client_wait(engine.client, seconds * 1000000, NULL) == KVIST_OK &&
           kvist_pool_wait(engine.pool, seconds * 1000000, NULL) == KVIST_OK;
}

static void say_tally(const struct tally *tally)
{
    (void)printf("right %llu miss %llu wrong %llu\n",
                 (unsigned long long)tally->right,
                 (unsigned long long)tally->miss,
                 (unsigned long long)tally->wrong);
}

static void say(bool good, const char *otherwise)
{
    (void)puts(good ? "ok" : otherwise);
}

static void say_stats(void)
{
    struct kvist_client_stats stats;
    kvist_client_stats(engine.client, &stats);
    (void)printf("connects %llu instance %llu held %llu mapped %llu bytes %llu lost %llu "
                 "errors %llu\n",
                 (unsigned long long)stats.connects,
                 (unsigned long long)kvist_pool_instance(engine.pool),
                 (unsigned long long)stats.grants_held,
                 (unsigned long long)stats.mapped_bytes,
                 (unsigned long long)engine.bytes,
                 (unsigned long long)engine.lost,
                 (unsigned long long)engine.errors);
}

static void commit_taken(uint64_t first)
{
    size_t done = 0;
    for (size_t index = 0; index < engine.take_count; index++) {
        done += finish_put(&engine.takes[index], first + index);
    }
    engine.take_count = 0;
    (void)printf("ok %zu\n", done);
}

static void obey(char *line)
{
    char word[16] = "";
    unsigned long long a = 0;
    unsigned long long b = 0;
    unsigned long long c = 0;
    (void)sscanf(line, "%15s %llu %llu %llu", word, &a, &b, &c);
    struct tally tally = {0};
    if (a >= NUMBERS_MAX || b >= NUMBERS_MAX || a + b > NUMBERS_MAX || c >= NUMBERS_MAX) {
        (void)puts("what?");
    } else if (strcmp(word, "put") == 0) {
        say(put_all(a, b), "timeout");
    } else if (strcmp(word, "get") == 0) {
        for (uint64_t number = a; number < a + b; number++) {
            get(number, &tally);
        }
        say_tally(&tally);
    } else if (strcmp(word, "fetch") == 0) {
        for (uint64_t number = a; number < a + b; number++) {
            fetch(number, &tally);
        }
        say_tally(&tally);
    } else if (strcmp(word, "run") == 0) {
        tally = run(a, b, c);
        say_tally(&tally);
    } else if (strcmp(word, "hold") == 0) {
        engine.held_number = a;
        say(acquire(a, &engine.held) == KVIST_PROBE_READY, "miss");
    } else if (strcmp(word, "held") == 0) {
        (void)puts(holds(&engine.held, engine.held_number) ? "right" : "wrong");
    } else if (strcmp(word, "release") == 0) {
        kvist_pool_release(engine.pool, &engine.held, 1);
        say(true, "");
    } else if (strcmp(word, "take") == 0) {
        bool good = kvist_pool_take(engine.pool,
                                    a < TAKES_MAX ? a : TAKES_MAX,
                                    engine.takes,
                                    &engine.take_count) == KVIST_OK;
        (void)printf("ok %zu\n", good ? engine.take_count : 0);
    } else if (strcmp(word, "commit") == 0) {
        commit_taken(a);
    } else if (strcmp(word, "wait") == 0) {
        say(wait_for(a), "timeout");
    } else if (strcmp(word, "stats") == 0) {
        say_stats();
    } else {
        (void)puts("what?");
    }
    (void)fflush(stdout);
}

static bool begin(const char *socket_path, const char *pool_name)
{
    struct kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
    options.socket_path = socket_path;
    options.role = KVIST_ROLE_ENGINE;
    options.name = "load";
    if (getrandom(options.session_id, sizeof(options.session_id), 0) !=
            (ssize_t)sizeof(options.session_id) ||
        getrandom(&engine.random, sizeof(engine.random), 0) != (ssize_t)sizeof(engine.random)) {
        return false;
    }
    engine.random |= 1;
    const struct kvist_pool_field fields[] = {{"model", pool_name, strlen(pool_name)}};
    struct kvist_pool_options pool = KVIST_POOL_OPTIONS_INIT;
    pool.fields = fields;
    pool.field_count = KVIST_ARRAY_COUNT(fields);
    pool.slot_bytes = engine.block_bytes;
    return kvist_client_create(&options, &engine.client, NULL) == KVIST_OK &&
           kvist_client_thread_start(engine.client, NULL) == KVIST_OK &&
           kvist_pool_open(engine.client, &pool, &engine.pool, NULL) == KVIST_OK;
}

int main(int argc, char **argv)
{
    char line[128];
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (argc != 3 && argc != 4) {
        return 2;
    }
    engine.block_bytes = strtoull(argv[2], NULL, 10);
    if (!begin(argv[1], argc == 4 ? argv[3] : "load")) {
        return 1;
    }
    while (fgets(line, sizeof(line), stdin) != NULL) {
        obey(line);
    }
    kvist_client_destroy(&engine.client);
    return 0;
}
