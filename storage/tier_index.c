#include "storage/tier_index.h"

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/fault.h"
#include "storage/disk.h"
#include "storage/tier_codec.h"

#include <rocksdb/c.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY                 ((size_t)KVIST_KEY_BYTES)
#define BLOCK_KEY_BYTES     KVIST_TIER_BLOCK_KEY_BYTES
#define EXTENT_KEY_BYTES    KVIST_TIER_EXTENT_KEY_BYTES
#define EXTENT_PREFIX_BYTES 5U /* of an extent key: all but the offset */
#define REOPEN_US           1000000U
#define CACHE_BYTES         ((size_t)8 << 20)
#define OPEN_FILES_MAX      64
#define LOG_FILE_BYTES      ((size_t)256 << 10)
#define LOG_LEVEL_HEAD      5
#define MANIFEST_BYTES      ((size_t)256 << 10)
#define FIXED_BYTES         (768U << 10) /* logs, manifest, options, directories */
#define RECORD_BYTES        256U         /* both entries of a record in a table file, and its log */

struct kvist_tier_index {
    char *path;
    uint64_t memtable_bytes;
    rocksdb_options_t *options;
    rocksdb_block_based_table_options_t *table_options;
    rocksdb_cache_t *cache;
    rocksdb_readoptions_t *read_get;
    rocksdb_writeoptions_t *write_async;
    rocksdb_writeoptions_t *write_sync;
    pthread_rwlock_t gate;  /* held for reading around each use of db, for writing to reopen it */
    rocksdb_t *db;          /* NULL: closed after errors */
    _Atomic bool failed;    /* a write failed: reopen before the next */
    pthread_mutex_t modify; /* one read-and-write at a time; the members below */
    uint64_t reopened_us;
    bool loading;
    uint32_t load_extent_max;
    uint8_t load_position[BLOCK_KEY_BYTES];
};

/* -- the database --------------------------------------------------------------------------- */

/* Translate and free RocksDB's text; a write that failed means that the database must be reopened.
 */
static enum kvist_status
take_error(struct kvist_tier_index *index, char *text, bool write, struct kvist_error *err)
{
    static const struct {
        const char *words;
        int code;
    } told[] = {{"No space left", ENOSPC}, {"Disk quota", EDQUOT}, {"Permission denied", EACCES},
                {"Read-only file system", EROFS}};
    int code = 0;
    for (size_t at = 0; at < KVIST_ARRAY_COUNT(told); at++) {
        code = strstr(text, told[at].words) != NULL ? told[at].code : code;
    }
    bool corrupt = code == 0 && strncmp(text, "Corruption", 10) == 0;
    enum kvist_status status = corrupt ? KVIST_CORRUPT : kvist_status_from_errno(code);
    status = status == KVIST_OK ? KVIST_SYSTEM : status;
    if (write) {
        atomic_store(&index->failed, true);
    }
    (void)kvist_error_set(err, status, code, "rocksdb", "the index failed: %s", text);
    rocksdb_free(text);
    return status;
}

/* Enter with the database open, else UNAVAILABLE. Each OK is followed by leave(). */
static enum kvist_status enter(struct kvist_tier_index *index, struct kvist_error *err)
{
    (void)pthread_rwlock_rdlock(&index->gate);
    if (index->db == NULL) {
        (void)pthread_rwlock_unlock(&index->gate);
        return kvist_error_set(
            err, KVIST_UNAVAILABLE, 0, "rocksdb", "the index is closed after errors");
    }
    return KVIST_OK;
}

static void leave(struct kvist_tier_index *index)
{
    (void)pthread_rwlock_unlock(&index->gate);
}

