/* key: published digests, and that every part of an identity counts. */
#include "proto/base/check.h"
#include "proto/key/checksum.h"
#include "proto/key/key.h"
#include "tests/support/unit.h"

#include <stdlib.h>
#include <string.h>

static void expect_hex(const uint8_t key[KVIST_KEY_BYTES], const char *expected)
{
    char text[2 * KVIST_KEY_BYTES + 1];
    kvist_key_format(key, text);
    CU_ASSERT_STRING_EQUAL(text, expected);
}

/* FIPS 180-4 examples that are longer than a key, and so are hashed. */
static void long_keys_are_hashed(void)
{
    uint8_t key[KVIST_KEY_BYTES];
    KVIST_TEST_STATUS(
        kvist_key_make("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56, key),
        KVIST_OK);
    expect_hex(key, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    KVIST_TEST_STATUS(
        kvist_key_make("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnop"
                       "jklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
                       112,
                       key),
        KVIST_OK);
    expect_hex(key, "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
}

static void short_keys_are_extended(void)
{
    uint8_t key[KVIST_KEY_BYTES];
    uint8_t source[4097];
    memset(source, 0xab, sizeof(source));
    KVIST_TEST_STATUS(kvist_key_make(source, 1, key), KVIST_OK);
    expect_hex(key, "ab00000000000000000000000000000000000000000000000000000000000000");
    KVIST_TEST_STATUS(kvist_key_make(source, 32, key), KVIST_OK);
    expect_hex(key, "abababababababababababababababababababababababababababababababab");
    uint8_t hashed[KVIST_KEY_BYTES];
    KVIST_TEST_STATUS(kvist_key_make(source, 33, hashed), KVIST_OK);
    KVIST_TEST_TRUE(memcmp(key, hashed, sizeof(key)) != 0);
    KVIST_TEST_STATUS(kvist_key_make(source, 4096, hashed), KVIST_OK);
    KVIST_TEST_STATUS(kvist_key_make(source, 4097, key), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_key_make(source, 0, key), KVIST_INVALID);
    expect_hex(key, "abababababababababababababababababababababababababababababababab");
}

static void hash(const struct kvist_identity_field *fields,
                 size_t count,
                 const char *tenant,
                 uint8_t id_out[KVIST_KEY_BYTES])
{
    KVIST_TEST_STATUS(kvist_identity_hash(fields, count, tenant, id_out, NULL), KVIST_OK);
}

/* The digest that any SHA-256 gives for the bytes that key.h describes. */
static void identities_hash_as_described(void)
{
    struct kvist_identity_field fields[] = {{"engine", "vllm", 4}, {"kv_version", "1", 1}};
    uint8_t id[KVIST_KEY_BYTES];
    hash(fields, 2, "team-a", id);
    expect_hex(id, "97fc1f07bfc7f2278cd8c0f239582fc63f31aea56ec300231b1dd00617a882f1");
}

static void every_part_of_an_identity_counts(void)
{
    static const struct {
        struct kvist_identity_field fields[3];
        size_t count;
        const char *tenant;
    } rows[] = {
        {{{"ab", "cd", 2}, {"e", "f", 1}}, 2, ""},
        {{{"ab", "cX", 2}, {"e", "f", 1}}, 2, ""},
        {{{"aX", "cd", 2}, {"e", "f", 1}}, 2, ""},
        {{{"ab", "cd", 2}, {"e", "X", 1}}, 2, ""},
        {{{"ab", "cd", 2}, {"X", "f", 1}}, 2, ""},
        {{{"ab", "cd", 2}, {"e", "f", 1}}, 2, "other"},
        {{{"e", "f", 1}, {"ab", "cd", 2}}, 2, ""},
        {{{"ab", "cd", 2}}, 1, ""},
        {{{"ab", "cd", 2}, {"e", "f", 1}, {"g", "", 0}}, 3, ""},
        /* The same bytes in a row, cut elsewhere. */
        {{{"a", "bcd", 3}, {"e", "f", 1}}, 2, ""},
        {{{"abc", "d", 1}, {"e", "f", 1}}, 2, ""},
        {{{"ab", "cde", 3}, {"f", "", 0}}, 2, ""},
        {{{"ab", "c", 1}, {"de", "f", 1}}, 2, ""},
        {{{"abcdef", "", 0}}, 1, ""},
        {{{"ab", "cd\1\0\0\0e\1\0\0\0\0\0\0\0f", 16}}, 1, ""},
        /* A field that looks like the tenant's is not the tenant's. */
        {{{"ab", "cd", 2}, {"e", "f", 1}, {"tenant", "other", 5}}, 3, ""},
        {{{"ab", "cd", 2}, {"e", "f", 1}, {"tenant", "", 0}}, 3, "other"},
    };
    uint8_t ids[KVIST_ARRAY_COUNT(rows)][KVIST_KEY_BYTES];
    for (size_t row = 0; row < KVIST_ARRAY_COUNT(rows); row++) {
        hash(rows[row].fields, rows[row].count, rows[row].tenant, ids[row]);
        for (size_t other = 0; other < row; other++) {
            KVIST_TEST_TRUE(memcmp(ids[row], ids[other], KVIST_KEY_BYTES) != 0);
        }
        uint8_t again[KVIST_KEY_BYTES];
        hash(rows[row].fields, rows[row].count, rows[row].tenant, again);
        KVIST_TEST_TRUE(memcmp(ids[row], again, KVIST_KEY_BYTES) == 0);
    }
}

static void identity_fails(const struct kvist_identity_field *fields,
                           size_t count,
                           const char *tenant,
                           const char *expected)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    uint8_t id[KVIST_KEY_BYTES] = {1, 2, 3};
    KVIST_TEST_STATUS(kvist_identity_hash(fields, count, tenant, id, &err), KVIST_INVALID);
    KVIST_TEST_TRUE(strstr(err.text, expected) != NULL);
    expect_hex(id, "0102030000000000000000000000000000000000000000000000000000000000");
}

static void identities_are_bounded(void)
{
    static struct kvist_identity_field fields[KVIST_IDENTITY_FIELDS_MAX + 1];
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(fields); index++) {
        fields[index] = (struct kvist_identity_field){"name", "value", 5};
    }
    uint8_t id[KVIST_KEY_BYTES];
    hash(fields, KVIST_IDENTITY_FIELDS_MAX, "", id);
    identity_fails(fields, KVIST_IDENTITY_FIELDS_MAX + 1, "", "257 fields");
    identity_fails(fields, 0, "", "0 fields");
    char tenant[KVIST_TENANT_BYTES_MAX + 2];
    memset(tenant, 't', sizeof(tenant));
    tenant[sizeof(tenant) - 1] = '\0';
    identity_fails(fields, 1, tenant, "tenant name");
    hash(fields, 1, tenant + 1, id);
    fields[1].name = "";
    identity_fails(fields, 2, "", "field 1");
    fields[1].name = NULL;
    identity_fails(fields, 2, "", "field 1");
    fields[1] = (struct kvist_identity_field){"name", NULL, 1};
    identity_fails(fields, 2, "", "field 1");
    uint8_t *value = calloc(1, KVIST_IDENTITY_BYTES_MAX);
    KVIST_TEST_FATAL(value != NULL);
    fields[1] = (struct kvist_identity_field){"name", value, KVIST_IDENTITY_BYTES_MAX - 13};
    hash(fields, 2, "", id);
    fields[1].value_bytes++;
    identity_fails(fields, 2, "", "longer than");
    fields[1].value_bytes = SIZE_MAX;
    identity_fails(fields, 2, "", "longer than");
    free(value);
}

static void keys_format_and_parse(void)
{
    uint8_t key[KVIST_KEY_BYTES];
    uint8_t parsed[KVIST_KEY_BYTES];
    char text[2 * KVIST_KEY_BYTES + 2];
    for (size_t index = 0; index < KVIST_KEY_BYTES; index++) {
        key[index] = (uint8_t)(index * 8 + 7);
    }
    kvist_key_format(key, text);
    KVIST_TEST_STATUS(kvist_key_parse(text, parsed), KVIST_OK);
    KVIST_TEST_TRUE(memcmp(key, parsed, sizeof(key)) == 0);
    KVIST_TEST_STATUS(
        kvist_key_parse("ABCDEF0123456789abcdef0123456789abcdef0123456789abcdef0123456789", parsed),
        KVIST_OK);
    expect_hex(parsed, "abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789");
    static const char bad_digits[] = {'/', ':', '@', 'G', '`', 'g', ' ', '-', '\x80'};
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(bad_digits); index++) {
        kvist_key_format(key, text);
        text[index * 7] = bad_digits[index];
        KVIST_TEST_STATUS(kvist_key_parse(text, parsed), KVIST_INVALID);
    }
    kvist_key_format(key, text);
    memcpy(text + 2 * KVIST_KEY_BYTES, "0", 2);
    KVIST_TEST_STATUS(kvist_key_parse(text, parsed), KVIST_INVALID);
    text[2 * KVIST_KEY_BYTES - 1] = '\0';
    KVIST_TEST_STATUS(kvist_key_parse(text, parsed), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_key_parse("", parsed), KVIST_INVALID);
    expect_hex(parsed, "abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789");
}

