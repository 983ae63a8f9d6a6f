#include "storage/tier_codec.h"

#include <stdio.h>
#include <string.h>

#define VALUE_VERSION 1U
#define OFFSET_MAX    (1ULL << 62) /* the end of a record is a file offset, too */

/* Value of a "b" entry. */
struct block_value {
    uint32_t version;
    uint32_t extent;
    uint64_t offset;
    uint64_t parent_tag;
    uint64_t pool_generation;
    uint64_t block_bytes;
    uint64_t checksum;
};

/* Value of a "p" entry. */
struct pool_value {
    uint32_t version;
    uint32_t sparse;
    uint64_t slot_bytes;
    uint64_t generation;
    char tenant[KVIST_TENANT_BYTES_MAX + 1];
    char description[128];
};

_Static_assert(sizeof(struct block_value) == KVIST_TIER_BLOCK_VALUE_BYTES, "on disk");
_Static_assert(sizeof(struct pool_value) == KVIST_TIER_POOL_VALUE_BYTES, "on disk");

void kvist_tier_block_key(const uint8_t pool_id[KVIST_KEY_BYTES],
                          const uint8_t key[KVIST_KEY_BYTES],
                          uint8_t key_out[KVIST_TIER_BLOCK_KEY_BYTES])
{
    key_out[0] = KVIST_TIER_BLOCK_PREFIX;
    memcpy(key_out + 1, pool_id, KVIST_KEY_BYTES);
    memcpy(key_out + 1 + KVIST_KEY_BYTES, key, KVIST_KEY_BYTES);
}

void kvist_tier_block_encode(const struct kvist_tier_record *record,
                             uint8_t value_out[KVIST_TIER_BLOCK_VALUE_BYTES])
{
    struct block_value value = {
        .version = VALUE_VERSION,
        .extent = record->block.extent,
        .offset = record->offset,
        .parent_tag = record->block.parent_tag,
        .pool_generation = record->block.pool_generation,
        .block_bytes = record->block.block_bytes,
        .checksum = record->block.checksum,
    };
    memcpy(value_out, &value, sizeof(value));
}

bool kvist_tier_block_decode(const uint8_t pool_id[KVIST_KEY_BYTES],
                             const uint8_t key[KVIST_KEY_BYTES],
                             const void *bytes,
                             size_t value_bytes,
                             struct kvist_tier_record *record_out)
{
    struct block_value value;
    if (value_bytes != sizeof(value)) {
        return false;
    }
    memcpy(&value, bytes, sizeof(value));
    if (value.version != VALUE_VERSION || value.extent == 0 || value.block_bytes == 0 ||
        value.block_bytes > KVIST_BLOCK_BYTES_MAX || value.offset < KVIST_RECORD_PAGE_BYTES ||
        value.offset % KVIST_RECORD_PAGE_BYTES != 0 || value.offset > OFFSET_MAX) {
        return false;
    }
    memset(record_out, 0, sizeof(*record_out));
    memcpy(record_out->block.pool_id, pool_id, KVIST_KEY_BYTES);
    memcpy(record_out->block.key, key, KVIST_KEY_BYTES);
    record_out->block.parent_tag = value.parent_tag;
    record_out->block.pool_generation = value.pool_generation;
    record_out->block.block_bytes = value.block_bytes;
    record_out->block.checksum = value.checksum;
    record_out->block.extent = value.extent;
    record_out->offset = value.offset;
    return true;
}

void kvist_tier_extent_key(uint32_t extent,
                           uint64_t offset,
                           uint8_t key_out[KVIST_TIER_EXTENT_KEY_BYTES])
{
    key_out[0] = KVIST_TIER_EXTENT_PREFIX;
    for (unsigned index = 0; index < 4; index++) {
        key_out[1 + index] = (uint8_t)(extent >> (24 - 8 * index));
    }
    for (unsigned index = 0; index < 8; index++) {
        key_out[5 + index] = (uint8_t)(offset >> (56 - 8 * index));
    }
}

uint32_t kvist_tier_extent_key_number(const uint8_t key[KVIST_TIER_EXTENT_KEY_BYTES])
{
    uint32_t extent = 0;
    for (unsigned index = 0; index < 4; index++) {
        extent = extent << 8 | key[1 + index];
    }
    return extent;
}

uint64_t kvist_tier_extent_key_offset(const uint8_t key[KVIST_TIER_EXTENT_KEY_BYTES])
{
    uint64_t offset = 0;
    for (unsigned index = 0; index < 8; index++) {
        offset = offset << 8 | key[5 + index];
    }
    return offset;
}

void kvist_tier_pool_key(const uint8_t pool_id[KVIST_KEY_BYTES],
                         uint8_t key_out[KVIST_TIER_POOL_KEY_BYTES])
{
    key_out[0] = KVIST_TIER_POOL_PREFIX;
    memcpy(key_out + 1, pool_id, KVIST_KEY_BYTES);
}

void kvist_tier_pool_encode(const struct kvist_tier_pool *pool,
                            uint8_t value_out[KVIST_TIER_POOL_VALUE_BYTES])
{
    struct pool_value value;
    memset(&value, 0, sizeof(value));
    value.version = VALUE_VERSION;
    value.sparse = pool->sparse ? 1 : 0;
    value.slot_bytes = pool->slot_bytes;
    value.generation = pool->generation;
    (void)snprintf(value.tenant, sizeof(value.tenant), "%s", pool->tenant);
    (void)snprintf(value.description, sizeof(value.description), "%s", pool->description);
    memcpy(value_out, &value, sizeof(value));
}

bool kvist_tier_pool_decode(const uint8_t *key,
                            size_t key_bytes,
                            const void *bytes,
                            size_t value_bytes,
                            struct kvist_tier_pool *pool_out)
{
    struct pool_value value;
    if (key_bytes != KVIST_TIER_POOL_KEY_BYTES || value_bytes != sizeof(value)) {
        return false;
    }
    memcpy(&value, bytes, sizeof(value));
    if (value.version != VALUE_VERSION || value.slot_bytes < KVIST_BLOCK_BYTES_MIN ||
        value.slot_bytes > KVIST_BLOCK_BYTES_MAX ||
        value.slot_bytes % KVIST_SLOT_ALIGN_BYTES != 0 ||
        memchr(value.tenant, '\0', sizeof(value.tenant)) == NULL ||
        memchr(value.description, '\0', sizeof(value.description)) == NULL) {
        return false;
    }
    memset(pool_out, 0, sizeof(*pool_out));
    memcpy(pool_out->pool_id, key + 1, KVIST_KEY_BYTES);
    pool_out->slot_bytes = value.slot_bytes;
    pool_out->generation = value.generation;
    pool_out->sparse = value.sparse != 0;
    memcpy(pool_out->tenant, value.tenant, sizeof(pool_out->tenant));
    memcpy(pool_out->description, value.description, sizeof(pool_out->description));
    return true;
}