static bool options_make(struct kvist_tier_index *index)
{
    char *text = NULL;
    rocksdb_options_t *base = rocksdb_options_create();
    index->options = rocksdb_options_create();
    rocksdb_get_options_from_string(base, "allow_fallocate=false", index->options, &text);
    rocksdb_options_destroy(base);
    if (text != NULL) {
        rocksdb_free(text);
        return false;
    }
    rocksdb_options_t *options = index->options;
    rocksdb_options_set_create_if_missing(options, 1);
    rocksdb_options_set_write_buffer_size(options, index->memtable_bytes);
    rocksdb_options_set_max_write_buffer_number(options, 2);
    rocksdb_options_set_max_total_wal_size(options, index->memtable_bytes);
    rocksdb_options_set_target_file_size_base(options, 2 * index->memtable_bytes);
    rocksdb_options_set_max_bytes_for_level_base(options, 4 * index->memtable_bytes);
    rocksdb_options_set_level0_file_num_compaction_trigger(options, 2);
    rocksdb_options_set_level0_slowdown_writes_trigger(options, 6);
    rocksdb_options_set_level0_stop_writes_trigger(options, 8);
    rocksdb_options_set_compression(options, rocksdb_no_compression); /* hashes do not compress */
    rocksdb_options_set_max_background_jobs(options, 2);
    rocksdb_options_set_max_open_files(options, OPEN_FILES_MAX);
    /* Its own log gets a head when it is opened, and nothing after: see disk.h. */
    rocksdb_options_set_keep_log_file_num(options, 2);
    rocksdb_options_set_max_log_file_size(options, LOG_FILE_BYTES);
    rocksdb_options_set_info_log_level(options, LOG_LEVEL_HEAD);
    rocksdb_options_set_stats_dump_period_sec(options, 0);
    rocksdb_options_set_max_manifest_file_size(options, MANIFEST_BYTES);
    rocksdb_options_set_manifest_preallocation_size(options, 4096);
    rocksdb_options_set_skip_stats_update_on_db_open(options, 1);
    index->cache = rocksdb_cache_create_lru(CACHE_BYTES);
    index->table_options = rocksdb_block_based_options_create();
    rocksdb_block_based_options_set_block_cache(index->table_options, index->cache);
    rocksdb_block_based_options_set_cache_index_and_filter_blocks(index->table_options, 1);
    rocksdb_block_based_options_set_filter_policy(index->table_options,
                                                  rocksdb_filterpolicy_create_bloom_full(10));
    rocksdb_options_set_block_based_table_factory(options, index->table_options);
    index->read_get = rocksdb_readoptions_create();
    index->write_async = rocksdb_writeoptions_create();
    index->write_sync = rocksdb_writeoptions_create();
    rocksdb_writeoptions_set_sync(index->write_sync, 1);
    return true;
}

static rocksdb_t *database_open(struct kvist_tier_index *index, char **text_out)
{
    if (kvist_fault_point("tier.index.open")) {
        *text_out = strdup("IO error: No space left on device");
        return NULL;
    }
    return rocksdb_open(index->options, index->path, text_out);
}

enum kvist_status kvist_tier_index_open(const char *path,
                                        uint64_t memtable_bytes,
                                        struct kvist_tier_index **index_out,
                                        bool *damaged_out,
                                        struct kvist_error *err)
{
    struct kvist_tier_index *index = calloc(1, sizeof(*index));
    if (index == NULL || (index->path = strdup(path)) == NULL) {
        free(index);
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "tier", "no memory for the index");
    }
    index->memtable_bytes = memtable_bytes;
    pthread_rwlockattr_t attributes;
    (void)pthread_rwlockattr_init(&attributes);
    (void)pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    (void)pthread_rwlock_init(&index->gate, &attributes);
    (void)pthread_rwlockattr_destroy(&attributes);
    (void)pthread_mutex_init(&index->modify, NULL);
    if (!options_make(index)) {
        kvist_tier_index_close(&index);
        return kvist_error_set(err, KVIST_BUG, 0, "rocksdb", "an option is not known to it");
    }
    char *text = NULL;
    bool damaged = false;
    enum kvist_status status = kvist_disk_probe(index->path, KVIST_TIER_INDEX_FREE_BYTES, err);
    if (status != KVIST_OK) {
        kvist_tier_index_close(&index);
        return status;
    }
    index->db = database_open(index, &text);
    if (index->db == NULL && strncmp(text, "Corruption", 10) == 0) {
        rocksdb_free(text);
        text = NULL;
        rocksdb_destroy_db(index->options, path, &text);
        if (text == NULL) {
            damaged = true;
            index->db = database_open(index, &text);
        }
    }
    if (text != NULL) {
        status = take_error(index, text, true, err);
        kvist_tier_index_close(&index);
        return status;
    }
    *damaged_out = damaged;
    *index_out = index;
    return KVIST_OK;
}

