/*
 * unit - what every CUnit binary shares: a main from a table of cases, and compares that print.
 */
#ifndef KVIST_TESTS_UNIT_H
#define KVIST_TESTS_UNIT_H

#include <kvist/status.h>

#include <CUnit/CUnit.h>

#include <stdint.h>
#include <stdlib.h>

struct kvist_unit_case {
    const char *name;
    void (*run)(void);
};

/**
 * Run cases; to be returned from main().
 *
 * @param setup     called before each case, may be NULL
 * @param teardown  called after each case, may be NULL
 * @return 0 when all assertions held
 */
int kvist_unit_main(const char *suite,
                    const struct kvist_unit_case *cases,
                    uint32_t case_count,
                    void (*setup)(void),
                    void (*teardown)(void));

/* Remove a directory and all that is in it; what cannot be removed stays. */
void kvist_unit_remove_tree(const char *path);

/* Report a failed comparison with both values; `fatal` leaves the case. */
void kvist_unit_compare(
    uint64_t actual, uint64_t expected, const char *text, const char *file, unsigned line);
void kvist_unit_status(enum kvist_status actual,
                       enum kvist_status expected,
                       const char *text,
                       const char *file,
                       unsigned line);

#define KVIST_TEST_EQUAL(actual, expected)                                                         \
    kvist_unit_compare(                                                                            \
        (uint64_t)(actual), (uint64_t)(expected), #actual " == " #expected, __FILE__, __LINE__)
#define KVIST_TEST_STATUS(actual, expected)                                                        \
    kvist_unit_status((actual), (expected), #actual " is " #expected, __FILE__, __LINE__)
#define KVIST_TEST_TRUE(condition) CU_ASSERT(condition)

/* For what later steps of a case stand on: stops the whole binary when it does not hold. */
#define KVIST_TEST_FATAL(condition)                                                                \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            CU_assertImplementation(CU_FALSE, __LINE__, #condition, __FILE__, "", CU_TRUE);        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#endif
