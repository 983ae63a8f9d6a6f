#include "proto/key/key.h"

#include <openssl/evp.h>

#include <stdbool.h>
#include <string.h>

#define KEY_SOURCE_BYTES_MAX 4096U
#define IDENTITY_DOMAIN      "kvist identity 1"
#define TENANT_FIELD         "tenant"
#define KEY_TEXT_LENGTH      ((size_t)2 * KVIST_KEY_BYTES)

static enum kvist_status no_crypto(struct kvist_error *err)
{
    return kvist_error_set(err, KVIST_NO_MEMORY, 0, "libcrypto", "SHA-256 is not available");
}

static uint64_t load_le64(const uint8_t *bytes)
{
    uint64_t value = 0;
    for (unsigned index = 0; index < 8; index++) {
        value |= (uint64_t)bytes[index] << (8 * index);
    }
    return value;
}

static void store_le(uint8_t *bytes, uint64_t value, unsigned width)
{
    for (unsigned index = 0; index < width; index++) {
        bytes[index] = (uint8_t)(value >> (8 * index));
    }
}

enum kvist_status kvist_key_make(const void *bytes, size_t length, uint8_t key_out[KVIST_KEY_BYTES])
{
    if (length == 0 || length > KEY_SOURCE_BYTES_MAX) {
        return KVIST_INVALID;
    }
    if (length > KVIST_KEY_BYTES) {
        uint8_t digest[KVIST_KEY_BYTES];
        if (EVP_Digest(bytes, length, digest, NULL, EVP_sha256(), NULL) != 1) {
            return no_crypto(NULL);
        }
        memcpy(key_out, digest, sizeof(digest));
        return KVIST_OK;
    }
    memcpy(key_out, bytes, length);
    memset(key_out + length, 0, KVIST_KEY_BYTES - length);
    return KVIST_OK;
}

static bool digest_field(
    EVP_MD_CTX *digest, const void *name, size_t name_bytes, const void *value, size_t value_bytes)
{
    uint8_t name_prefix[4];
    uint8_t value_prefix[8];
    store_le(name_prefix, name_bytes, sizeof(name_prefix));
    store_le(value_prefix, value_bytes, sizeof(value_prefix));
    return EVP_DigestUpdate(digest, name_prefix, sizeof(name_prefix)) == 1 &&
           EVP_DigestUpdate(digest, name, name_bytes) == 1 &&
           EVP_DigestUpdate(digest, value_prefix, sizeof(value_prefix)) == 1 &&
           (value_bytes == 0 || EVP_DigestUpdate(digest, value, value_bytes) == 1);
}

static enum kvist_status check_identity(const struct kvist_identity_field *fields,
                                        size_t field_count,
                                        const char *tenant,
                                        struct kvist_error *err)
{
    if (field_count == 0 || field_count > KVIST_IDENTITY_FIELDS_MAX) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "identity",
                               "identity of %zu fields; 1 to %u are allowed",
                               field_count,
                               KVIST_IDENTITY_FIELDS_MAX);
    }
    if (strnlen(tenant, KVIST_TENANT_BYTES_MAX + 1) > KVIST_TENANT_BYTES_MAX) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "identity",
                               "tenant name is longer than %u bytes",
                               KVIST_TENANT_BYTES_MAX);
    }
    size_t room = KVIST_IDENTITY_BYTES_MAX;
    for (size_t index = 0; index < field_count; index++) {
        size_t name_bytes = fields[index].name != NULL ? strnlen(fields[index].name, room + 1) : 0;
        if (name_bytes == 0 || (fields[index].value == NULL && fields[index].value_bytes > 0)) {
            return kvist_error_set(err,
                                   KVIST_INVALID,
                                   0,
                                   "identity",
                                   "field %zu of the identity has no name or no value",
                                   index);
        }
        if (name_bytes > room || fields[index].value_bytes > room - name_bytes) {
            return kvist_error_set(err,
                                   KVIST_INVALID,
                                   0,
                                   "identity",
                                   "identity is longer than %u bytes",
                                   KVIST_IDENTITY_BYTES_MAX);
        }
        room -= name_bytes + fields[index].value_bytes;
    }
    return KVIST_OK;
}

