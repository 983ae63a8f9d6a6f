/* The load, and what is measured; see turnover.h. */
#include "tests/bench/turnover.h"

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "storage/policy/list.h"
#include "storage/record.h"
#include "tests/bench/quantile.h"
#include "tests/support/tier_rig.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define FRESH_SPAN   8U /* times the blocks of the cap: long gone when a number comes again */
#define SAMPLES_MAX  (1U << 20)
#define SAMPLE_US    200000U /* of bytes on disk */
#define WAIT_MS      10
#define SEED         0x2545f4914f6cdd1dULL
#define TEXT_BYTES   2048U
#define WARM_PERCENT 110U /* of the cap is written before the measurement */
#define SECONDS_MAX  600U
#define PERCENT      100.0

enum presence { ABSENT, WRITING, PRESENT };

/* A cache without bytes. */
struct lru {
    struct kvist_list_link *links; /* by number; the sentinel last */
    uint32_t sentinel;
    uint32_t count;
    uint32_t capacity;
};

struct counts {
    uint64_t lookups; /* what memory lacked */
    uint64_t hits;
    uint64_t ideal_hits;
    uint64_t ideal_writes;
    uint64_t read_blocks;
    uint64_t written_blocks;
    uint64_t lost; /* reads that found nothing */
    uint64_t errors;
};

static struct load {
    struct turnover_options options;
    uint64_t random;
    uint32_t popular_count;
    uint32_t number_max;
    uint64_t fresh_next;
    double *shares;    /* by rank: of requests for it and for all before it */
    uint8_t *presence; /* by number */
    struct lru memory;
    struct lru ideal; /* of cap_bytes */
    struct turnover_flight *free_reads;
    struct turnover_flight *free_writes;
    uint64_t in_flight;
    struct counts counts;
    uint64_t *read_ns;
    size_t read_count;
} load;

/* The sampler's. */
static struct {
    pthread_t thread;
    _Atomic bool over;
    _Atomic bool measuring;
    uint64_t bytes_max;
    uint64_t samples;
    uint64_t samples_over;
    double bytes_sum;
} disk;

/* --- Helpers -------------------------------------------------------------------------------- */

static uint64_t next_random(void)
{
    load.random ^= load.random << 13;
    load.random ^= load.random >> 7;
    load.random ^= load.random << 17;
    return load.random;
}

void turnover_wait(int fd)
{
    struct pollfd waited = {.fd = fd, .events = POLLIN};
    (void)poll(&waited, 1, WAIT_MS);
}

static uint64_t file_number(const char *path, const char *name)
{
    char text[TEXT_BYTES] = "";
    FILE *file = fopen(path, "re");
    if (file != NULL) {
        text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
        (void)fclose(file);
    }
    const char *found = strstr(text, name);
    return found != NULL ? strtoull(found + strlen(name), NULL, 10) : 0;
}

/* --- Caches without bytes ------------------------------------------------------------------- */

static void lru_init(struct lru *lru, uint32_t number_max, uint64_t capacity)
{
    *lru = (struct lru){.sentinel = number_max, .capacity = (uint32_t)capacity};
    lru->links = calloc((size_t)number_max + 1, sizeof(lru->links[0]));
    KVIST_CHECK(lru->links != NULL);
    kvist_list_init(lru->links, number_max);
}

/* @return whether it was there; it is the hottest then */
static bool lru_touch(struct lru *lru, uint32_t number)
{
    if (!kvist_list_has(lru->links, number)) {
        return false;
    }
    kvist_list_remove(lru->links, number);
    kvist_list_push(lru->links, lru->sentinel, number);
    return true;
}

/* @return what went for it: number itself where there is no room at all; number_max: nothing */
static uint32_t lru_insert(struct lru *lru, uint32_t number)
{
    uint32_t going = lru->sentinel;
    if (lru->capacity == 0) {
        return number;
    }
    if (lru->count == lru->capacity) {
        going = kvist_list_hotter(lru->links, lru->sentinel);
        kvist_list_remove(lru->links, going);
        lru->count--;
    }
    kvist_list_push(lru->links, lru->sentinel, number);
    lru->count++;
    return going;
}

/* --- Requests ------------------------------------------------------------------------------- */

