/*
 * Fuzz target: names of blocks and pools.
 *
 * Input: two identities, each {tenant, fields of {name, value}}, and a text. Equal identities have
 * the same pool id, different ones have not, however their parts are cut: nothing that one field
 * says can be said by another. Keys survive being written as text.
 */
#include "proto/key/key.h"
#include "tests/fuzz/fuzz.h"

#include <stdbool.h>

#define FIELDS_MAX 6U
#define PART_BYTES 24U

struct identity {
    size_t field_count;
    char tenant[PART_BYTES + 1];
    char names[FIELDS_MAX][PART_BYTES + 1];
    uint8_t values[FIELDS_MAX][PART_BYTES];
    size_t value_bytes[FIELDS_MAX];
};

/* The rest of a text is zero, so that identities can be compared as bytes. */
static void take_text(struct kvist_fuzz_input *input, char text_out[PART_BYTES + 1])
{
    memset(text_out, 0, PART_BYTES + 1);
    kvist_fuzz_take(input, text_out, kvist_fuzz_u8(input) % (PART_BYTES + 1));
    size_t length = strlen(text_out);
    memset(text_out + length, 0, PART_BYTES + 1 - length);
}

static void take_identity(struct kvist_fuzz_input *input, struct identity *identity_out)
{
    memset(identity_out, 0, sizeof(*identity_out));
    identity_out->field_count = kvist_fuzz_u8(input) % (FIELDS_MAX + 1);
    take_text(input, identity_out->tenant);
    for (size_t index = 0; index < identity_out->field_count; index++) {
        take_text(input, identity_out->names[index]);
        identity_out->value_bytes[index] = kvist_fuzz_u8(input) % (PART_BYTES + 1);
        kvist_fuzz_take(input, identity_out->values[index], identity_out->value_bytes[index]);
    }
}

static bool hash(const struct identity *identity, uint8_t pool_id_out[KVIST_KEY_BYTES])
{
    struct kvist_identity_field fields[FIELDS_MAX] = {{.name = NULL}};
    struct kvist_error err = KVIST_ERROR_INIT;
    bool good = identity->field_count > 0;
    for (size_t index = 0; index < identity->field_count; index++) {
        fields[index] = (struct kvist_identity_field){
            .name = identity->names[index],
            .value = identity->values[index],
            .value_bytes = identity->value_bytes[index],
        };
        good = good && identity->names[index][0] != '\0';
    }
    enum kvist_status status =
        kvist_identity_hash(fields, identity->field_count, identity->tenant, pool_id_out, &err);
    KVIST_FUZZ_REQUIRE(status == (good ? KVIST_OK : KVIST_INVALID));
    KVIST_FUZZ_REQUIRE(good || err.text[0] != '\0');
    return good;
}

static void check_keys(const uint8_t *bytes, size_t length)
{
    uint8_t key[KVIST_KEY_BYTES];
    uint8_t again[KVIST_KEY_BYTES];
    char text[2 * KVIST_KEY_BYTES + 1];
    enum kvist_status status = kvist_key_make(bytes, length, key);
    KVIST_FUZZ_REQUIRE((status == KVIST_OK) == (length >= 1 && length <= 4096));
    if (status == KVIST_OK) {
        kvist_key_format(key, text);
        KVIST_FUZZ_REQUIRE(kvist_key_parse(text, again) == KVIST_OK);
        KVIST_FUZZ_REQUIRE(memcmp(key, again, sizeof(key)) == 0);
        KVIST_FUZZ_REQUIRE(length > KVIST_KEY_BYTES || memcmp(key, bytes, length) == 0);
        KVIST_FUZZ_REQUIRE(kvist_key_tag(key) != 0);
        again[bytes[0] % KVIST_KEY_BYTES] ^= 1;
        KVIST_FUZZ_REQUIRE(kvist_key_checksum_seed(key, again) !=
                           kvist_key_checksum_seed(again, key));
    }
    char *given = malloc(length + 1);
    KVIST_FUZZ_REQUIRE(given != NULL);
    if (length > 0) {
        memcpy(given, bytes, length);
    }
    given[length] = '\0';
    if (kvist_key_parse(given, key) == KVIST_OK) {
        kvist_key_format(key, text);
        KVIST_FUZZ_REQUIRE(strlen(given) == strlen(text));
    }
    free(given);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvist_fuzz_input input = {data, size};
    struct identity one;
    struct identity other;
    uint8_t one_id[KVIST_KEY_BYTES];
    uint8_t other_id[KVIST_KEY_BYTES];
    take_identity(&input, &one);
    take_identity(&input, &other);
    if (hash(&one, one_id) && hash(&other, other_id)) {
        bool same = memcmp(&one, &other, sizeof(one)) == 0;
        KVIST_FUZZ_REQUIRE((memcmp(one_id, other_id, sizeof(one_id)) == 0) == same);
    }
    check_keys(input.at, input.left);
    return 0;
}

void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx)
{
    /* Pairs of identities that are the same bytes, were it not for the length of a name, the length
       of a value, or the field of the tenant. */
    static const char name_length[] = "\1\0\1a\12\0b\0\0\0\0\0\0\0\0"
                                      "\2\0\2a\n\0\1b\0"
                                      "x";
    static const char value_length[] = "\1\0\1a\6b\1\0\0\0c"
                                       "\2\0\1a\1b\1c\0"
                                       "y";
    static const char tenant[] = "\1\1t\1a\1b"
                                 "\2\0\1a\1b\6tenant\1t"
                                 "z";
    static const char moved[] = "\2\0\1a\1b\1c\1d"
                                "\2\0\1c\1d\1a\1b"
                                "0123456789abcdef";
    static const char text[] = "\0\0\0\0"
                               "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF";
    emit(ctx, name_length, sizeof(name_length) - 1);
    emit(ctx, value_length, sizeof(value_length) - 1);
    emit(ctx, tenant, sizeof(tenant) - 1);
    emit(ctx, moved, sizeof(moved) - 1);
    emit(ctx, text, sizeof(text) - 1);
}