void kvist_tier_index_close(struct kvist_tier_index **index_inout)
{
    struct kvist_tier_index *index = *index_inout;
    if (index == NULL) {
        return;
    }
    if (index->db != NULL) {
        rocksdb_close(index->db);
    }
    if (index->table_options != NULL) {
        rocksdb_readoptions_destroy(index->read_get);
        rocksdb_writeoptions_destroy(index->write_async);
        rocksdb_writeoptions_destroy(index->write_sync);
        rocksdb_block_based_options_destroy(index->table_options);
        rocksdb_cache_destroy(index->cache);
    }
    if (index->options != NULL) {
        rocksdb_options_destroy(index->options);
    }
    (void)pthread_mutex_destroy(&index->modify);
    (void)pthread_rwlock_destroy(&index->gate);
    free(index->path);
    free(index);
    *index_inout = NULL;
}

static enum kvist_status refuse_failed(struct kvist_error *err)
{
    return kvist_error_set(
        err, KVIST_UNAVAILABLE, 0, "rocksdb", "the index failed, and is tried again");
}

/* Close and open. When it cannot be opened for writing it still answers reads, if it can. */
static enum kvist_status
reopen(struct kvist_tier_index *index, uint64_t free_bytes, struct kvist_error *err)
{
    char *text = NULL;
    enum kvist_status status = kvist_disk_probe(index->path, free_bytes, err);
    if (status != KVIST_OK) {
        return status;
    }
    (void)pthread_rwlock_wrlock(&index->gate);
    if (index->db != NULL) {
        rocksdb_close(index->db);
    }
    index->db = database_open(index, &text);
    if (text == NULL) {
        atomic_store(&index->failed, false);
    } else {
        status = take_error(index, text, true, err);
        text = NULL;
        index->db = rocksdb_open_for_read_only(index->options, index->path, 0, &text);
        if (text != NULL) {
            rocksdb_free(text);
        }
    }
    (void)pthread_rwlock_unlock(&index->gate);
    return status;
}

enum kvist_status kvist_tier_index_ready(struct kvist_tier_index *index,
                                         uint64_t free_bytes,
                                         struct kvist_error *err)
{
    enum kvist_status status = kvist_disk_check(index->path, free_bytes, err);
    if (status != KVIST_OK || !atomic_load(&index->failed)) {
        return status;
    }
    (void)pthread_mutex_lock(&index->modify);
    if (atomic_load(&index->failed)) {
        uint64_t now_us = kvist_clock_now_us();
        if (index->reopened_us != 0 && now_us - index->reopened_us < REOPEN_US) {
            status = refuse_failed(err);
        } else {
            index->reopened_us = now_us;
            status = reopen(index, free_bytes, err);
        }
    }
    (void)pthread_mutex_unlock(&index->modify);
    return status;
}

uint64_t
kvist_tier_index_reserve(uint64_t memtable_bytes, uint64_t disk_bytes, uint64_t records_more)
{
    /* Now, a copy of all of it by a compaction, logs and flushes of two memtables, and growth. */
    return 2 * (disk_bytes + records_more * RECORD_BYTES) + 4 * memtable_bytes + FIXED_BYTES;
}

/* -- blocks --------------------------------------------------------------------------------- */

/* Entered. A malformed value is a miss: the entry is overwritten or removed later. */
static enum kvist_status get_entered(struct kvist_tier_index *index,
                                     const uint8_t *pool_id,
                                     const uint8_t *key,
                                     struct kvist_tier_record *record_out,
                                     struct kvist_error *err)
{
    uint8_t entry_key[BLOCK_KEY_BYTES];
    kvist_tier_block_key(pool_id, key, entry_key);
    char *text = NULL;
    rocksdb_pinnableslice_t *slice = NULL;
    if (kvist_fault_point("tier.index.get")) {
        text = strdup("IO error: Input/output error");
    } else {
        slice = rocksdb_get_pinned(
            index->db, index->read_get, (const char *)entry_key, sizeof(entry_key), &text);
    }
    if (text != NULL) {
        return take_error(index, text, false, err);
    }
    size_t length = 0;
    const char *value = slice != NULL ? rocksdb_pinnableslice_value(slice, &length) : NULL;
    bool found = value != NULL && kvist_tier_block_decode(pool_id, key, value, length, record_out);
    rocksdb_pinnableslice_destroy(slice);
    return found ? KVIST_OK : KVIST_NOT_FOUND;
}

