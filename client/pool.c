#include "client/core.h"
#include "proto/shm/layout.h"

#include <stdlib.h>

#define SHAPE_BYTES_MAX 64U

/* --- Open ---------------------------------------------------------------------------------- */

static enum kvist_status check_identity(const struct kvist_pool_options *options,
                                        struct kvist_error *err)
{
    size_t total = 0;
    if (options->field_count == 0 || options->field_count > KVIST_IDENTITY_FIELDS_MAX ||
        options->fields == NULL) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "client",
                               "a pool needs 1 to %u identity fields",
                               KVIST_IDENTITY_FIELDS_MAX);
    }
    for (size_t index = 0; index < options->field_count; index++) {
        const struct kvist_pool_field *field = &options->fields[index];
        if (field->name == NULL || field->name[0] == '\0' ||
            (field->value == NULL && field->value_bytes > 0) ||
            field->value_bytes > KVIST_IDENTITY_BYTES_MAX) {
            return kvist_error_set(
                err, KVIST_INVALID, 0, "client", "identity field %zu is broken", index);
        }
        total += strlen(field->name) + field->value_bytes;
    }
    if (total > KVIST_IDENTITY_BYTES_MAX) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "client",
                               "the identity is over %u bytes; pass a hash of what is long",
                               KVIST_IDENTITY_BYTES_MAX);
    }
    return KVIST_OK;
}

static enum kvist_status check_options(const struct kvist_client *client,
                                       const struct kvist_pool_options *options,
                                       struct kvist_error *err)
{
    if (options == NULL || options->struct_bytes < sizeof(*options)) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, "client", "options lack KVIST_POOL_OPTIONS_INIT");
    }
    if (client->role == KVIST_ROLE_TOOL) {
        return kvist_error_set(err, KVIST_INVALID, 0, "client", "a tool has no pools");
    }
    if (options->slot_bytes == 0 || options->slot_bytes > KVIST_BLOCK_BYTES_MAX) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "client",
                               "slot_bytes is %llu; 1 to %llu are possible",
                               (unsigned long long)options->slot_bytes,
                               (unsigned long long)KVIST_BLOCK_BYTES_MAX);
    }
    if (options->shape_bytes > SHAPE_BYTES_MAX ||
        (options->shape == NULL && options->shape_bytes > 0)) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, "client", "a shape has up to %u bytes", SHAPE_BYTES_MAX);
    }
    return check_identity(options, err);
}

static void free_pool(struct kvist_pool *pool)
{
    for (size_t index = 0; pool->fields != NULL && index < pool->field_count; index++) {
        union {
            const void *borrowed;
            void *owned;
        } name = {pool->fields[index].name}, value = {pool->fields[index].value};
        free(name.owned);
        free(value.owned);
    }
    free(pool->fields);
    free(pool->shape);
    pool->magic = 0;
    free(pool);
}

static void *copy_bytes(const void *bytes, size_t length)
{
    void *copy = kvist_client_alloc(1, length > 0 ? length : 1);
    if (copy != NULL && length > 0) {
        memcpy(copy, bytes, length);
    }
    return copy;
}

static bool copy_fields(struct kvist_pool *pool, const struct kvist_pool_options *options)
{
    pool->fields = kvist_client_alloc(options->field_count, sizeof(*pool->fields));
    if (pool->fields == NULL) {
        return false;
    }
    pool->field_count = options->field_count;
    for (size_t index = 0; index < options->field_count; index++) {
        const struct kvist_pool_field *field = &options->fields[index];
        pool->fields[index].name = copy_bytes(field->name, strlen(field->name) + 1);
        pool->fields[index].value = copy_bytes(field->value, field->value_bytes);
        pool->fields[index].value_bytes = field->value_bytes;
        if (pool->fields[index].name == NULL || pool->fields[index].value == NULL) {
            return false;
        }
    }
    return true;
}

