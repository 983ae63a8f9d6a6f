/* Small parts of the daemon: metrics addresses, pools and shapes, the log's limit. */
#include "daemon/http.h"
#include "daemon/logging.h"
#include "daemon/metrics.h"
#include "daemon/pool.h"
#include "daemon/share.h"
#include "proto/base/check.h"
#include "tests/support/unit.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

static void metrics_addresses(void)
{
    static const struct {
        const char *text;
        bool remote;
        enum kvist_status status;
        int kind;
    } cases[] = {
        {"off", false, KVIST_OK, KVIST_HTTP_OFF},
        {"unix:/run/x", false, KVIST_OK, KVIST_HTTP_UNIX},
        {"127.0.0.1:0", false, KVIST_OK, KVIST_HTTP_TCP},
        {"127.255.0.1:65535", false, KVIST_OK, KVIST_HTTP_TCP},
        {"localhost:1", false, KVIST_OK, KVIST_HTTP_TCP},
        {"[::1]:1", false, KVIST_OK, KVIST_HTTP_TCP},
        {"0.0.0.0:1", false, KVIST_INVALID, 0},
        {"0.0.0.0:1", true, KVIST_OK, KVIST_HTTP_TCP},
        {"[::]:1", false, KVIST_INVALID, 0},
        {"[::ffff:10.0.0.1]:1", false, KVIST_INVALID, 0},
        {"10.0.0.1:1", false, KVIST_INVALID, 0},
        {"127.0.0.1:65536", false, KVIST_INVALID, 0},
        {"127.0.0.1:", false, KVIST_INVALID, 0},
        {"127.0.0.1", false, KVIST_INVALID, 0},
        {":1", true, KVIST_INVALID, 0},
        {"[]:1", true, KVIST_INVALID, 0},
        {"[:1", true, KVIST_INVALID, 0},
        {"::1:1", true, KVIST_INVALID, 0},
        {"host.name:1", true, KVIST_INVALID, 0},
        {"127.0.0.1:-1", true, KVIST_INVALID, 0},
        {"127.0.0.1:1x", true, KVIST_INVALID, 0},
        {"unix:relative", true, KVIST_INVALID, 0},
        {"", true, KVIST_INVALID, 0},
    };
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(cases); index++) {
        struct kvist_http_address address = {.kind = KVIST_HTTP_OFF};
        struct kvist_error err = KVIST_ERROR_INIT;
        KVIST_TEST_STATUS(
            kvist_http_address_parse(cases[index].text, cases[index].remote, &address, &err),
            cases[index].status);
        KVIST_TEST_EQUAL(address.kind, cases[index].kind);
        KVIST_TEST_EQUAL(err.text[0] != '\0', cases[index].status != KVIST_OK);
    }
}

static struct kvist_tier_pool describe(const char *name, const char *value, const char *tenant)
{
    Kvist__Wire__OpenPool open = KVIST__WIRE__OPEN_POOL__INIT;
    Kvist__Wire__OpenPool__Field field;
    kvist__wire__open_pool__field__init(&field);
    Kvist__Wire__OpenPool__Field *fields[] = {&field};
    char name_text[64];
    char value_text[64];
    (void)snprintf(name_text, sizeof(name_text), "%s", name);
    (void)snprintf(value_text, sizeof(value_text), "%s", value);
    field.name = name_text;
    field.value.data = (uint8_t *)value_text;
    field.value.len = strlen(value_text);
    open.fields = fields;
    open.n_fields = 1;
    open.slot_bytes = 8192;
    open.sparse = true;
    struct kvist_tier_pool pool;
    memset(&pool, 0xaa, sizeof(pool));
    KVIST_TEST_STATUS(kvist_pool_describe(&open, tenant, &pool, NULL), KVIST_OK);
    return pool;
}

static void a_pool_is_its_identity_and_tenant(void)
{
    struct kvist_tier_pool pool = describe("model", "a", "default");
    CU_ASSERT_STRING_EQUAL(pool.description, "model=a");
    CU_ASSERT_STRING_EQUAL(pool.tenant, "default");
    KVIST_TEST_EQUAL(pool.slot_bytes, 8192);
    KVIST_TEST_EQUAL(pool.generation, 0);
    KVIST_TEST_TRUE(pool.sparse);
    static const char *const others[][3] = {{"model", "b", "default"},
                                            {"modem", "a", "default"},
                                            {"model", "a", "t"},
                                            {"m", "odela", "default"}};
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(others); index++) {
        struct kvist_tier_pool other =
            describe(others[index][0], others[index][1], others[index][2]);
        KVIST_TEST_TRUE(memcmp(pool.pool_id, other.pool_id, KVIST_KEY_BYTES) != 0);
    }
    struct kvist_tier_pool same = describe("model", "a", "default");
    KVIST_TEST_EQUAL(memcmp(pool.pool_id, same.pool_id, KVIST_KEY_BYTES), 0);
}

static void what_people_cannot_read_is_not_described(void)
{
    CU_ASSERT_STRING_EQUAL(describe("model", "a\nb", "t").description, "");
    CU_ASSERT_STRING_EQUAL(describe("model", "a\"b", "t").description, "");
    CU_ASSERT_STRING_EQUAL(
        describe("digest", "0123456789012345678901234567890123456789x", "t").description, "");
}