enum kvist_status kvist_tier_index_get(struct kvist_tier_index *index,
                                       const uint8_t pool_id[KVIST_KEY_BYTES],
                                       const uint8_t key[KVIST_KEY_BYTES],
                                       struct kvist_tier_record *record_out,
                                       struct kvist_error *err)
{
    enum kvist_status status = enter(index, err);
    if (status == KVIST_OK) {
        status = get_entered(index, pool_id, key, record_out, err);
        leave(index);
    }
    return status;
}

/* Entered. Writes a batch; the batch is the caller's. */
static enum kvist_status write_entered(struct kvist_tier_index *index,
                                       rocksdb_writebatch_t *batch,
                                       bool sync,
                                       struct kvist_error *err)
{
    char *text = NULL;
    if (kvist_fault_point("tier.index.put")) {
        text = strdup("IO error: No space left on device");
    } else {
        rocksdb_write(index->db, sync ? index->write_sync : index->write_async, batch, &text);
    }
    return text == NULL ? KVIST_OK : take_error(index, text, true, err);
}

/* Whether an entry was counted by who loads, or by who put it. modify is held. */
static bool counts_locked(const struct kvist_tier_index *index,
                          const struct kvist_tier_record *record)
{
    uint8_t entry_key[BLOCK_KEY_BYTES];
    kvist_tier_block_key(record->block.pool_id, record->block.key, entry_key);
    return !index->loading || record->block.extent > index->load_extent_max ||
           memcmp(entry_key, index->load_position, sizeof(entry_key)) <= 0;
}

static bool same_place(const struct kvist_tier_record *a, const struct kvist_tier_record *b)
{
    return a->block.extent == b->block.extent && a->offset == b->offset;
}

static void batch_delete_back(rocksdb_writebatch_t *batch, const struct kvist_tier_record *record)
{
    uint8_t back_key[EXTENT_KEY_BYTES];
    kvist_tier_extent_key(record->block.extent, record->offset, back_key);
    rocksdb_writebatch_delete(batch, (const char *)back_key, sizeof(back_key));
}

static enum kvist_status put_locked(struct kvist_tier_index *index,
                                    const struct kvist_tier_record *record,
                                    const struct kvist_tier_record *old,
                                    struct kvist_error *err)
{
    uint8_t entry_key[BLOCK_KEY_BYTES];
    uint8_t back_key[EXTENT_KEY_BYTES];
    uint8_t value[KVIST_TIER_BLOCK_VALUE_BYTES];
    kvist_tier_block_key(record->block.pool_id, record->block.key, entry_key);
    kvist_tier_extent_key(record->block.extent, record->offset, back_key);
    kvist_tier_block_encode(record, value);
    rocksdb_writebatch_t *batch = rocksdb_writebatch_create();
    rocksdb_writebatch_put(
        batch, (const char *)entry_key, sizeof(entry_key), (const char *)value, sizeof(value));
    rocksdb_writebatch_put(
        batch, (const char *)back_key, sizeof(back_key), (const char *)entry_key + 1, 2 * KEY);
    if (old != NULL) {
        batch_delete_back(batch, old);
    }
    enum kvist_status status = write_entered(index, batch, false, err);
    rocksdb_writebatch_destroy(batch);
    return status;
}

