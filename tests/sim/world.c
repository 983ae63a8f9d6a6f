/* world - time and randomness; in place of the system's, for everything that is linked. */
#include "proto/base/clock.h"
#include "tests/sim/sim.h"

#include <stdarg.h>
#include <sys/random.h>

#define START_US 1000000000ULL

static struct {
    uint64_t state;
    uint64_t now_us;
    bool verbose;
} world;

void kvist_sim_world_init(uint64_t seed, bool verbose)
{
    world.state = seed * 0x9e3779b97f4a7c15ULL + 1;
    world.now_us = START_US;
    world.verbose = verbose;
}

uint64_t kvist_sim_random(void)
{
    world.state += 0x9e3779b97f4a7c15ULL;
    uint64_t value = world.state;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
    return value ^ (value >> 31);
}

uint32_t kvist_sim_below(uint32_t count)
{
    return (uint32_t)(kvist_sim_random() % count);
}

bool kvist_sim_chance(uint32_t percent)
{
    return kvist_sim_below(100) < percent;
}

uint64_t kvist_sim_now_us(void)
{
    return world.now_us;
}

void kvist_sim_pass_time(uint64_t us)
{
    world.now_us += us;
}

uint64_t kvist_clock_now_ns(void)
{
    return world.now_us * 1000;
}

uint64_t kvist_clock_now_us(void)
{
    return world.now_us;
}

ssize_t getrandom(void *buffer, size_t length, unsigned flags)
{
    (void)flags;
    for (size_t at = 0; at < length; at++) {
        ((uint8_t *)buffer)[at] = (uint8_t)kvist_sim_random();
    }
    return (ssize_t)length;
}

void kvist_sim_trace(const char *format, ...)
{
    if (!world.verbose) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    (void)vprintf(format, arguments);
    va_end(arguments);
    (void)putchar('\n');
    (void)fflush(stdout);
}