static void shapes_are_remembered_by_rank(void)
{
    struct kvist_shapes *shapes = calloc(1, sizeof(*shapes));
    KVIST_TEST_FATAL(shapes != NULL);
    uint8_t pool_id[KVIST_KEY_BYTES] = {1};
    uint8_t one[KVIST_KEY_BYTES] = {1};
    uint8_t two[KVIST_KEY_BYTES] = {2};
    const ProtobufCBinaryData first = {sizeof(one), one};
    const ProtobufCBinaryData second = {sizeof(two), two};
    const ProtobufCBinaryData none = {0, NULL};
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_STATUS(kvist_shapes_check(shapes, pool_id, 0, &first, &err), KVIST_OK);
    KVIST_TEST_STATUS(kvist_shapes_check(shapes, pool_id, 0, &first, &err), KVIST_OK);
    KVIST_TEST_STATUS(kvist_shapes_check(shapes, pool_id, 0, &none, &err), KVIST_OK);
    KVIST_TEST_STATUS(kvist_shapes_check(shapes, pool_id, 0, &second, &err), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_shapes_check(shapes, pool_id, 1, &second, &err), KVIST_OK);
    for (uint32_t count = 0; count < 2 * KVIST_SHAPES_MAX; count++) { /* others, and many */
        memcpy(pool_id + 4, &count, sizeof(count));
        pool_id[0] = 9;
        KVIST_TEST_STATUS(kvist_shapes_check(shapes, pool_id, 0, &second, &err), KVIST_OK);
        uint8_t kept[KVIST_KEY_BYTES] = {1};
        KVIST_TEST_STATUS(kvist_shapes_check(shapes, kept, 0, &first, &err), KVIST_OK);
    }
    free(shapes);
}

static void keep_line(enum kvist_log_level level, const char *text, void *ctx)
{
    (void)level;
    (void)snprintf(ctx, 256, "%s", text);
}

static void one_user_cannot_fill_the_log(void)
{
    struct kvist_log_limit *limit = calloc(1, sizeof(*limit));
    KVIST_TEST_FATAL(limit != NULL);
    char line[256] = "";
    uint64_t now_us = 3 * KVIST_LOG_LIMIT_US;
    uint32_t allowed = 0;
    for (int count = 0; count < 1000; count++) {
        allowed += kvist_log_limit_take(limit, 1000, now_us);
    }
    KVIST_TEST_EQUAL(allowed, KVIST_LOG_LIMIT_LINES);
    KVIST_TEST_TRUE(kvist_log_limit_take(limit, 1001, now_us));
    kvist_log_set_sink(keep_line, line, KVIST_LOG_INFO);
    kvist_log_limit_sum_up(limit, now_us + KVIST_LOG_LIMIT_US - 1);
    KVIST_TEST_EQUAL(line[0], '\0');
    kvist_log_limit_sum_up(limit, now_us + KVIST_LOG_LIMIT_US);
    KVIST_TEST_EQUAL(strcmp(line, "980 more lines about peers were withheld uid=1000"), 0);
    line[0] = '\0';
    kvist_log_limit_sum_up(limit, now_us + 2 * KVIST_LOG_LIMIT_US);
    KVIST_TEST_EQUAL(line[0], '\0');
    kvist_log_set_sink(NULL, NULL, KVIST_LOG_INFO);
    KVIST_TEST_TRUE(kvist_log_limit_take(limit, 1000, now_us + KVIST_LOG_LIMIT_US));
    free(limit);
}

/* Holders come one after the other, and each takes all that it can have. */
static void shares_leave_something_for_everybody(void)
{
    const uint32_t max = 512;
    uint32_t used = 0;
    for (uint32_t holder = 0; holder < 8; holder++) {
        uint32_t own = 0;
        while (kvist_share_fits(false, own, used, max)) {
            own++;
            used++;
        }
        KVIST_TEST_TRUE(own >= (480U >> (holder + 1)));
        KVIST_TEST_TRUE(own < 480U - used + 2);
    }
    KVIST_TEST_TRUE(used < 480);
    KVIST_TEST_TRUE(!kvist_share_fits(false, 0, 480, max));
    KVIST_TEST_TRUE(kvist_share_fits(true, 511, 511, max));
    KVIST_TEST_TRUE(!kvist_share_fits(true, 0, 512, max));
    KVIST_TEST_TRUE(kvist_share_is_one("a", 1, "a", 2));
    KVIST_TEST_TRUE(!kvist_share_is_one("a", 1, "b", 1));
    KVIST_TEST_TRUE(!kvist_share_is_one(KVIST_TENANT_DEFAULT, 1, KVIST_TENANT_DEFAULT, 2));
}

static void metrics_have_names_and_sentences(void)
{
    for (size_t index = 0; index < KVIST_METRIC_COUNT; index++) {
        const struct kvist_metric_row *row = &kvist_metric_rows[index];
        size_t length = strlen(row->name);
        bool total = length > 6 && strcmp(row->name + length - 6, "_total") == 0;
        KVIST_TEST_EQUAL(total, row->kind == KVIST_METRIC_COUNTER);
        KVIST_TEST_EQUAL(strspn(row->name, "abcdefghijklmnopqrstuvwxyz_"), length);
        KVIST_TEST_TRUE(row->help[strlen(row->help) - 1] == '.');
        for (size_t other = 0; other < index; other++) {
            KVIST_TEST_TRUE(strcmp(row->name, kvist_metric_rows[other].name) != 0);
        }
    }
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"metrics addresses", metrics_addresses},
        {"a pool is its identity and tenant", a_pool_is_its_identity_and_tenant},
        {"what people cannot read is not described", what_people_cannot_read_is_not_described},
        {"shapes are remembered by rank", shapes_are_remembered_by_rank},
        {"one user cannot fill the log", one_user_cannot_fill_the_log},
        {"shares leave something for everybody", shares_leave_something_for_everybody},
        {"metrics have names and sentences", metrics_have_names_and_sentences},
    };
    return kvist_unit_main("daemon parts", cases, KVIST_ARRAY_COUNT(cases), NULL, NULL);
}
