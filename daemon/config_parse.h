/*
 * config_parse - what the files that read the configuration share.
 *
 * Role        config.c reads lines and rows, config_tenants.c what [tenants] says.
 * Ownership   nothing is kept
 * Errors      INVALID with file, line, key and what is allowed
 */
#ifndef KVIST_DAEMON_CONFIG_PARSE_H
#define KVIST_DAEMON_CONFIG_PARSE_H

#include "daemon/config.h"

/* Where a value comes from, for messages. */
struct kvist_config_origin {
    const char *file; /* or the flag */
    unsigned line;    /* 0: a flag */
};

/** @return INVALID, with the origin before the text */
__attribute__((format(printf, 3, 4))) enum kvist_status kvist_config_refuse(
    struct kvist_error *err, const struct kvist_config_origin *origin, const char *format, ...);

/** Digits in a base, with an optional K, M, G or T after them. */
bool kvist_config_parse_number(const char *text, int base, bool suffixed, uint64_t *value_out);

/** A line of [tenants]. */
KVIST_MUST_USE enum kvist_status kvist_config_set_tenant(struct kvist_config *config,
                                                         const char *name,
                                                         const char *value,
                                                         const struct kvist_config_origin *origin,
                                                         struct kvist_error *err);

/** Words in lines of "# ". */
void kvist_config_print_wrapped(FILE *file, const char *text);

/** [tenants] of the example file. */
void kvist_config_print_tenants(FILE *file);

#endif
