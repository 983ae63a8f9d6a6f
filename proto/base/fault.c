#include "proto/base/fault.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAULT_NAME_BYTES 64

_Atomic bool kvist_fault_armed;

static struct {
    char name[FAULT_NAME_BYTES]; /* empty: every point */
    uint64_t nth;
    bool forever;
    _Atomic uint64_t passes;
} fault;

void kvist_fault_arm(const char *name, uint64_t nth, bool forever)
{
    (void)snprintf(fault.name, sizeof(fault.name), "%s", name != NULL ? name : "");
    fault.nth = nth;
    fault.forever = forever;
    atomic_store(&fault.passes, 0);
    atomic_store(&kvist_fault_armed, true);
}

uint64_t kvist_fault_disarm(void)
{
    atomic_store(&kvist_fault_armed, false);
    return atomic_load(&fault.passes);
}

bool kvist_fault_consult(const char *name)
{
    if (fault.name[0] != '\0' && strcmp(fault.name, name) != 0) {
        return false;
    }
    uint64_t pass = atomic_fetch_add(&fault.passes, 1) + 1;
    return fault.nth != 0 && (pass == fault.nth || (fault.forever && pass > fault.nth));
}

bool kvist_fault_arm_text(const char *text)
{
    const char *colon = strrchr(text, ':');
    if (colon == NULL || colon == text || (size_t)(colon - text) >= FAULT_NAME_BYTES) {
        return false;
    }
    char *end = NULL;
    unsigned long long nth = strtoull(colon + 1, &end, 10);
    bool forever = *end == '+';
    if (end == colon + 1 || nth == 0 || (forever ? end[1] : end[0]) != '\0') {
        return false;
    }
    char name[FAULT_NAME_BYTES];
    (void)snprintf(name, sizeof(name), "%.*s", (int)(colon - text), text);
    kvist_fault_arm(name, nth, forever);
    return true;
}