enum kvist_status kvist_tier_index_put(struct kvist_tier_index *index,
                                       const struct kvist_tier_record *record,
                                       const _Atomic uint64_t *generation,
                                       const struct kvist_tier_record *only_at,
                                       struct kvist_tier_record *old_out,
                                       bool *replaced_out,
                                       struct kvist_error *err)
{
    (void)pthread_mutex_lock(&index->modify);
    enum kvist_status status = enter(index, err);
    if (status != KVIST_OK) {
        goto unlock;
    }
    if (record->block.pool_generation != atomic_load(generation)) {
        status = kvist_error_set(err, KVIST_STALE, 0, "tier", "the pool was cleared meanwhile");
        goto leave;
    }
    struct kvist_tier_record old;
    status = get_entered(index, record->block.pool_id, record->block.key, &old, err);
    bool found = status == KVIST_OK;
    if (!found && status != KVIST_NOT_FOUND) {
        goto leave;
    }
    if (only_at != NULL && (!found || !same_place(&old, only_at))) {
        status = kvist_error_set(err, KVIST_STALE, 0, "tier", "the block was written meanwhile");
        goto leave;
    }
    status = put_locked(index, record, found ? &old : NULL, err);
    if (status == KVIST_OK) {
        *replaced_out = found && counts_locked(index, &old);
        if (found) {
            *old_out = old;
        }
    }
leave:
    leave(index);
unlock:
    (void)pthread_mutex_unlock(&index->modify);
    return status;
}

enum kvist_status kvist_tier_index_remove(struct kvist_tier_index *index,
                                          const struct kvist_tier_record *records,
                                          size_t count,
                                          bool *removed_out,
                                          struct kvist_error *err)
{
    rocksdb_writebatch_t *batch = rocksdb_writebatch_create();
    (void)pthread_mutex_lock(&index->modify);
    enum kvist_status status = enter(index, err);
    for (size_t at = 0; status == KVIST_OK && at < count; at++) {
        struct kvist_tier_record now;
        uint8_t entry_key[BLOCK_KEY_BYTES];
        removed_out[at] = false;
        enum kvist_status got =
            get_entered(index, records[at].block.pool_id, records[at].block.key, &now, NULL);
        if (got == KVIST_OK && same_place(&now, &records[at])) {
            kvist_tier_block_key(now.block.pool_id, now.block.key, entry_key);
            rocksdb_writebatch_delete(batch, (const char *)entry_key, sizeof(entry_key));
            batch_delete_back(batch, &now);
            removed_out[at] = counts_locked(index, &now);
        }
    }
    if (status == KVIST_OK) {
        if (rocksdb_writebatch_count(batch) > 0) {
            status = write_entered(index, batch, false, err);
        }
        leave(index);
    }
    (void)pthread_mutex_unlock(&index->modify);
    rocksdb_writebatch_destroy(batch);
    return status;
}

/* -- scans ---------------------------------------------------------------------------------- */

/* An iterator over [from, to), that leaves the block cache alone. */
struct scan {
    rocksdb_readoptions_t *options;
    rocksdb_iterator_t *iterator;
    uint8_t end[BLOCK_KEY_BYTES + 1];
};

/* The end is the prefix with its last byte one up: no prefix here ends in 0xff, save by a carry. */
static void scan_begin(struct scan *scan,
                       struct kvist_tier_index *index,
                       const uint8_t *prefix,
                       size_t prefix_bytes,
                       const uint8_t *from,
                       size_t from_bytes)
{
    memcpy(scan->end, prefix, prefix_bytes);
    size_t end_bytes = prefix_bytes;
    while (scan->end[end_bytes - 1] == 0xff) {
        end_bytes--; /* the first byte is a letter, so this ends */
    }
    scan->end[end_bytes - 1]++;
    scan->options = rocksdb_readoptions_create();
    rocksdb_readoptions_set_fill_cache(scan->options, 0);
    rocksdb_readoptions_set_iterate_upper_bound(scan->options, (const char *)scan->end, end_bytes);
    scan->iterator = rocksdb_create_iterator(index->db, scan->options);
    rocksdb_iter_seek(scan->iterator, (const char *)from, from_bytes);
}

static enum kvist_status
scan_end(struct scan *scan, struct kvist_tier_index *index, struct kvist_error *err)
{
    char *text = NULL;
    rocksdb_iter_get_error(scan->iterator, &text);
    rocksdb_iter_destroy(scan->iterator);
    rocksdb_readoptions_destroy(scan->options);
    return text == NULL ? KVIST_OK : take_error(index, text, false, err);
}