static void shares_init(void)
{
    double exponent = (double)load.options.skew_percent / PERCENT;
    double sum = 0;
    load.shares = calloc(load.popular_count, sizeof(load.shares[0]));
    KVIST_CHECK(load.shares != NULL);
    for (uint32_t rank = 0; rank < load.popular_count; rank++) {
        sum += pow(rank + 1.0, -exponent);
        load.shares[rank] = sum;
    }
    for (uint32_t rank = 0; rank < load.popular_count; rank++) {
        load.shares[rank] /= sum;
    }
}

/* First rank whose share is not below a random one. */
static uint32_t draw_popular(void)
{
    double share = (double)(next_random() >> 11) / (double)(1ULL << 53);
    uint32_t low = 0;
    uint32_t high = load.popular_count - 1;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (load.shares[middle] < share) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static uint32_t draw(void)
{
    if (next_random() % 100 < load.options.fresh_percent) {
        uint64_t span = load.number_max - load.popular_count;
        return load.popular_count + (uint32_t)(load.fresh_next++ % span);
    }
    return draw_popular();
}

static struct turnover_flight *take(struct turnover_flight **list)
{
    while (*list == NULL) {
        turnover_store_turn();
    }
    struct turnover_flight *flight = *list;
    *list = flight->next;
    flight->start_ns = kvist_clock_now_ns();
    load.in_flight++;
    return flight;
}

static void look_up(uint32_t number)
{
    load.counts.lookups++;
    load.counts.ideal_hits += lru_touch(&load.ideal, number);
    if (load.presence[number] == WRITING) {
        load.counts.hits++; /* it is in memory still */
    } else if (load.presence[number] == PRESENT) {
        struct turnover_flight *flight = take(&load.free_reads);
        flight->number = number;
        load.counts.hits++;
        turnover_store_submit(flight);
    }
}

static void write_block(uint32_t number)
{
    if (!lru_touch(&load.ideal, number)) {
        (void)lru_insert(&load.ideal, number);
        load.counts.ideal_writes++;
    }
    if (load.presence[number] != ABSENT) {
        return;
    }
    struct turnover_flight *flight = take(&load.free_writes);
    flight->number = number;
    memcpy(flight->memory, &flight->number, sizeof(flight->number));
    load.presence[number] = WRITING;
    turnover_store_submit(flight);
}

static void request(void)
{
    uint32_t number = draw();
    if (lru_touch(&load.memory, number)) {
        return;
    }
    uint32_t going = lru_insert(&load.memory, number);
    look_up(number);
    if (going != load.memory.sentinel) {
        write_block(going);
    }
}

void turnover_done(struct turnover_flight *flight, enum kvist_status status)
{
    struct turnover_flight **list = flight->write ? &load.free_writes : &load.free_reads;
    uint64_t took_ns = kvist_clock_now_ns() - flight->start_ns;
    if (flight->write) {
        load.presence[flight->number] = status == KVIST_OK ? PRESENT : ABSENT;
        load.counts.written_blocks += status == KVIST_OK;
    } else if (status == KVIST_OK) {
        load.counts.read_blocks++;
        if (load.read_count < SAMPLES_MAX) {
            load.read_ns[load.read_count++] = took_ns;
        }
    } else if (status == KVIST_NOT_FOUND) {
        load.counts.lost++;
    }
    load.counts.errors += status != KVIST_OK && status != KVIST_NOT_FOUND;
    flight->next = *list;
    *list = flight;
    load.in_flight--;
}

void turnover_gone(uint64_t number)
{
    load.presence[number] = ABSENT;
}

/* --- Bytes on disk -------------------------------------------------------------------------- */

/* What removed files that are still open take: du(1) does not see it. */
static uint64_t removed_bytes(void)
{
    uint64_t bytes = 0;
    DIR *directory = opendir("/proc/self/fd");
    struct dirent *entry = NULL;
    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        struct stat about;
        int fd = (int)strtol(entry->d_name, NULL, 10);
        if (entry->d_name[0] != '.' && fstat(fd, &about) == 0 && S_ISREG(about.st_mode) &&
            about.st_nlink == 0) {
            bytes += (uint64_t)about.st_blocks * 512;
        }
    }
    if (directory != NULL) {
        (void)closedir(directory);
    }
    return bytes;
}

static void *sample_disk(void *argument)
{
    (void)argument;
    while (!disk.over) {
        if (disk.measuring) {
            uint64_t bytes = kvist_rig_du(load.options.path) + removed_bytes();
            disk.bytes_max = bytes > disk.bytes_max ? bytes : disk.bytes_max;
            disk.bytes_sum += (double)bytes;
            disk.samples_over += bytes > load.options.cap_bytes;
            disk.samples++;
        }
        (void)usleep(SAMPLE_US);
    }
    return NULL;
}

