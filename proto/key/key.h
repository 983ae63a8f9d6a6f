/*
 * key - names of blocks and pools.
 *
 * Role        makes 32-byte keys from what engines have, pool ids from identities, and the seed of
 *             a block's checksum.
 * Shapes      identity digest: SHA-256 over "kvist identity 1", then for each field, in the given
 *             order: u32 LE name length, name, u64 LE value length, value. The tenant goes in as a
 *             last field, put there by the daemon, which knows it.
 * Threads     any
 * Errors      INVALID: a field beyond the limits; NO_MEMORY from the crypto library
 * Source      FIPS 180-4 SHA-256; libcrypto EVP; xxHash XXH3-64
 */
#ifndef KVIST_KEY_KEY_H
#define KVIST_KEY_KEY_H

#include <kvist/error.h>
#include <kvist/limits.h>

#include <stddef.h>
#include <stdint.h>

struct kvist_identity_field {
    const char *name; /* UTF-8, borrowed */
    const void *value;
    size_t value_bytes;
};

/**
 * Make a key from an engine's key: up to 32 bytes are zero-extended, longer ones are hashed.
 *
 * @param bytes  [length], length 1..4096
 */
KVIST_MUST_USE enum kvist_status
kvist_key_make(const void *bytes, size_t length, uint8_t key_out[KVIST_KEY_BYTES]);

/**
 * Hash an identity to the pool id.
 *
 * @param fields  [field_count], in the order that the engine's plugin fixes
 * @param tenant  "" for the default tenant
 */
KVIST_MUST_USE enum kvist_status kvist_identity_hash(const struct kvist_identity_field *fields,
                                                     size_t field_count,
                                                     const char *tenant,
                                                     uint8_t pool_id_out[KVIST_KEY_BYTES],
                                                     struct kvist_error *err);

/** Seed of a block's XXH3-64: binds the checksum to the key and the pool. */
uint64_t kvist_key_checksum_seed(const uint8_t key[KVIST_KEY_BYTES],
                                 const uint8_t pool_id[KVIST_KEY_BYTES]);

/** First 8 bytes of a key, little-endian, as parent tags have them; never 0. */
uint64_t kvist_key_tag(const uint8_t key[KVIST_KEY_BYTES]);

/** Lower-case hex of a key, NUL-terminated. */
void kvist_key_format(const uint8_t key[KVIST_KEY_BYTES], char text_out[2 * KVIST_KEY_BYTES + 1]);

/** Parse 64 hex digits. INVALID for anything else. */
KVIST_MUST_USE enum kvist_status kvist_key_parse(const char *text,
                                                 uint8_t key_out[KVIST_KEY_BYTES]);

#endif