static void scan_drop_current(struct scan *scan, struct kvist_tier_index *index)
{
    size_t key_bytes = 0;
    char *text = NULL;
    const char *key = rocksdb_iter_key(scan->iterator, &key_bytes);
    rocksdb_delete(index->db, index->write_async, key, key_bytes, &text);
    if (text != NULL) {
        (void)take_error(index, text, true, NULL);
    }
}

/* Entered, modify held. Decoded "b" entries from where the walk is; malformed ones go. */
static enum kvist_status collect_locked(struct kvist_tier_index *index,
                                        const uint8_t *prefix,
                                        size_t prefix_bytes,
                                        uint32_t extent_max,
                                        struct kvist_tier_walk *walk,
                                        struct kvist_error *err)
{
    uint8_t from[BLOCK_KEY_BYTES + 1];
    size_t from_bytes = prefix_bytes;
    memcpy(from, prefix, prefix_bytes);
    if (walk->started) {
        kvist_tier_block_key(walk->pool_id, walk->key, from);
        from[BLOCK_KEY_BYTES] = 0; /* just after it */
        from_bytes = sizeof(from);
    }
    struct scan scan;
    walk->count = 0;
    scan_begin(&scan, index, prefix, prefix_bytes, from, from_bytes);
    for (; walk->count < KVIST_TIER_BATCH && rocksdb_iter_valid(scan.iterator);
         rocksdb_iter_next(scan.iterator)) {
        size_t key_bytes = 0;
        size_t value_bytes = 0;
        const uint8_t *key = (const uint8_t *)rocksdb_iter_key(scan.iterator, &key_bytes);
        const char *value = rocksdb_iter_value(scan.iterator, &value_bytes);
        struct kvist_tier_record *record = &walk->records[walk->count];
        if (key_bytes != BLOCK_KEY_BYTES ||
            !kvist_tier_block_decode(key + 1, key + 1 + KEY, value, value_bytes, record)) {
            scan_drop_current(&scan, index);
            continue;
        }
        walk->started = true;
        memcpy(walk->pool_id, key + 1, KEY);
        memcpy(walk->key, key + 1 + KEY, KEY);
        if (record->block.extent <= extent_max) {
            walk->count++;
        }
    }
    walk->end = walk->count < KVIST_TIER_BATCH;
    return scan_end(&scan, index, err);
}

void kvist_tier_index_load_begin(struct kvist_tier_index *index, uint32_t extent_max)
{
    (void)pthread_mutex_lock(&index->modify);
    index->load_extent_max = extent_max;
    index->loading = true;
    (void)pthread_mutex_unlock(&index->modify);
}

enum kvist_status kvist_tier_index_load(struct kvist_tier_index *index,
                                        struct kvist_tier_walk *walk,
                                        struct kvist_error *err)
{
    const uint8_t prefix[] = {KVIST_TIER_BLOCK_PREFIX};
    (void)pthread_mutex_lock(&index->modify);
    enum kvist_status status = enter(index, err);
    if (status == KVIST_OK) {
        status = collect_locked(index, prefix, sizeof(prefix), index->load_extent_max, walk, err);
        leave(index);
    }
    index->loading = status != KVIST_OK || !walk->end;
    if (status == KVIST_OK) {
        kvist_tier_block_key(walk->pool_id, walk->key, index->load_position);
    }
    (void)pthread_mutex_unlock(&index->modify);
    return status;
}

enum kvist_status kvist_tier_index_walk_pool(struct kvist_tier_index *index,
                                             const uint8_t pool_id[KVIST_KEY_BYTES],
                                             struct kvist_tier_walk *walk,
                                             struct kvist_error *err)
{
    uint8_t prefix[1 + KEY];
    prefix[0] = KVIST_TIER_BLOCK_PREFIX;
    memcpy(prefix + 1, pool_id, KEY);
    (void)pthread_mutex_lock(&index->modify);
    enum kvist_status status = enter(index, err);
    if (status == KVIST_OK) {
        status = collect_locked(index, prefix, sizeof(prefix), UINT32_MAX, walk, err);
        leave(index);
    }
    (void)pthread_mutex_unlock(&index->modify);
    return status;
}

