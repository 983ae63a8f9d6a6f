/*
 * fault - places where a test makes a call fail.
 *
 * Role        `if (kvist_fault_point("memfd.create")) { error path }` before a call that can fail.
 *             Compiled in always, costs one load of a flag when nothing is armed.
 * Threads     any; arming is for single-threaded set-up
 * Source      SQLite's n-th-failure loop (test_malloc)
 */
#ifndef KVIST_BASE_FAULT_H
#define KVIST_BASE_FAULT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Set while anything is armed or counted; read through kvist_fault_point() only. */
extern _Atomic bool kvist_fault_armed;

/** Slow path of kvist_fault_point(). */
bool kvist_fault_consult(const char *name);

/** True when the call that follows is to fail as if it had returned an error. */
static inline bool kvist_fault_point(const char *name)
{
    return __builtin_expect(atomic_load_explicit(&kvist_fault_armed, memory_order_relaxed), 0) &&
           kvist_fault_consult(name);
}

/**
 * Make the nth pass (from 1) through a point fail.
 *
 * @param name     the point, or NULL for every point
 * @param nth      1 for the next pass; 0 only counts
 * @param forever  whether all passes after the nth fail too
 */
void kvist_fault_arm(const char *name, uint64_t nth, bool forever);

/** Disarm, and return how many passes the armed points have seen. */
uint64_t kvist_fault_disarm(void);

/**
 * Arm from a text, "name:nth" or "name:nth+" (the nth and all after), as in KVIST_FAULT.
 *
 * @return false when the text is not of that form
 */
bool kvist_fault_arm_text(const char *text);

#endif
