#include "tests/support/unit.h"

#include <CUnit/Basic.h>

#include <ftw.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

static struct {
    void (*setup)(void);
    void (*teardown)(void);
} hooks;

static void before_case(void)
{
    if (hooks.setup != NULL) {
        hooks.setup();
    }
}

static void after_case(void)
{
    if (hooks.teardown != NULL) {
        hooks.teardown();
    }
}

/* CUnit counts within a case alone; what is not in one, a fuzz target say, ends. */
static void judge(bool holds, const char *message, const char *file, unsigned line)
{
    if (CU_get_current_test() != NULL) {
        CU_assertImplementation(holds, line, message, file, "", CU_FALSE);
    } else if (!holds) {
        (void)fprintf(stderr, "%s:%u: %s\n", file, line, message);
        abort();
    }
}

void kvist_unit_compare(
    uint64_t actual, uint64_t expected, const char *text, const char *file, unsigned line)
{
    char message[512];
    (void)snprintf(message,
                   sizeof(message),
                   "%s (got %llu, expected %llu)",
                   text,
                   (unsigned long long)actual,
                   (unsigned long long)expected);
    judge(actual == expected, message, file, line);
}

void kvist_unit_status(enum kvist_status actual,
                       enum kvist_status expected,
                       const char *text,
                       const char *file,
                       unsigned line)
{
    char message[512];
    (void)snprintf(message,
                   sizeof(message),
                   "%s (got %s, expected %s)",
                   text,
                   kvist_status_name(actual),
                   kvist_status_name(expected));
    judge(actual == expected, message, file, line);
}

int kvist_unit_main(const char *suite_name,
                    const struct kvist_unit_case *cases,
                    uint32_t case_count,
                    void (*setup)(void),
                    void (*teardown)(void))
{
    hooks.setup = setup;
    hooks.teardown = teardown;
    if (CU_initialize_registry() != CUE_SUCCESS) {
        return EXIT_FAILURE;
    }
    CU_pSuite suite =
        CU_add_suite_with_setup_and_teardown(suite_name, NULL, NULL, before_case, after_case);
    for (uint32_t index = 0; suite != NULL && index < case_count; index++) {
        if (CU_add_test(suite, cases[index].name, cases[index].run) == NULL) {
            return EXIT_FAILURE;
        }
    }
    CU_basic_set_mode(CU_BRM_VERBOSE);
    (void)CU_basic_run_tests();
    unsigned failures = CU_get_number_of_failures();
    CU_cleanup_registry();
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int remove_entry(const char *path, const struct stat *state, int type, struct FTW *walk)
{
    (void)state;
    (void)type;
    (void)walk;
    return remove(path);
}

void kvist_unit_remove_tree(const char *path)
{
    (void)nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}