/* --- The run -------------------------------------------------------------------------------- */

static void flights_init(struct turnover_flight **list, uint64_t count, bool write)
{
    for (uint64_t index = 0; index < count; index++) {
        struct turnover_flight *flight = calloc(1, sizeof(*flight));
        KVIST_CHECK(flight != NULL);
        flight->memory = kvist_record_memory(load.options.block_bytes);
        KVIST_CHECK(flight->memory != NULL);
        for (uint64_t at = 0; at < load.options.block_bytes; at += sizeof(load.random)) {
            uint64_t word = next_random();
            memcpy(flight->memory + at, &word, sizeof(word));
        }
        flight->write = write;
        flight->next = *list;
        *list = flight;
    }
}

static void load_init(const struct turnover_options *options)
{
    uint64_t cap_blocks = options->cap_bytes / options->block_bytes;
    load.options = *options;
    load.random = SEED;
    load.popular_count = (uint32_t)(cap_blocks * options->popular_percent / 100) + 1;
    load.number_max = load.popular_count + (uint32_t)cap_blocks * FRESH_SPAN;
    load.presence = calloc(load.number_max, 1);
    load.read_ns = calloc(SAMPLES_MAX, sizeof(load.read_ns[0]));
    KVIST_CHECK(load.presence != NULL && load.read_ns != NULL);
    shares_init();
    lru_init(&load.memory, load.number_max, cap_blocks * options->memory_percent / 100);
    lru_init(&load.ideal, load.number_max, cap_blocks);
    flights_init(&load.free_reads, options->read_depth, false);
    flights_init(&load.free_writes, options->write_depth, true);
}

static void run_until_written(uint64_t bytes, uint64_t seconds_max)
{
    uint64_t end_ns = kvist_clock_now_ns() + seconds_max * 1000000000;
    uint64_t blocks = bytes / load.options.block_bytes;
    load.counts = (struct counts){.lookups = 0};
    load.read_count = 0;
    while (load.counts.written_blocks < blocks && kvist_clock_now_ns() < end_ns) {
        request();
    }
}