static struct kvist_pool *make_pool(struct kvist_client *client,
                                    const struct kvist_pool_options *options)
{
    struct kvist_pool *pool = kvist_client_alloc(1, sizeof(*pool));
    if (pool == NULL) {
        return NULL;
    }
    pool->magic = KVIST_POOL_MAGIC;
    pool->client = client;
    pool->slot_bytes = kvist_align_up(options->slot_bytes, KVIST_SLOT_ALIGN_BYTES);
    pool->sparse = options->sparse;
    pool->read_only = options->read_only;
    pool->shape_bytes = options->shape_bytes;
    pool->shape = copy_bytes(options->shape, options->shape_bytes);
    if (pool->shape == NULL || !copy_fields(pool, options)) {
        free_pool(pool);
        return NULL;
    }
    return pool;
}

enum kvist_status kvist_pool_open(struct kvist_client *client,
                                  const struct kvist_pool_options *options,
                                  struct kvist_pool **pool_out,
                                  struct kvist_error *err)
{
    enum kvist_status status = check_options(client, options, err);
    if (status != KVIST_OK) {
        return status;
    }
    struct kvist_pool *pool = make_pool(client, options);
    if (pool == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "client", "no memory for a pool");
    }
    (void)pthread_mutex_lock(client->lock);
    while (pool->index < KVIST_SESSION_POOLS_MAX && client->pools[pool->index] != NULL) {
        pool->index++;
    }
    bool has_room = pool->index < KVIST_SESSION_POOLS_MAX;
    if (has_room) {
        client->pools[pool->index] = pool;
        kvist_link_open_pool_locked(client, pool);
    }
    (void)pthread_mutex_unlock(client->lock);
    if (!has_room) {
        free_pool(pool);
        return kvist_error_set(err,
                               KVIST_BUSY,
                               0,
                               "client",
                               "%u pools are open; close one first",
                               KVIST_SESSION_POOLS_MAX);
    }
    *pool_out = pool;
    return KVIST_OK;
}

/* --- Close --------------------------------------------------------------------------------- */

/* Take the pool's view out of an epoch; nobody finds it there any more. */
static struct kvist_view *
detach_view_locked(struct kvist_client *client, struct kvist_epoch *epoch, uint32_t index)
{
    struct kvist_view *view = epoch->views[index];
    if (view != NULL) {
        kvist_view_clear_mapped_locked(client, epoch, view);
        epoch->views[index] = NULL;
    }
    return view;
}

void kvist_pool_close(struct kvist_pool **pool_ref)
{
    if (pool_ref == NULL || *pool_ref == NULL) {
        return;
    }
    struct kvist_pool *pool = *pool_ref;
    struct kvist_client *client = pool->client;
    (void)pthread_mutex_lock(&client->pump_mutex);
    (void)pthread_mutex_lock(client->lock);
    kvist_grant_close_locked(client, pool);
    struct kvist_epoch *epoch = client->current;
    struct kvist_view *view = epoch != NULL ? detach_view_locked(client, epoch, pool->index) : NULL;
    epoch = client->retired;
    uint32_t closing = view != NULL ? 1U << view->ordinal : 0U;
    (void)pthread_mutex_unlock(client->lock);
    if (view != NULL) {
        kvist_view_destroy(client, pool, &view);
    }
    for (; epoch != NULL; epoch = epoch->next) { /* the list is the pumping thread's */
        (void)pthread_mutex_lock(client->lock);
        view = detach_view_locked(client, epoch, pool->index);
        (void)pthread_mutex_unlock(client->lock);
        if (view != NULL) {
            kvist_view_destroy(client, pool, &view);
        }
    }
    (void)pthread_mutex_lock(client->lock);
    client->pools[pool->index] = NULL;
    client->closing |= closing; /* now that it is unmapped */
    kvist_link_close_pools_locked(client);
    (void)pthread_mutex_unlock(client->lock);
    (void)pthread_mutex_unlock(&client->pump_mutex);
    *pool_ref = NULL; /* last: callbacks may compare it */
    free_pool(pool);
}

