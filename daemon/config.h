/*
 * config - what kvistd was told to do.
 *
 * Role        reads the configuration file and the flags, checks every value, prints the example
 *             file. config.def has the rows. Does not look at the machine: see machine.h.
 * File        [section] lines, `name = value` lines, # or ; comments at the start of a line.
 *             [tenants] has free names: `name = uid:1000, gid:2000, dram:64G, read-only`,
 *             `name = socket:/run/kvist/name.sock`.
 * Units       in the names; SIZE in bytes
 * Ownership   a config is a plain value
 * Limits      KVIST_CONFIG_LINE_BYTES, KVIST_CONFIG_LINES_MAX, KVIST_CONFIG_OVERRIDES_MAX,
 *             KVIST_CONFIG_RULES_MAX, KVIST_CONFIG_TENANTS_MAX, KVIST_CONFIG_SOCKETS_MAX,
 *             KVIST_CONFIG_FILE_BYTES
 * Errors      INVALID with file, line, key and what is allowed; NOT_FOUND, DENIED for the file
 */
#ifndef KVIST_DAEMON_CONFIG_H
#define KVIST_DAEMON_CONFIG_H

#include <kvist/error.h>
#include <kvist/limits.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#define KVIST_CONFIG_PATH              "/etc/kvist/kvistd.conf"
#define KVIST_CONFIG_TEXT_BYTES        256
#define KVIST_CONFIG_LINE_BYTES        1024
#define KVIST_CONFIG_LINES_MAX         10000
#define KVIST_CONFIG_FILE_BYTES        (1 << 20)
#define KVIST_CONFIG_OVERRIDES_MAX     64
#define KVIST_CONFIG_RULES_MAX         256
#define KVIST_CONFIG_TENANTS_MAX       128
#define KVIST_CONFIG_SOCKETS_MAX       16 /* of tenants */
#define KVIST_TENANT_DEFAULT           "default"

#define KVIST_CONFIG_TYPE_TEXT(name)   char name[KVIST_CONFIG_TEXT_BYTES]
#define KVIST_CONFIG_TYPE_SIZE(name)   uint64_t name
#define KVIST_CONFIG_TYPE_COUNT(name)  uint64_t name
#define KVIST_CONFIG_TYPE_MODE(name)   uint64_t name
#define KVIST_CONFIG_TYPE_CHOICE(name) uint64_t name /* which one of the row's choices */

/* One `uid:N` or `gid:N` of [tenants]. */
struct kvist_tenant_rule {
    char tenant[KVIST_TENANT_BYTES_MAX + 1];
    bool group;
    uint32_t id;
};

/* What a line of [tenants] says besides. */
struct kvist_tenant_limits {
    char tenant[KVIST_TENANT_BYTES_MAX + 1];
    uint64_t dram_bytes; /* 0: no quota */
    uint64_t nvme_bytes; /* 0: no quota */
    uint32_t weight;
    bool read_only;
    char socket[KVIST_SOCKET_PATH_BYTES]; /* who comes through it belongs to the tenant; "": none */
};

struct kvist_config {
#define KVIST_CONFIG(section, name, kind, min, max, fallback, choices, live, help)                 \
    KVIST_CONFIG_TYPE_##kind(section##_##name);
#include "daemon/config.def"
#undef KVIST_CONFIG
    struct kvist_tenant_rule rules[KVIST_CONFIG_RULES_MAX];
    size_t rule_count;
    struct kvist_tenant_limits limits[KVIST_CONFIG_TENANTS_MAX];
    size_t limits_count;
};

/* A flag's `section.key=value`; goes over the file. */
struct kvist_config_override {
    const char *flag;       /* for messages: "--socket" */
    const char *assignment; /* borrowed */
};

/**
 * Defaults, then the file, then the overrides.
 *
 * @param path             NULL: KVIST_CONFIG_PATH, which may be missing
 * @param overrides        [override_count]
 */
KVIST_MUST_USE enum kvist_status kvist_config_load(const char *path,
                                                   const struct kvist_config_override *overrides,
                                                   size_t override_count,
                                                   struct kvist_config *config_out,
                                                   struct kvist_error *err);

typedef void kvist_config_differs_fn(void *ctx, const char *section, const char *name);

/**
 * Take over from `fresh` what can change while kvistd runs.
 *
 * @param differs  called for every setting that differs and needs a restart
 */
void kvist_config_reload(struct kvist_config *config,
                         const struct kvist_config *fresh,
                         kvist_config_differs_fn *differs,
                         void *ctx);

/** Tenant of a peer: the first rule that names its uid or one of its groups, else the default. */
const char *kvist_config_tenant(const struct kvist_config *config,
                                uid_t uid,
                                const gid_t *groups,
                                size_t group_count);

/** Limits of a tenant; NULL: no line names it. */
const struct kvist_tenant_limits *kvist_config_limits(const struct kvist_config *config,
                                                      const char *tenant);

/** The example file: every setting with its default, explained. */
void kvist_config_print_example(FILE *file);

/** One line a setting, for --help. */
void kvist_config_print_help(FILE *file);

/** Write bytes as people do ("64G", "1536M", "1000") into a caller's buffer, and return it. */
const char *kvist_size_format(uint64_t bytes, char text_out[32]);

#endif
