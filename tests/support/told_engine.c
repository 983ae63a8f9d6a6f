/*
 * told_engine - an engine on libkvist that does what it is told on stdin.
 *
 *   told_engine SOCKET BLOCK_BYTES SEED
 *
 * Each line is an order, each gets one line of name=value figures; end of input ends it.
 *   put FIRST COUNT MS    put blocks until all are found, or until MS have passed
 *   get FIRST COUNT       lease each block and compare every byte
 *   fetch FIRST COUNT MS  bring them from NVMe, then as get
 *   run FIRST COUNT MS    for so long: lease some, compare, hold, compare again; put what is
 * missing wait MS               until it is connected and has a pool Figures are of this order
 * alone: right, wrong  blocks found, by their bytes; missing: not found lost          of the
 * missing, those that this engine has found before put           committed; bytes: compared;
 * errors: answers that the library never owes connects      of the client, so far
 */
#include "proto/base/check.h"
#include "proto/base/clock.h"

#include <kvist/client.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define NUMBERS_MAX 65536U
#define HELD_MAX    8U
#define LINE_BYTES  128

static struct kvist_client *client;
static struct kvist_pool *pool;
static uint64_t block_bytes;
static uint64_t randomness;
static bool found_before[NUMBERS_MAX];

static struct figures {
    uint64_t right;
    uint64_t wrong;
    uint64_t missing;
    uint64_t lost;
    uint64_t put;
    uint64_t bytes;
    uint64_t errors;
} figures;

static void pause_us(long us)
{
    struct timespec pause = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    (void)nanosleep(&pause, NULL);
}

static uint64_t draw(uint64_t below)
{
    randomness ^= randomness << 13;
    randomness ^= randomness >> 7;
    randomness ^= randomness << 17;
    return randomness % below;
}

/* What may come while a daemon dies and comes back; all else is an error. */
static bool owed(enum kvist_status status)
{
    bool is_owed = status == KVIST_OK || status == KVIST_UNAVAILABLE || status == KVIST_BUSY ||
                   status == KVIST_STALE;
    if (!is_owed) {
        (void)fprintf(stderr, "told_engine: %s\n", kvist_status_name(status));
        figures.errors++;
    }
    return status == KVIST_OK;
}

/* --- Blocks ---------------------------------------------------------------------------------- */

static void key_of(uint64_t number, uint8_t key_out[KVIST_KEY_BYTES])
{
    const uint64_t words[4] = {number * 0x9e3779b97f4a7c15ULL, number, 7, 9};
    memcpy(key_out, words, KVIST_KEY_BYTES);
}

static void fill(void *slot, uint64_t number)
{
    uint64_t *words = slot;
    for (uint64_t index = 0; index < block_bytes / 8; index++) {
        words[index] = number * 1000003 + index;
    }
}

static bool is_filled(const void *slot, uint64_t number)
{
    const uint64_t *words = slot;
    figures.bytes += block_bytes;
    for (uint64_t index = 0; index < block_bytes / 8; index++) {
        if (words[index] != number * 1000003 + index) {
            return false;
        }
    }
    return true;
}

/* A lease is bytes that are mapped and right, for as long as it is held. */
static bool compare(const struct kvist_lease *lease, uint64_t number)
{
    bool is_right = false;
    if (kvist_pool_pin(pool, lease->instance) == KVIST_OK) {
        const void *slot = kvist_pool_slot_address(pool, lease->instance, lease->slot);
        is_right = slot != NULL && lease->block_bytes == block_bytes && is_filled(slot, number);
        kvist_pool_unpin(pool, lease->instance);
    }
    figures.right += is_right;
    figures.wrong += !is_right;
    return is_right;
}

/* @return whether there is a lease */
static bool lease(uint64_t number, struct kvist_lease *lease_out)
{
    uint8_t key[KVIST_KEY_BYTES];
    enum kvist_probe stop = KVIST_PROBE_MISS;
    size_t count = 0;
    key_of(number, key);
    if (owed(kvist_pool_acquire(pool, key, 1, lease_out, &count, &stop)) && count == 1) {
        found_before[number] = true;
        return true;
    }
    figures.missing++;
    figures.lost += found_before[number];
    return false;
}

static void get(uint64_t number)
{
    struct kvist_lease one;
    if (lease(number, &one)) {
        (void)compare(&one, number);
        kvist_pool_release(pool, &one, 1);
    }
}

static bool is_ready(uint64_t number)
{
    uint8_t key[KVIST_KEY_BYTES];
    uint8_t probe = KVIST_PROBE_MISS;
    key_of(number, key);
    return owed(kvist_pool_probe(pool, key, 1, &probe)) && probe == KVIST_PROBE_READY;
}

static bool put(uint64_t number)
{
    uint8_t key[KVIST_KEY_BYTES];
    struct kvist_take take;
    size_t count = 0;
    key_of(number, key);
    if (!owed(kvist_pool_take(pool, 1, &take, &count)) || count == 0) {
        return false;
    }
    void *slot = NULL;
    if (kvist_pool_pin(pool, take.instance) == KVIST_OK) {
        slot = kvist_pool_slot_address(pool, take.instance, take.slot);
        if (slot != NULL) {
            fill(slot, number);
        }
        kvist_pool_unpin(pool, take.instance);
    }
    if (slot == NULL || !owed(kvist_pool_mark(pool, &take))) {
        kvist_pool_untake(pool, &take, 1);
        return false;
    }
    bool is_put = owed(kvist_pool_commit(pool, &take, key, 1, NULL, block_bytes));
    figures.put += is_put;
    return is_put;
}

/* --- Orders ---------------------------------------------------------------------------------- */