enum kvist_status kvist_tier_index_walk_extent(struct kvist_tier_index *index,
                                               uint32_t extent,
                                               struct kvist_tier_walk *walk,
                                               struct kvist_error *err)
{
    uint8_t from[EXTENT_KEY_BYTES];
    kvist_tier_extent_key(extent, walk->started ? walk->offset + 1 : 0, from);
    enum kvist_status status = enter(index, err);
    if (status != KVIST_OK) {
        return status;
    }
    struct scan scan;
    size_t seen = 0;
    walk->count = 0;
    scan_begin(&scan, index, from, EXTENT_PREFIX_BYTES, from, sizeof(from));
    for (; seen < KVIST_TIER_BATCH && rocksdb_iter_valid(scan.iterator);
         rocksdb_iter_next(scan.iterator)) {
        size_t key_bytes = 0;
        size_t value_bytes = 0;
        const uint8_t *key = (const uint8_t *)rocksdb_iter_key(scan.iterator, &key_bytes);
        const uint8_t *value = (const uint8_t *)rocksdb_iter_value(scan.iterator, &value_bytes);
        seen++;
        if (key_bytes != EXTENT_KEY_BYTES || value_bytes != KVIST_TIER_EXTENT_VALUE_BYTES) {
            scan_drop_current(&scan, index);
            continue;
        }
        struct kvist_tier_record *record = &walk->records[walk->count];
        walk->started = true;
        walk->offset = kvist_tier_extent_key_offset(key);
        if (get_entered(index, value, value + KEY, record, NULL) == KVIST_OK &&
            record->block.extent == extent && record->offset == walk->offset) {
            walk->count++;
        }
    }
    walk->end = seen < KVIST_TIER_BATCH;
    status = scan_end(&scan, index, err);
    leave(index);
    return status;
}

enum kvist_status kvist_tier_index_forget_extent(struct kvist_tier_index *index,
                                                 uint32_t extent,
                                                 struct kvist_error *err)
{
    uint8_t from[EXTENT_KEY_BYTES];
    uint8_t to[EXTENT_KEY_BYTES];
    kvist_tier_extent_key(extent, 0, from);
    kvist_tier_extent_key(extent + 1, 0, to);
    enum kvist_status status = enter(index, err);
    if (status == KVIST_OK) {
        rocksdb_writebatch_t *batch = rocksdb_writebatch_create();
        rocksdb_writebatch_delete_range(
            batch, (const char *)from, sizeof(from), (const char *)to, sizeof(to));
        status = write_entered(index, batch, false, err);
        rocksdb_writebatch_destroy(batch);
        leave(index);
    }
    return status;
}

enum kvist_status kvist_tier_index_extent_last(struct kvist_tier_index *index,
                                               uint32_t *extent_out,
                                               struct kvist_error *err)
{
    const uint8_t prefix[] = {KVIST_TIER_EXTENT_PREFIX};
    uint32_t extent = 0;
    enum kvist_status status = enter(index, err);
    if (status != KVIST_OK) {
        return status;
    }
    struct scan scan;
    scan_begin(&scan, index, prefix, sizeof(prefix), prefix, sizeof(prefix));
    rocksdb_iter_seek_to_last(scan.iterator);
    if (rocksdb_iter_valid(scan.iterator)) {
        size_t key_bytes = 0;
        const uint8_t *key = (const uint8_t *)rocksdb_iter_key(scan.iterator, &key_bytes);
        if (key_bytes == EXTENT_KEY_BYTES) {
            extent = kvist_tier_extent_key_number(key);
        }
    }
    status = scan_end(&scan, index, err);
    leave(index);
    if (status == KVIST_OK) {
        *extent_out = extent;
    }
    return status;
}

/* -- pools ---------------------------------------------------------------------------------- */

