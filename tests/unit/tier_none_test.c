/* tier of a build without RocksDB: refused with a sentence. */
#include "storage/tier.h"
#include "tests/support/unit.h"

#include <string.h>

static void opening_is_refused(void)
{
    struct kvist_tier *tier = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    struct kvist_tier_options options = {.path = "/var/lib/kvist", .bytes_max = 1ULL << 30};
    KVIST_TEST_STATUS(kvist_tier_open(&options, &tier, &err), KVIST_UNSUPPORTED);
    KVIST_TEST_TRUE(strstr(err.text, "without RocksDB") != NULL);
    KVIST_TEST_TRUE(tier == NULL);
    kvist_tier_close(&tier);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"opening is refused", opening_is_refused},
    };
    return kvist_unit_main("tier", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL);
}
