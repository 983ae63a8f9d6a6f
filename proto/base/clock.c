#include "proto/base/clock.h"

#include <time.h>

uint64_t kvist_clock_now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

uint64_t kvist_clock_now_us(void)
{
    return kvist_clock_now_ns() / 1000U;
}