enum kvist_status kvist_identity_hash(const struct kvist_identity_field *fields,
                                      size_t field_count,
                                      const char *tenant,
                                      uint8_t pool_id_out[KVIST_KEY_BYTES],
                                      struct kvist_error *err)
{
    enum kvist_status status = check_identity(fields, field_count, tenant, err);
    if (status != KVIST_OK) {
        return status;
    }
    EVP_MD_CTX *digest = EVP_MD_CTX_new();
    bool good = digest != NULL && EVP_DigestInit_ex(digest, EVP_sha256(), NULL) == 1 &&
                EVP_DigestUpdate(digest, IDENTITY_DOMAIN, strlen(IDENTITY_DOMAIN)) == 1;
    for (size_t index = 0; good && index < field_count; index++) {
        const struct kvist_identity_field *field = &fields[index];
        good = digest_field(
            digest, field->name, strlen(field->name), field->value, field->value_bytes);
    }
    uint8_t result[KVIST_KEY_BYTES];
    good = good &&
           digest_field(digest, TENANT_FIELD, strlen(TENANT_FIELD), tenant, strlen(tenant)) &&
           EVP_DigestFinal_ex(digest, result, NULL) == 1;
    EVP_MD_CTX_free(digest);
    if (!good) {
        return no_crypto(err);
    }
    memcpy(pool_id_out, result, sizeof(result));
    return KVIST_OK;
}

uint64_t kvist_key_checksum_seed(const uint8_t key[KVIST_KEY_BYTES],
                                 const uint8_t pool_id[KVIST_KEY_BYTES])
{
    /* Keys are hashes already: this only has to depend on every bit of both, in order. */
    const uint8_t *const parts[] = {key, pool_id};
    uint64_t seed = 0x6b76697374206b76ULL;
    for (unsigned part = 0; part < 2; part++) {
        for (unsigned at = 0; at < KVIST_KEY_BYTES; at += 8) {
            seed = (seed ^ load_le64(parts[part] + at)) * 0x9e3779b97f4a7c15ULL;
            seed = (seed ^ (seed >> 32)) * 0xbf58476d1ce4e5b9ULL;
            seed ^= seed >> 29;
        }
    }
    return seed;
}

uint64_t kvist_key_tag(const uint8_t key[KVIST_KEY_BYTES])
{
    uint64_t tag = load_le64(key);
    return tag != 0 ? tag : 1;
}

void kvist_key_format(const uint8_t key[KVIST_KEY_BYTES], char text_out[2 * KVIST_KEY_BYTES + 1])
{
    static const char digits[] = "0123456789abcdef";
    for (size_t index = 0; index < KVIST_KEY_BYTES; index++) {
        text_out[2 * index] = digits[key[index] >> 4];
        text_out[2 * index + 1] = digits[key[index] & 15U];
    }
    text_out[KEY_TEXT_LENGTH] = '\0';
}

static int hex_value(char digit)
{
    if (digit >= '0' && digit <= '9') {
        return digit - '0';
    }
    if (digit >= 'a' && digit <= 'f') {
        return digit - 'a' + 10;
    }
    if (digit >= 'A' && digit <= 'F') {
        return digit - 'A' + 10;
    }
    return -1;
}

enum kvist_status kvist_key_parse(const char *text, uint8_t key_out[KVIST_KEY_BYTES])
{
    uint8_t key[KVIST_KEY_BYTES];
    if (strnlen(text, KEY_TEXT_LENGTH + 1) != KEY_TEXT_LENGTH) {
        return KVIST_INVALID;
    }
    for (size_t index = 0; index < KVIST_KEY_BYTES; index++) {
        int high = hex_value(text[2 * index]);
        int low = hex_value(text[2 * index + 1]);
        if (high < 0 || low < 0) {
            return KVIST_INVALID;
        }
        key[index] = (uint8_t)(high << 4 | low);
    }
    memcpy(key_out, key, sizeof(key));
    return KVIST_OK;
}
