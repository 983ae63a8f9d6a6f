/* base: statuses, errors, fault points, the log's line. */
#include "proto/base/fault.h"
#include "proto/base/log.h"
#include "tests/support/unit.h"

#include <kvist/error.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void statuses_have_names_and_translate(void)
{
    CU_ASSERT_STRING_EQUAL(kvist_status_name(KVIST_NO_SPACE), "NO_SPACE");
    CU_ASSERT_STRING_EQUAL(kvist_status_name((enum kvist_status)999), "UNKNOWN");
    KVIST_TEST_STATUS(kvist_status_from_errno(ENOSPC), KVIST_NO_SPACE);
    KVIST_TEST_STATUS(kvist_status_from_errno(0), KVIST_OK);
    KVIST_TEST_STATUS(kvist_status_from_errno(12345), KVIST_SYSTEM);
    KVIST_TEST_STATUS(kvist_status_from_wire(16), KVIST_SYSTEM);
    KVIST_TEST_STATUS(kvist_status_from_wire(4000), KVIST_PROTOCOL);
    KVIST_TEST_EQUAL(kvist_status_retry(KVIST_NO_SPACE), KVIST_RETRY_EVICTION);
}

static void errors_carry_a_sentence(void)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_STATUS(kvist_error_set_errno(&err, ENOENT, "open", "cannot open %s", "x"),
                      KVIST_NOT_FOUND);
    CU_ASSERT_STRING_EQUAL(err.text, "cannot open x: No such file or directory");
    KVIST_TEST_EQUAL(err.code, ENOENT);
    KVIST_TEST_STATUS(kvist_error_set(NULL, KVIST_BUSY, 0, "x", "y"), KVIST_BUSY);
    char longer[2 * KVIST_ERROR_TEXT_BYTES];
    memset(longer, 'a', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = '\0';
    KVIST_TEST_STATUS(kvist_error_set_errno(&err, EIO, "x", "%s", longer), KVIST_SYSTEM);
    KVIST_TEST_EQUAL(strlen(err.text), KVIST_ERROR_TEXT_BYTES - 1);
}

static void fault_points_fail_as_armed(void)
{
    KVIST_TEST_TRUE(!kvist_fault_point("a"));
    kvist_fault_arm("a", 2, false);
    KVIST_TEST_TRUE(!kvist_fault_point("a"));
    KVIST_TEST_TRUE(!kvist_fault_point("b"));
    KVIST_TEST_TRUE(kvist_fault_point("a"));
    KVIST_TEST_TRUE(!kvist_fault_point("a"));
    KVIST_TEST_EQUAL(kvist_fault_disarm(), 3);
    KVIST_TEST_TRUE(kvist_fault_arm_text("tier.write:1+"));
    KVIST_TEST_TRUE(kvist_fault_point("tier.write"));
    KVIST_TEST_TRUE(kvist_fault_point("tier.write"));
    (void)kvist_fault_disarm();
    KVIST_TEST_TRUE(!kvist_fault_arm_text("nothing"));
    KVIST_TEST_TRUE(!kvist_fault_arm_text("a:0"));
    KVIST_TEST_TRUE(!kvist_fault_arm_text("a:1x"));
}

static char last_line[2048];

static void keep_line(enum kvist_log_level level, const char *line, void *ctx)
{
    (void)level;
    (void)ctx;
    strncpy(last_line, line, sizeof(last_line) - 1);
}

static void log_lines_are_one_line(void)
{
    kvist_log_set_sink(keep_line, NULL, KVIST_LOG_INFO);
    kvist_log(KVIST_LOG_INFO, "peer sent text=%s", "a\nb");
    CU_ASSERT_STRING_EQUAL(last_line, "peer sent text=a b");
    kvist_log(KVIST_LOG_DEBUG, "not seen");
    CU_ASSERT_STRING_EQUAL(last_line, "peer sent text=a b");
    kvist_log_set_sink(NULL, NULL, KVIST_LOG_ERROR);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"statuses have names and translate", statuses_have_names_and_translate},
        {"errors carry a sentence", errors_carry_a_sentence},
        {"fault points fail as armed", fault_points_fail_as_armed},
        {"log lines are one line", log_lines_are_one_line},
    };
    return kvist_unit_main("base", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL);
}
