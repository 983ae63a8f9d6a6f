#include "daemon/pool.h"

#include "daemon/config.h"
#include "proto/key/key.h"
#include "proto/shm/memfd.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SHAPES_MAGIC    0x316570616873766bULL /* "kvshape1" */
#define VALUE_SHOWN_MAX ((size_t)40) /* a longer value is a digest or a list: not for people */

static bool is_printable(const ProtobufCBinaryData *value)
{
    for (size_t index = 0; index < value->len; index++) {
        if (value->data[index] < 0x20 || value->data[index] > 0x7e || value->data[index] == '"') {
            return false;
        }
    }
    return value->len > 0 && value->len <= VALUE_SHOWN_MAX;
}

/* "name=value" of the fields that people can read, as many as fit. */
static void describe(const Kvist__Wire__OpenPool *open, char *text_out, size_t bytes)
{
    size_t length = 0;
    text_out[0] = '\0';
    for (size_t index = 0; index < open->n_fields; index++) {
        const Kvist__Wire__OpenPool__Field *field = open->fields[index];
        const ProtobufCBinaryData name = {
            .len = strlen(field->name),
            .data = (uint8_t *)field->name,
        };
        if (!is_printable(&name) || !is_printable(&field->value)) {
            continue;
        }
        char part[2 * VALUE_SHOWN_MAX + 4];
        int part_length = snprintf(part,
                                   sizeof(part),
                                   "%s%s=%.*s",
                                   length > 0 ? " " : "",
                                   field->name,
                                   (int)field->value.len,
                                   (const char *)field->value.data);
        if (part_length > 0 && length + (size_t)part_length < bytes) {
            memcpy(text_out + length, part, (size_t)part_length + 1);
            length += (size_t)part_length;
        }
    }
}

enum kvist_status kvist_pool_describe(const Kvist__Wire__OpenPool *open,
                                      const char *tenant,
                                      struct kvist_tier_pool *pool_out,
                                      struct kvist_error *err)
{
    struct kvist_identity_field fields[KVIST_IDENTITY_FIELDS_MAX];
    if (open->n_fields > KVIST_IDENTITY_FIELDS_MAX) {
        return kvist_error_set(err, KVIST_INVALID, 0, "open_pool", "too many identity fields");
    }
    for (size_t index = 0; index < open->n_fields; index++) {
        fields[index].name = open->fields[index]->name;
        fields[index].value = open->fields[index]->value.data;
        fields[index].value_bytes = open->fields[index]->value.len;
    }
    struct kvist_tier_pool pool = {
        .slot_bytes = open->slot_bytes,
        .sparse = open->sparse,
    };
    bool is_default = strcmp(tenant, KVIST_TENANT_DEFAULT) == 0;
    enum kvist_status status =
        kvist_identity_hash(fields, open->n_fields, is_default ? "" : tenant, pool.pool_id, err);
    if (status != KVIST_OK) {
        return status;
    }
    (void)snprintf(pool.tenant, sizeof(pool.tenant), "%s", tenant);
    describe(open, pool.description, sizeof(pool.description));
    *pool_out = pool;
    return KVIST_OK;
}

enum kvist_status kvist_shapes_open(
    int fd, uint64_t arena, struct kvist_shapes **shapes_out, int *fd_out, struct kvist_error *err)
{
    char name[KVIST_MEMFD_NAME_BYTES + 1];
    const uint64_t bytes = sizeof(**shapes_out);
    void *map = NULL;
    kvist_memfd_name(KVIST_SHAPES_NAME[0], 0, arena, name);
    if (fd >= 0) {
        bool fits = kvist_memfd_is_named(fd, name) &&
                    kvist_memfd_check_own(fd, bytes, NULL) == KVIST_OK &&
                    kvist_memfd_map(fd, bytes, KVIST_MEMFD_WRITE, &map, NULL) == KVIST_OK;
        (void)close(fd);
        if (fits && ((struct kvist_shapes *)map)->magic == SHAPES_MAGIC) {
            *shapes_out = map;
            *fd_out = -1;
            return KVIST_OK;
        }
        kvist_memfd_unmap(&map, bytes);
    }
    int fresh = -1;
    enum kvist_status status = kvist_memfd_create(name, bytes, &fresh, err);
    if (status != KVIST_OK) {
        return status;
    }
    status = kvist_memfd_map(fresh, bytes, KVIST_MEMFD_WRITE, &map, err);
    if (status != KVIST_OK) {
        (void)close(fresh);
        return status;
    }
    *shapes_out = map;
    (*shapes_out)->magic = SHAPES_MAGIC;
    *fd_out = fresh;
    return KVIST_OK;
}

void kvist_shapes_close(struct kvist_shapes **shapes)
{
    void *map = *shapes;
    *shapes = NULL;
    kvist_memfd_unmap(&map, sizeof(**shapes));
}

enum kvist_status kvist_shapes_check(struct kvist_shapes *shapes,
                                     const uint8_t pool_id[KVIST_KEY_BYTES],
                                     uint32_t rank,
                                     const ProtobufCBinaryData *shape,
                                     struct kvist_error *err)
{
    if (shape->len == 0 || shape->len > KVIST_KEY_BYTES) {
        return KVIST_OK;
    }
    struct kvist_shape *oldest = &shapes->entries[0];
    for (size_t index = 0; index < KVIST_SHAPES_MAX; index++) {
        struct kvist_shape *entry = &shapes->entries[index];
        if (entry->shape_bytes != 0 && entry->rank == rank &&
            memcmp(entry->pool_id, pool_id, KVIST_KEY_BYTES) == 0) {
            entry->used = ++shapes->uses;
            return entry->shape_bytes == shape->len &&
                           memcmp(entry->shape, shape->data, shape->len) == 0
                       ? KVIST_OK
                       : kvist_error_set(err,
                                         KVIST_INVALID,
                                         0,
                                         "open_pool",
                                         "rank %u has other tensors than the engines that share "
                                         "this pool: its identity lacks what makes them differ",
                                         rank);
        }
        oldest = entry->used < oldest->used ? entry : oldest;
    }
    /* Free until it is whole: a kill may come between. */
    oldest->shape_bytes = 0;
    atomic_signal_fence(memory_order_seq_cst);
    memcpy(oldest->pool_id, pool_id, KVIST_KEY_BYTES);
    memcpy(oldest->shape, shape->data, shape->len);
    oldest->rank = rank;
    oldest->used = ++shapes->uses;
    atomic_signal_fence(memory_order_seq_cst);
    oldest->shape_bytes = (uint32_t)shape->len;
    return KVIST_OK;
}