struct order {
    char name[8];
    uint64_t first;
    uint64_t count;
    uint64_t deadline_us;
};

static bool in_time(const struct order *order)
{
    return kvist_clock_now_us() < order->deadline_us;
}

static void do_put(const struct order *order)
{
    uint64_t ready = 0;
    do {
        ready = 0;
        for (uint64_t number = order->first; number < order->first + order->count; number++) {
            if (is_ready(number)) {
                ready++;
                found_before[number] = true;
            } else {
                (void)put(number);
            }
        }
        pause_us(ready < order->count ? 2000 : 0);
    } while (ready < order->count && in_time(order));
    figures.right = ready;
    figures.missing = order->count - ready;
}

static void do_get(const struct order *order)
{
    for (uint64_t number = order->first; number < order->first + order->count; number++) {
        get(number);
    }
}

static void do_fetch(const struct order *order)
{
    for (uint64_t number = order->first; number < order->first + order->count; number++) {
        uint8_t key[KVIST_KEY_BYTES];
        key_of(number, key);
        while (!is_ready(number) && in_time(order)) {
            (void)owed(kvist_pool_prefetch(pool, key, 1));
            pause_us(1000);
        }
        get(number);
    }
}

static void do_run(const struct order *order)
{
    while (in_time(order)) {
        struct kvist_lease held[HELD_MAX];
        uint64_t numbers[HELD_MAX];
        size_t count = 0;
        for (uint64_t turn = 0; turn < HELD_MAX; turn++) {
            uint64_t number = order->first + draw(order->count);
            if (lease(number, &held[count])) {
                (void)compare(&held[count], number);
                numbers[count++] = number;
            } else {
                (void)put(number);
            }
        }
        pause_us((long)draw(5000));
        for (size_t index = 0; index < count; index++) {
            (void)compare(&held[index], numbers[index]);
        }
        kvist_pool_release(pool, held, count);
    }
}

static void do_wait(const struct order *order)
{
    uint64_t now_us = kvist_clock_now_us();
    struct kvist_error err = KVIST_ERROR_INIT;
    uint64_t left_us = order->deadline_us > now_us ? order->deadline_us - now_us : 0;
    if (kvist_client_wait(client, left_us, &err) != KVIST_OK ||
        kvist_pool_wait(pool, left_us, &err) != KVIST_OK) {
        (void)fprintf(stderr, "told_engine: %s\n", err.text);
        figures.errors++;
    }
}

static const struct {
    const char *name;
    void (*act)(const struct order *order);
} orders[] = {
    {"put", do_put}, {"get", do_get}, {"fetch", do_fetch}, {"run", do_run}, {"wait", do_wait}};

static bool obey(const char *line)
{
    unsigned long long first = 0;
    unsigned long long count = 0;
    unsigned long long ms = 0;
    struct order order = {.first = 0};
    memset(&figures, 0, sizeof(figures));
    if (sscanf(line, "wait %llu", &ms) == 1) {
        (void)snprintf(order.name, sizeof(order.name), "wait");
    } else if (sscanf(line, "%7s %llu %llu %llu", order.name, &first, &count, &ms) < 3 ||
               first + count > NUMBERS_MAX || count == 0) {
        return false;
    }
    order.first = first;
    order.count = count;
    order.deadline_us = kvist_clock_now_us() + ms * 1000;
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(orders); index++) {
        if (strcmp(orders[index].name, order.name) == 0) {
            struct kvist_client_stats stats;
            orders[index].act(&order);
            kvist_client_stats(client, &stats);
            (void)printf("right=%llu wrong=%llu missing=%llu lost=%llu put=%llu bytes=%llu "
                         "errors=%llu connects=%llu\n",
                         (unsigned long long)figures.right,
                         (unsigned long long)figures.wrong,
                         (unsigned long long)figures.missing,
                         (unsigned long long)figures.lost,
                         (unsigned long long)figures.put,
                         (unsigned long long)figures.bytes,
                         (unsigned long long)figures.errors,
                         (unsigned long long)stats.connects);
            return fflush(stdout) == 0;
        }
    }
    return false;
}

static bool engine_open(const char *socket_path)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    struct kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
    options.socket_path = socket_path;
    options.role = KVIST_ROLE_ENGINE;
    options.name = "told";
    const struct kvist_pool_field fields[] = {{"model", "told", 4}};
    struct kvist_pool_options about = KVIST_POOL_OPTIONS_INIT;
    about.fields = fields;
    about.field_count = 1;
    about.slot_bytes = block_bytes;
    bool is_open = getrandom(options.session_id, sizeof(options.session_id), 0) ==
                       (ssize_t)sizeof(options.session_id) &&
                   kvist_client_create(&options, &client, &err) == KVIST_OK &&
                   kvist_client_thread_start(client, &err) == KVIST_OK &&
                   kvist_pool_open(client, &about, &pool, &err) == KVIST_OK;
    if (!is_open) {
        (void)fprintf(stderr, "told_engine: %s\n", err.text);
    }
    return is_open;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        (void)fprintf(stderr, "usage: told_engine SOCKET BLOCK_BYTES SEED\n");
        return 2;
    }
    block_bytes = strtoull(argv[2], NULL, 10);
    randomness = strtoull(argv[3], NULL, 10) * 2 + 1;
    if (!engine_open(argv[1])) {
        return 1;
    }
    char line[LINE_BYTES];
    int status = 0;
    while (status == 0 && fgets(line, sizeof(line), stdin) != NULL) {
        if (!obey(line)) {
            (void)fprintf(stderr, "told_engine: no such order: %s", line);
            status = 2;
        }
    }
    kvist_client_destroy(&client);
    return status;
}