/* --- Questions ----------------------------------------------------------------------------- */

/* A rank of a read-only pool has what there is; of another one, at least one segment. */
static bool is_mapped_locked(const struct kvist_pool *pool, const struct kvist_view *view)
{
    if (!pool->client->maps) {
        return true;
    }
    uint32_t live = 0;
    for (uint32_t segment = 0; segment < view->map.header.segment_max; segment++) {
        live += atomic_load_explicit(&kvist_map_segment(&view->map, segment)->state,
                                     memory_order_acquire) == KVIST_SEGMENT_LIVE;
    }
    return pool->read_only ? view->mapped_count >= live : view->mapped_count > 0;
}

static bool is_ready_or_refused(const void *ctx)
{
    const struct kvist_pool *pool = ctx;
    if (pool->client->refused || (pool->state == KVIST_POOL_REFUSED && pool->retry_at_us == 0)) {
        return true;
    }
    const struct kvist_view *view = kvist_view_current_locked(pool);
    bool needs_grant = pool->client->schedules && !pool->read_only;
    return pool->state == KVIST_POOL_OPEN && view != NULL && is_mapped_locked(pool, view) &&
           (!needs_grant || view->held_count > 0);
}

/* What a wait that ran out of time waited for. */
static const char *missing_locked(const struct kvist_pool *pool)
{
    const struct kvist_view *view = kvist_view_current_locked(pool);
    if (pool->client->link != KVIST_LINK_UP) {
        return "the daemon is away";
    }
    if (pool->state == KVIST_POOL_REFUSED) {
        return pool->refusal.text;
    }
    if (pool->state != KVIST_POOL_OPEN || view == NULL) {
        return "the daemon has not opened the pool";
    }
    if (!is_mapped_locked(pool, view)) {
        return "no segment of the arena was lent";
    }
    return "no slots were granted; are all ranks of the session there?";
}

enum kvist_status
kvist_pool_wait(struct kvist_pool *pool, uint64_t timeout_us, struct kvist_error *err)
{
    struct kvist_client *client = pool->client;
    enum kvist_status waited = kvist_client_wait_for(client, is_ready_or_refused, pool, timeout_us);
    (void)pthread_mutex_lock(client->lock);
    struct kvist_error why = KVIST_ERROR_INIT;
    if (waited != KVIST_OK) {
        (void)kvist_error_set(&why,
                              KVIST_TIMED_OUT,
                              0,
                              "client",
                              "the pool is not ready after %llu ms: %.160s",
                              (unsigned long long)(timeout_us / 1000),
                              missing_locked(pool));
    } else if (client->refused) {
        why = client->last_error;
    } else if (pool->state == KVIST_POOL_REFUSED) {
        why = pool->refusal;
    }
    (void)pthread_mutex_unlock(client->lock);
    if (why.status != KVIST_OK && err != NULL) {
        *err = why;
    }
    return why.status;
}

void kvist_pool_id(const struct kvist_pool *pool, uint8_t id_out[KVIST_KEY_BYTES])
{
    (void)pthread_mutex_lock(pool->client->lock);
    const struct kvist_view *view = kvist_view_current_locked(pool);
    if (view != NULL) {
        memcpy(id_out, view->pool_id, KVIST_KEY_BYTES);
    } else {
        memset(id_out, 0, KVIST_KEY_BYTES);
    }
    (void)pthread_mutex_unlock(pool->client->lock);
}

uint64_t kvist_pool_slot_bytes(const struct kvist_pool *pool)
{
    return pool->slot_bytes;
}

uint64_t kvist_pool_instance(const struct kvist_pool *pool)
{
    (void)pthread_mutex_lock(pool->client->lock);
    const struct kvist_view *view = kvist_view_current_locked(pool);
    uint64_t instance = view != NULL ? pool->client->current->instance : 0;
    (void)pthread_mutex_unlock(pool->client->lock);
    return instance;
}
