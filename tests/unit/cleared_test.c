/* cleared: what a later start reads of earlier clears. */
#include "daemon/cleared.h"
#include "proto/base/check.h"
#include "proto/base/fault.h"
#include "tests/support/unit.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char directory[64];
static char path[128];
static struct kvist_cleared cleared;

static void setup(void)
{
    (void)snprintf(directory, sizeof(directory), "cleared_XXXXXX");
    KVIST_TEST_FATAL(mkdtemp(directory) != NULL);
    (void)snprintf(path, sizeof(path), "%s/cleared", directory);
    char list[80];
    (void)snprintf(list, sizeof(list), "%s:elsewhere", directory);
    KVIST_TEST_FATAL(setenv("STATE_DIRECTORY", list, 1) == 0);
    kvist_cleared_init(&cleared);
}

static void teardown(void)
{
    (void)unsetenv("STATE_DIRECTORY");
    kvist_unit_remove_tree(directory);
}

/* As the next start finds it. */
static void expect(uint32_t count, const char *first)
{
    kvist_cleared_init(&cleared);
    KVIST_TEST_EQUAL(cleared.count, count);
    KVIST_TEST_TRUE(count == 0 || strcmp(cleared.tenants[0], first) == 0);
}

static void note(const char *tenant)
{
    KVIST_TEST_STATUS(kvist_cleared_note(&cleared, tenant, NULL), KVIST_OK);
}

static void tenants_are_remembered_once(void)
{
    expect(0, "");
    note("a");
    note("b");
    note("a");
    expect(2, "a");
    KVIST_TEST_TRUE(strcmp(cleared.tenants[1], "b") == 0);
    kvist_cleared_forget(&cleared);
    KVIST_TEST_TRUE(access(path, F_OK) != 0);
    expect(0, "");
    kvist_cleared_forget(&cleared);
}

static void all_is_more_than_some(void)
{
    char tenant[16];
    note("a");
    note("");
    note("c");
    expect(1, "");
    kvist_cleared_forget(&cleared);
    for (unsigned index = 0; index <= KVIST_CLEARED_MAX; index++) {
        (void)snprintf(tenant, sizeof(tenant), "t%u", index);
        note(tenant);
    }
    expect(1, "");
}

static void the_longest_names_fit(void)
{
    char tenant[KVIST_TENANT_BYTES_MAX + 1];
    memset(tenant, 'x', sizeof(tenant) - 1);
    tenant[sizeof(tenant) - 1] = '\0';
    for (unsigned index = 0; index < KVIST_CLEARED_MAX; index++) {
        tenant[0] = (char)('a' + (int)index);
        note(tenant);
    }
    tenant[0] = 'a';
    expect(KVIST_CLEARED_MAX, tenant);
}

static void what_cannot_be_read_is_all(void)
{
    static const char *const texts[] = {"", "a", "a\nb", "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n"};
    for (unsigned index = 0; index < KVIST_ARRAY_COUNT(texts); index++) {
        FILE *file = fopen(path, "we");
        KVIST_TEST_FATAL(file != NULL && fputs(texts[index], file) >= 0 && fclose(file) == 0);
        expect(1, "");
    }
    KVIST_TEST_FATAL(unlink(path) == 0 && symlink("cleared", path) == 0);
    expect(1, "");
}

static void a_failed_note_leaves_what_was(void)
{
    note("a");
    errno = 0; /* a short write says nothing of itself */
    kvist_fault_arm("cleared.write", 1, false);
    KVIST_TEST_STATUS(kvist_cleared_note(&cleared, "b", NULL), KVIST_SYSTEM);
    KVIST_TEST_EQUAL(kvist_fault_disarm(), 1);
    KVIST_TEST_EQUAL(cleared.count, 1);
    /* The disk is left alone for a while. */
    KVIST_TEST_STATUS(kvist_cleared_note(&cleared, "b", NULL), KVIST_BUSY);
    KVIST_TEST_STATUS(kvist_cleared_note(&cleared, "a", NULL), KVIST_OK); /* known already */
    expect(1, "a");
    note("b");
    expect(2, "a");
    kvist_unit_remove_tree(directory);
    KVIST_TEST_TRUE(kvist_cleared_note(&cleared, "c", NULL) != KVIST_OK);
}

static void without_a_directory_nothing_is_written(void)
{
    (void)unsetenv("STATE_DIRECTORY");
    expect(0, "");
    note("a");
    KVIST_TEST_EQUAL(cleared.count, 0);
    KVIST_TEST_TRUE(access(path, F_OK) != 0);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"tenants are remembered once", tenants_are_remembered_once},
        {"all is more than some", all_is_more_than_some},
        {"the longest names fit", the_longest_names_fit},
        {"what cannot be read is all", what_cannot_be_read_is_all},
        {"a failed note leaves what was", a_failed_note_leaves_what_was},
        {"without a directory nothing is written", without_a_directory_nothing_is_written},
    };
    return kvist_unit_main("cleared", cases, KVIST_ARRAY_COUNT(cases), setup, teardown);
}
