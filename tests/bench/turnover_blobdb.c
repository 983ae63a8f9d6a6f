/*
 * RocksDB with its values in blob files, under the load of turnover.h.
 *
 * Tuned for this load: no WAL, direct I/O, no compression, two levels at most, so that each
 * compaction sees all keys and a blob file whose values are all gone is removed at once. The oldest
 * values are removed by their keys when those that live take live_percent of the cap.
 */
#include "proto/base/check.h"
#include "storage/workers.h"
#include "tests/bench/turnover.h"

#include <rocksdb/c.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY_BYTES        32U
#define FAMILIES_MAX     8U
#define MEMTABLE_SHARE   32U /* of the cap: all memtables that are filled */
#define MEMTABLE_MIN     (8ULL << 20)
#define MEMTABLES        4            /* a family: one is filled, the others are flushed */
#define LEVEL_BASE_BYTES (1ULL << 30) /* more than all keys take: there is no third level */
#define BACKGROUND_JOBS  8
#define L0_TRIGGER       2
#define TURN_JOBS_MAX    64U
#define THREAD_NAME      "blobdb"

const char turnover_store_name[] = "blobdb";

struct io {
    struct kvist_job job; /* first: a job is cast back */
    struct turnover_flight *flight;
    enum kvist_status status;
    struct io *next; /* free list */
};

static struct {
    struct turnover_options options;
    struct kvist_workers *workers;
    rocksdb_t *db;
    rocksdb_options_t *db_options;
    rocksdb_writeoptions_t *write_options;
    rocksdb_readoptions_t *read_options;
    rocksdb_column_family_handle_t *families[FAMILIES_MAX];
    struct io *free;
    uint64_t *order; /* a ring of numbers, the oldest first */
    uint64_t order_capacity;
    uint64_t order_head;
    uint64_t order_tail;
} store;

static void check_text(char *text)
{
    if (text != NULL) {
        (void)fprintf(stderr, "rocksdb: %s\n", text);
    }
    KVIST_CHECK(text == NULL);
}

static void make_key(uint64_t number, char key_out[KEY_BYTES])
{
    uint64_t words[4] = {number * 0x9e3779b97f4a7c15ULL, number * 0xbf58476d1ce4e5b9ULL, number, 0};
    memcpy(key_out, words, KEY_BYTES);
}

static rocksdb_column_family_handle_t *family_of(uint64_t number)
{
    return store.families[number % store.options.family_count];
}

/* --- Opening -------------------------------------------------------------------------------- */

static rocksdb_options_t *make_options(void)
{
    const struct turnover_options *options = &store.options;
    uint64_t memtable_bytes = options->cap_bytes / MEMTABLE_SHARE / options->family_count;
    memtable_bytes = memtable_bytes < MEMTABLE_MIN ? MEMTABLE_MIN : memtable_bytes;
    rocksdb_options_t *made = rocksdb_options_create();
    rocksdb_options_set_create_if_missing(made, 1);
    rocksdb_options_set_compression(made, rocksdb_no_compression);
    rocksdb_options_set_use_direct_reads(made, 1);
    rocksdb_options_set_use_direct_io_for_flush_and_compaction(made, 1);
    rocksdb_options_set_write_buffer_size(made, memtable_bytes);
    rocksdb_options_set_max_write_buffer_number(made, MEMTABLES);
    rocksdb_options_set_max_background_jobs(made, BACKGROUND_JOBS);
    rocksdb_options_set_level0_file_num_compaction_trigger(made, L0_TRIGGER);
    rocksdb_options_set_max_bytes_for_level_base(made, LEVEL_BASE_BYTES);
    rocksdb_options_set_target_file_size_base(made, LEVEL_BASE_BYTES);
    rocksdb_options_set_unordered_write(made, 1);
    rocksdb_options_set_enable_blob_files(made, 1);
    rocksdb_options_set_min_blob_size(made, 0);
    rocksdb_options_set_blob_file_size(
        made, options->extent_bytes > 0 ? options->extent_bytes : memtable_bytes);
    rocksdb_options_set_enable_blob_gc(made, options->gc_percent > 0);
    rocksdb_options_set_blob_gc_age_cutoff(made, (double)options->gc_percent / 100);
    return made;
}

