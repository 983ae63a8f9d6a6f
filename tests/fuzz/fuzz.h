/*
 * fuzz - what the fuzz targets share.
 *
 * Role        a target is one function of bytes, linked with libFuzzer (preset fuzz) and with
 *             replay.c, which runs the kept corpus under ctest in every preset. A target aborts
 *             when something does not hold; it never prints.
 * Input       taken from the front; what is not there reads as zeros, so that every input of any
 *             length means something
 * Seeds       what a target starts from. They are made by code, not kept as files that nobody can
 *             read; the corpus holds what fuzzing has found beyond them.
 * Threads     one
 */
#ifndef KVIST_TESTS_FUZZ_H
#define KVIST_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct kvist_fuzz_input {
    const uint8_t *at;
    size_t left;
};

typedef void kvist_fuzz_emit_fn(void *ctx, const void *bytes, size_t length);

/** The target. @return 0 */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/** Call `emit` with each of the target's seeds. */
void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx);

#define KVIST_FUZZ_REQUIRE(condition)                                                              \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                  \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/** Copy the next bytes; zeros where the input has ended. */
static inline void kvist_fuzz_take(struct kvist_fuzz_input *input, void *target, size_t bytes)
{
    size_t have = bytes < input->left ? bytes : input->left;
    memset(target, 0, bytes);
    if (have > 0) {
        memcpy(target, input->at, have);
        input->at += have;
        input->left -= have;
    }
}

static inline uint8_t kvist_fuzz_u8(struct kvist_fuzz_input *input)
{
    uint8_t value;
    kvist_fuzz_take(input, &value, sizeof(value));
    return value;
}

static inline uint16_t kvist_fuzz_u16(struct kvist_fuzz_input *input)
{
    uint16_t value;
    kvist_fuzz_take(input, &value, sizeof(value));
    return value;
}

static inline uint64_t kvist_fuzz_u64(struct kvist_fuzz_input *input)
{
    uint64_t value;
    kvist_fuzz_take(input, &value, sizeof(value));
    return value;
}

/**
 * A number that is small most of the time: one byte, or, when that byte is 255, the next eight.
 * So that both what fits and what is far beyond a limit are near.
 */
static inline uint64_t kvist_fuzz_number(struct kvist_fuzz_input *input)
{
    uint8_t small = kvist_fuzz_u8(input);
    return small == UINT8_MAX ? kvist_fuzz_u64(input) : small;
}

#endif