static void tags_are_little_endian_and_never_zero(void)
{
    uint8_t key[KVIST_KEY_BYTES] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    KVIST_TEST_EQUAL(kvist_key_tag(key), 0x0807060504030201ULL);
    memset(key, 0, 8);
    KVIST_TEST_EQUAL(kvist_key_tag(key), 1);
}

static void seeds_depend_on_every_byte(void)
{
    uint8_t key[KVIST_KEY_BYTES] = {0};
    uint8_t pool_id[KVIST_KEY_BYTES] = {0};
    uint64_t seed = kvist_key_checksum_seed(key, pool_id);
    KVIST_TEST_EQUAL(seed, 0xe77a1fa98e09a4eeULL); /* is on disk: never to change */
    for (size_t index = 0; index < KVIST_KEY_BYTES; index++) {
        key[index] = 1;
        uint64_t of_key = kvist_key_checksum_seed(key, pool_id);
        key[index] = 0;
        pool_id[index] = 1;
        uint64_t of_pool = kvist_key_checksum_seed(key, pool_id);
        pool_id[index] = 0;
        KVIST_TEST_TRUE(of_key != seed && of_pool != seed && of_key != of_pool);
    }
}

/* XXH3-64 test vectors of xxHash: no bytes, seeds 0 and 0x9e3779b185ebca8d. */
static void checksums_are_xxh3(void)
{
    KVIST_TEST_EQUAL(kvist_checksum("", 0, 0), 0x2d06800538d394c2ULL);
    KVIST_TEST_EQUAL(kvist_checksum("", 0, 0x9e3779b185ebca8dULL), 0xa8a6b918b2f0364aULL);
    uint8_t block[8192] = {0};
    uint64_t before = kvist_checksum(block, sizeof(block), 5);
    KVIST_TEST_TRUE(kvist_checksum(block, sizeof(block), 6) != before);
    block[5000] ^= 1;
    KVIST_TEST_TRUE(kvist_checksum(block, sizeof(block), 5) != before);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"long keys are hashed", long_keys_are_hashed},
        {"short keys are extended", short_keys_are_extended},
        {"identities hash as described", identities_hash_as_described},
        {"every part of an identity counts", every_part_of_an_identity_counts},
        {"identities are bounded", identities_are_bounded},
        {"keys format and parse", keys_format_and_parse},
        {"tags are little-endian and never zero", tags_are_little_endian_and_never_zero},
        {"seeds depend on every byte", seeds_depend_on_every_byte},
        {"checksums are XXH3", checksums_are_xxh3},
    };
    return kvist_unit_main("key", cases, KVIST_ARRAY_COUNT(cases), NULL, NULL);
}