enum kvist_status turnover_store_open(const struct turnover_options *options,
                                      struct kvist_error *err)
{
    char *text = NULL;
    uint32_t depth = (uint32_t)(options->read_depth + options->write_depth);
    store.options = *options;
    if (options->family_count == 0 || options->family_count > FAMILIES_MAX) {
        return kvist_error_set(err, KVIST_INVALID, 0, "blobdb", "1 to 8 column families");
    }
    enum kvist_status status = kvist_workers_create(
        THREAD_NAME, (uint32_t)options->thread_count, false, depth, &store.workers, err);
    if (status != KVIST_OK) {
        return status;
    }
    store.db_options = make_options();
    store.db = rocksdb_open(store.db_options, options->path, &text);
    check_text(text);
    for (uint64_t index = 0; index < options->family_count; index++) {
        char name[16];
        (void)snprintf(name, sizeof(name), "%u", (unsigned)index);
        store.families[index] =
            rocksdb_create_column_family(store.db, store.db_options, name, &text);
        check_text(text);
    }
    store.write_options = rocksdb_writeoptions_create();
    rocksdb_writeoptions_disable_WAL(store.write_options, 1);
    store.read_options = rocksdb_readoptions_create();
    store.order_capacity = 2 * options->cap_bytes / options->block_bytes;
    store.order = calloc(store.order_capacity, sizeof(store.order[0]));
    KVIST_CHECK(store.order != NULL);
    for (uint32_t index = 0; index < depth; index++) {
        struct io *io = calloc(1, sizeof(*io));
        KVIST_CHECK(io != NULL);
        io->next = store.free;
        store.free = io;
    }
    return KVIST_OK;
}

void turnover_store_close(void)
{
    kvist_workers_destroy(&store.workers);
    for (uint64_t index = 0; index < store.options.family_count; index++) {
        rocksdb_column_family_handle_destroy(store.families[index]);
    }
    rocksdb_close(store.db);
    rocksdb_options_destroy(store.db_options);
    rocksdb_writeoptions_destroy(store.write_options);
    rocksdb_readoptions_destroy(store.read_options);
}

/* --- Reads and writes ----------------------------------------------------------------------- */

static void write_run(struct kvist_job *job)
{
    struct io *io = (struct io *)job;
    char key[KEY_BYTES];
    char *text = NULL;
    make_key(io->flight->number, key);
    rocksdb_put_cf(store.db,
                   store.write_options,
                   family_of(io->flight->number),
                   key,
                   KEY_BYTES,
                   (const char *)io->flight->memory,
                   store.options.block_bytes,
                   &text);
    check_text(text);
    io->status = KVIST_OK;
}

static void read_run(struct kvist_job *job)
{
    struct io *io = (struct io *)job;
    char key[KEY_BYTES];
    char *text = NULL;
    size_t bytes = 0;
    make_key(io->flight->number, key);
    rocksdb_pinnableslice_t *slice = rocksdb_get_pinned_cf(
        store.db, store.read_options, family_of(io->flight->number), key, KEY_BYTES, &text);
    check_text(text);
    io->status = KVIST_NOT_FOUND;
    if (slice != NULL) {
        const char *value = rocksdb_pinnableslice_value(slice, &bytes);
        KVIST_CHECK(bytes == store.options.block_bytes);
        memcpy(io->flight->memory, value, bytes);
        rocksdb_pinnableslice_destroy(slice);
        io->status = KVIST_OK;
    }
}

/* The oldest go when the values would take more than their share. */
static void remove_oldest(void)
{
    uint64_t live_max = store.options.cap_bytes / 100 * store.options.live_percent;
    while ((store.order_tail - store.order_head) * store.options.block_bytes > live_max) {
        uint64_t number = store.order[store.order_head++ % store.order_capacity];
        char key[KEY_BYTES];
        char *text = NULL;
        make_key(number, key);
        rocksdb_delete_cf(store.db, store.write_options, family_of(number), key, KEY_BYTES, &text);
        check_text(text);
        turnover_gone(number);
    }
}

static void io_done(struct kvist_job *job)
{
    struct io *io = (struct io *)job;
    struct turnover_flight *flight = io->flight;
    io->next = store.free;
    store.free = io;
    turnover_done(flight, io->status);
    if (flight->write) {
        store.order[store.order_tail++ % store.order_capacity] = flight->number;
        remove_oldest();
    }
}

void turnover_store_submit(struct turnover_flight *flight)
{
    struct io *io = store.free;
    store.free = io->next;
    io->flight = flight;
    io->job.run = flight->write ? write_run : read_run;
    io->job.done = io_done;
    KVIST_CHECK(kvist_workers_submit(store.workers, &io->job) == KVIST_OK);
}

void turnover_store_turn(void)
{
    turnover_wait(kvist_workers_fd(store.workers));
    while (kvist_workers_turn(store.workers, TURN_JOBS_MAX) == TURN_JOBS_MAX) {
    }
}

void turnover_store_begin(void)
{
}

void turnover_store_print(void)
{
    (void)printf(" held=%.3f",
                 (double)((store.order_tail - store.order_head) * store.options.block_bytes) /
                     (double)store.options.cap_bytes);
}