enum kvist_status kvist_tier_index_put_pool(struct kvist_tier_index *index,
                                            const struct kvist_tier_pool *pool,
                                            struct kvist_error *err)
{
    uint8_t key[KVIST_TIER_POOL_KEY_BYTES];
    uint8_t value[KVIST_TIER_POOL_VALUE_BYTES];
    kvist_tier_pool_key(pool->pool_id, key);
    kvist_tier_pool_encode(pool, value);
    enum kvist_status status = enter(index, err);
    if (status == KVIST_OK) {
        rocksdb_writebatch_t *batch = rocksdb_writebatch_create();
        rocksdb_writebatch_put(
            batch, (const char *)key, sizeof(key), (const char *)value, sizeof(value));
        status = write_entered(index, batch, true, err);
        rocksdb_writebatch_destroy(batch);
        leave(index);
    }
    return status;
}

enum kvist_status kvist_tier_index_forget_pool(struct kvist_tier_index *index,
                                               const uint8_t pool_id[KVIST_KEY_BYTES],
                                               struct kvist_error *err)
{
    uint8_t key[KVIST_TIER_POOL_KEY_BYTES];
    kvist_tier_pool_key(pool_id, key);
    enum kvist_status status = enter(index, err);
    if (status == KVIST_OK) {
        rocksdb_writebatch_t *batch = rocksdb_writebatch_create();
        rocksdb_writebatch_delete(batch, (const char *)key, sizeof(key));
        status = write_entered(index, batch, false, err);
        rocksdb_writebatch_destroy(batch);
        leave(index);
    }
    return status;
}

/* Entered. */
static bool pool_has_entries(struct kvist_tier_index *index, const uint8_t *pool_id)
{
    uint8_t prefix[1 + KEY];
    struct scan scan;
    prefix[0] = KVIST_TIER_BLOCK_PREFIX;
    memcpy(prefix + 1, pool_id, KEY);
    scan_begin(&scan, index, prefix, sizeof(prefix), prefix, sizeof(prefix));
    bool valid = rocksdb_iter_valid(scan.iterator) != 0;
    return scan_end(&scan, index, NULL) != KVIST_OK || valid;
}

enum kvist_status kvist_tier_index_pools(struct kvist_tier_index *index,
                                         struct kvist_tier_pool *pools_out,
                                         size_t capacity,
                                         size_t *count_out,
                                         struct kvist_error *err)
{
    const uint8_t prefix[] = {KVIST_TIER_POOL_PREFIX};
    size_t count = 0;
    enum kvist_status status = enter(index, err);
    if (status != KVIST_OK) {
        return status;
    }
    struct scan scan;
    scan_begin(&scan, index, prefix, sizeof(prefix), prefix, sizeof(prefix));
    for (; count < capacity && rocksdb_iter_valid(scan.iterator);
         rocksdb_iter_next(scan.iterator)) {
        size_t key_bytes = 0;
        size_t value_bytes = 0;
        const uint8_t *key = (const uint8_t *)rocksdb_iter_key(scan.iterator, &key_bytes);
        const char *value = rocksdb_iter_value(scan.iterator, &value_bytes);
        if (kvist_tier_pool_decode(key, key_bytes, value, value_bytes, &pools_out[count]) &&
            pool_has_entries(index, pools_out[count].pool_id)) {
            count++;
        } else {
            scan_drop_current(&scan, index);
        }
    }
    status = scan_end(&scan, index, err);
    leave(index);
    if (status == KVIST_OK) {
        *count_out = count;
    }
    return status;
}

enum kvist_status kvist_tier_index_sync(struct kvist_tier_index *index, struct kvist_error *err)
{
    char *text = NULL;
    enum kvist_status status = enter(index, err);
    bool failed = kvist_fault_point("tier.index.sync") || atomic_load(&index->failed);
    if (status == KVIST_OK && failed) {
        leave(index);
        return refuse_failed(err); /* with assertions, its log takes no second failure */
    }
    if (status == KVIST_OK) {
        rocksdb_flush_wal(index->db, 1, &text);
        status = text == NULL ? KVIST_OK : take_error(index, text, true, err);
        leave(index);
    }
    return status;
}

void kvist_tier_index_compact(struct kvist_tier_index *index)
{
    if (enter(index, NULL) == KVIST_OK) {
        rocksdb_compact_range(index->db, NULL, 0, NULL, 0);
        leave(index);
    }
}
