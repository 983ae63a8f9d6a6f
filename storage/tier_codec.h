/*
 * tier_codec - keys and values of the tier's index.
 *
 * Shapes      "b" pool key -> version, extent, offset, parent tag, generation, length, checksum
 *             "x" extent offset (both big-endian, so that they sort) -> pool key
 *             "p" pool -> version, slot bytes, generation, sparse, tenant, description
 *             other integers little-endian
 * Threads     any
 * Errors      decoding answers false for what is malformed, or of another version
 */
#ifndef KVIST_STORAGE_TIER_CODEC_H
#define KVIST_STORAGE_TIER_CODEC_H

#include "storage/record.h"

#define KVIST_TIER_BLOCK_PREFIX       'b'
#define KVIST_TIER_EXTENT_PREFIX      'x'
#define KVIST_TIER_POOL_PREFIX        'p'
#define KVIST_TIER_BLOCK_KEY_BYTES    (1U + 2U * KVIST_KEY_BYTES)
#define KVIST_TIER_EXTENT_KEY_BYTES   13U
#define KVIST_TIER_POOL_KEY_BYTES     (1U + KVIST_KEY_BYTES)
#define KVIST_TIER_BLOCK_VALUE_BYTES  48U
#define KVIST_TIER_EXTENT_VALUE_BYTES ((size_t)2 * KVIST_KEY_BYTES)
#define KVIST_TIER_POOL_VALUE_BYTES   216U

void kvist_tier_block_key(const uint8_t pool_id[KVIST_KEY_BYTES],
                          const uint8_t key[KVIST_KEY_BYTES],
                          uint8_t key_out[KVIST_TIER_BLOCK_KEY_BYTES]);
void kvist_tier_block_encode(const struct kvist_tier_record *record,
                             uint8_t value_out[KVIST_TIER_BLOCK_VALUE_BYTES]);
bool kvist_tier_block_decode(const uint8_t pool_id[KVIST_KEY_BYTES],
                             const uint8_t key[KVIST_KEY_BYTES],
                             const void *value,
                             size_t value_bytes,
                             struct kvist_tier_record *record_out);

void kvist_tier_extent_key(uint32_t extent,
                           uint64_t offset,
                           uint8_t key_out[KVIST_TIER_EXTENT_KEY_BYTES]);
uint32_t kvist_tier_extent_key_number(const uint8_t key[KVIST_TIER_EXTENT_KEY_BYTES]);
uint64_t kvist_tier_extent_key_offset(const uint8_t key[KVIST_TIER_EXTENT_KEY_BYTES]);

void kvist_tier_pool_key(const uint8_t pool_id[KVIST_KEY_BYTES],
                         uint8_t key_out[KVIST_TIER_POOL_KEY_BYTES]);
void kvist_tier_pool_encode(const struct kvist_tier_pool *pool,
                            uint8_t value_out[KVIST_TIER_POOL_VALUE_BYTES]);
bool kvist_tier_pool_decode(const uint8_t *key,
                            size_t key_bytes,
                            const void *value,
                            size_t value_bytes,
                            struct kvist_tier_pool *pool_out);

#endif