static double cpu_seconds(void)
{
    struct rusage used;
    (void)getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static double share(double part, double whole)
{
    return whole > 0 ? part / whole : 0;
}

static void print(double seconds, double cpu_s, uint64_t device_bytes)
{
    const struct turnover_options *options = &load.options;
    const struct counts *counts = &load.counts;
    double written = (double)(counts->written_blocks * options->block_bytes);
    double read = (double)(counts->read_blocks * options->block_bytes);
    double lookups = (double)counts->lookups;
    double cap = (double)options->cap_bytes;
    (void)printf("row=turnover store=%s turns=%.2f seconds=%.2f write_gbps=%.3f read_gbps=%.3f "
                 "device=%.3f disk_max=%.4f disk_mean=%.3f disk_over=%.4f ",
                 turnover_store_name,
                 written / cap,
                 seconds,
                 written / seconds / 1e9,
                 read / seconds / 1e9,
                 share((double)device_bytes, written),
                 (double)disk.bytes_max / cap,
                 share(disk.bytes_sum, (double)disk.samples * cap),
                 share((double)disk.samples_over, (double)disk.samples));
    (void)printf("read_p50_ms=%.3f read_p99_ms=%.3f read_max_ms=%.3f hits=%.4f ideal_hits=%.4f "
                 "ideal_written=%.3f lost=%llu errors=%llu cpu_s_per_gb=%.3f",
                 (double)bench_quantile(load.read_ns, load.read_count, 0.5) / 1e6,
                 (double)bench_quantile(load.read_ns, load.read_count, 0.99) / 1e6,
                 (double)bench_quantile(load.read_ns, load.read_count, 1) / 1e6,
                 share((double)(counts->hits - counts->lost), lookups),
                 share((double)counts->ideal_hits, lookups),
                 share((double)counts->ideal_writes, (double)counts->written_blocks),
                 (unsigned long long)counts->lost,
                 (unsigned long long)counts->errors,
                 share(cpu_s, (written + read) / 1e9));
    turnover_store_print();
    (void)putchar('\n');
}

static void measure(void)
{
    const struct turnover_options *options = &load.options;
    run_until_written(options->cap_bytes / 100 * WARM_PERCENT, options->seconds_max);
    turnover_store_begin();
    uint64_t device_bytes = file_number("/proc/self/io", "\nwrite_bytes: ");
    double cpu_s = cpu_seconds();
    uint64_t start_ns = kvist_clock_now_ns();
    disk.measuring = true;
    run_until_written(options->cap_bytes * options->turn_count, options->seconds_max);
    while (load.in_flight > 0) {
        turnover_store_turn();
    }
    disk.measuring = false;
    double seconds = (double)(kvist_clock_now_ns() - start_ns) / 1e9;
    disk.over = true;
    (void)pthread_join(disk.thread, NULL);
    print(seconds,
          cpu_seconds() - cpu_s,
          file_number("/proc/self/io", "\nwrite_bytes: ") - device_bytes);
}

static const struct {
    const char *name;
    size_t offset;
} numbers[] = {
    {"cap=", offsetof(struct turnover_options, cap_bytes)},
    {"block=", offsetof(struct turnover_options, block_bytes)},
    {"turns=", offsetof(struct turnover_options, turn_count)},
    {"seconds=", offsetof(struct turnover_options, seconds_max)},
    {"memory=", offsetof(struct turnover_options, memory_percent)},
    {"popular=", offsetof(struct turnover_options, popular_percent)},
    {"fresh=", offsetof(struct turnover_options, fresh_percent)},
    {"skew=", offsetof(struct turnover_options, skew_percent)},
    {"extent=", offsetof(struct turnover_options, extent_bytes)},
    {"threads=", offsetof(struct turnover_options, thread_count)},
    {"reads=", offsetof(struct turnover_options, read_depth)},
    {"writes=", offsetof(struct turnover_options, write_depth)},
    {"carry=", offsetof(struct turnover_options, carry_percent)},
    {"carry_hits=", offsetof(struct turnover_options, carry_hits)},
    {"gc=", offsetof(struct turnover_options, gc_percent)},
    {"live=", offsetof(struct turnover_options, live_percent)},
    {"families=", offsetof(struct turnover_options, family_count)},
};

static bool parse_argument(const char *text, struct turnover_options *options)
{
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(numbers); index++) {
        size_t length = strlen(numbers[index].name);
        if (strncmp(text, numbers[index].name, length) == 0) {
            char *end = NULL;
            uint64_t value = strtoull(text + length, &end, 10);
            memcpy((char *)options + numbers[index].offset, &value, sizeof(value));
            return end != text + length && *end == '\0';
        }
    }
    return false;
}

static bool is_sane(const struct turnover_options *options)
{
    return options->block_bytes >= 4096 && options->block_bytes % 4096 == 0 &&
           options->cap_bytes / options->block_bytes >= 8 && options->read_depth > 0 &&
           options->write_depth > 0 && options->fresh_percent <= 100 &&
           options->seconds_max <= SECONDS_MAX;
}

int main(int argc, char **argv)
{
    struct turnover_options options = {
        .path = argc > 1 ? argv[1] : "",
        .cap_bytes = 2ULL << 30,
        .block_bytes = 512U << 10,
        .turn_count = 5,
        .seconds_max = 120,
        .memory_percent = 12,
        .popular_percent = 200,
        .fresh_percent = 30,
        .skew_percent = 90,
        .thread_count = 8,
        .read_depth = 8,
        .write_depth = 24,
        .carry_percent = 10,
        .carry_hits = 1,
        .gc_percent = 0,
        .live_percent = 80,
        .family_count = 1,
    };
    bool right = argc > 1;
    for (int index = 2; right && index < argc; index++) {
        right = parse_argument(argv[index], &options);
    }
    if (!right || !is_sane(&options)) {
        (void)fprintf(stderr, "usage: %s DIRECTORY [name=number ...]; see turnover.c\n", argv[0]);
        return 2;
    }
    struct kvist_error err = KVIST_ERROR_INIT;
    load_init(&options);
    if (turnover_store_open(&options, &err) != KVIST_OK) {
        (void)fprintf(stderr, "%s: %s\n", argv[0], err.text);
        return 1;
    }
    KVIST_CHECK(pthread_create(&disk.thread, NULL, sample_disk, NULL) == 0);
    measure();
    turnover_store_close();
    return load.counts.errors == 0 ? 0 : 1;
}
