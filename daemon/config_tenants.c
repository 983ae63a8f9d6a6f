#include "daemon/config_parse.h"

#include <string.h>

#define DRAM_BYTES_MIN  (1ULL << 20)
#define NVME_BYTES_MIN  (64ULL << 20)
#define QUOTA_BYTES_MAX (1ULL << 50)
#define WEIGHT_MAX      1000

static bool tenant_name_is_good(const char *name)
{
    size_t length = strlen(name);
    return length > 0 && length <= KVIST_TENANT_BYTES_MAX &&
           strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_-.") == length;
}

const struct kvist_tenant_limits *kvist_config_limits(const struct kvist_config *config,
                                                      const char *tenant)
{
    for (size_t index = 0; index < config->limits_count; index++) {
        if (strcmp(config->limits[index].tenant, tenant) == 0) {
            return &config->limits[index];
        }
    }
    return NULL;
}

static bool add_peer(struct kvist_config *config, const char *tenant, bool group, const char *text)
{
    uint64_t id = 0;
    if (!kvist_config_parse_number(text, 10, false, &id) || id >= UINT32_MAX ||
        config->rule_count == KVIST_CONFIG_RULES_MAX) {
        return false;
    }
    struct kvist_tenant_rule *rule = &config->rules[config->rule_count++];
    (void)snprintf(rule->tenant, sizeof(rule->tenant), "%s", tenant);
    rule->group = group;
    rule->id = (uint32_t)id;
    return true;
}

/* No other tenant's, and the path of no more than there may be. */
static bool
add_socket(struct kvist_config *config, struct kvist_tenant_limits *limits, const char *path)
{
    size_t count = 0;
    bool taken = false;
    for (size_t index = 0; index < config->limits_count; index++) {
        const struct kvist_tenant_limits *at = &config->limits[index];
        count += at != limits && at->socket[0] != '\0';
        taken = taken || (at != limits && strcmp(at->socket, path) == 0);
    }
    if (path[0] != '/' || strlen(path) >= sizeof(limits->socket) || taken ||
        count >= KVIST_CONFIG_SOCKETS_MAX) {
        return false;
    }
    (void)snprintf(limits->socket, sizeof(limits->socket), "%s", path);
    return true;
}

/* One word of a tenant's line. */
static bool
take_word(struct kvist_config *config, struct kvist_tenant_limits *limits, const char *word)
{
    uint64_t value = 0;
    size_t span = strcspn(word, ":");
    const char *text = word + span + (word[span] == ':');
    bool is_peer = strncmp(word, "uid:", 4) == 0 || strncmp(word, "gid:", 4) == 0;
    if (is_peer) {
        return strcmp(limits->tenant, KVIST_TENANT_DEFAULT) != 0 &&
               add_peer(config, limits->tenant, word[0] == 'g', text);
    }
    if (strncmp(word, "dram:", 5) == 0 && kvist_config_parse_number(text, 10, true, &value)) {
        limits->dram_bytes = value;
        return value >= DRAM_BYTES_MIN && value <= QUOTA_BYTES_MAX;
    }
    if (strncmp(word, "nvme:", 5) == 0 && kvist_config_parse_number(text, 10, true, &value)) {
        limits->nvme_bytes = value;
        return value >= NVME_BYTES_MIN && value <= QUOTA_BYTES_MAX;
    }
    if (strncmp(word, "weight:", 7) == 0 && kvist_config_parse_number(text, 10, false, &value)) {
        limits->weight = value <= WEIGHT_MAX ? (uint32_t)value : 0;
        return limits->weight != 0;
    }
    if (strncmp(word, "socket:", 7) == 0) {
        return add_socket(config, limits, text);
    }
    limits->read_only = limits->read_only || strcmp(word, "read-only") == 0;
    return strcmp(word, "read-only") == 0;
}

enum kvist_status kvist_config_set_tenant(struct kvist_config *config,
                                          const char *name,
                                          const char *value,
                                          const struct kvist_config_origin *origin,
                                          struct kvist_error *err)
{
    if (!tenant_name_is_good(name)) {
        return kvist_config_refuse(err,
                                   origin,
                                   "tenant \"%.70s\" cannot be; allowed: 1 to %u of a-z 0-9 _ - .",
                                   name,
                                   KVIST_TENANT_BYTES_MAX);
    }
    const struct kvist_tenant_limits *known = kvist_config_limits(config, name);
    if (known == NULL && config->limits_count == KVIST_CONFIG_TENANTS_MAX) {
        return kvist_config_refuse(err, origin, "over %d tenants", KVIST_CONFIG_TENANTS_MAX);
    }
    struct kvist_tenant_limits *limits =
        &config->limits[known != NULL ? (size_t)(known - config->limits) : config->limits_count++];
    if (known == NULL) {
        *limits = (struct kvist_tenant_limits){.weight = 1};
        (void)snprintf(limits->tenant, sizeof(limits->tenant), "%s", name);
    }
    char list[KVIST_CONFIG_LINE_BYTES];
    (void)snprintf(list, sizeof(list), "%s", value);
    char *rest = NULL;
    for (char *word = strtok_r(list, ", \t", &rest); word != NULL;
         word = strtok_r(NULL, ", \t", &rest)) {
        if (config->rule_count == KVIST_CONFIG_RULES_MAX) {
            return kvist_config_refuse(
                err, origin, "over %d peers in [tenants]", KVIST_CONFIG_RULES_MAX);
        }
        if (!take_word(config, limits, word)) {
            return kvist_config_refuse(
                err,
                origin,
                "tenants.%s: \"%.40s\" cannot be; allowed: uid:N, gid:N, socket:/PATH (of its "
                "own), dram:SIZE, nvme:SIZE, weight:N, read-only; see kvistd --print-config",
                name,
                word);
        }
    }
    return KVIST_OK;
}

const char *kvist_config_tenant(const struct kvist_config *config,
                                uid_t uid,
                                const gid_t *groups,
                                size_t group_count)
{
    for (size_t index = 0; index < config->rule_count; index++) {
        const struct kvist_tenant_rule *rule = &config->rules[index];
        if (!rule->group && rule->id == uid) {
            return rule->tenant;
        }
        for (size_t group = 0; rule->group && group < group_count; group++) {
            if (rule->id == groups[group]) {
                return rule->tenant;
            }
        }
    }
    return KVIST_TENANT_DEFAULT;
}

void kvist_config_print_tenants(FILE *file)
{
    (void)fputs("\n[tenants]\n", file);
    kvist_config_print_wrapped(
        file,
        "Who shares blocks with whom, and how much of the cache they may have. A peer "
        "belongs to the tenant whose socket it came through, else to the first tenant here that "
        "names its user or one of its groups, else to the tenant \"default\". Blocks are never "
        "shared across tenants.");
    kvist_config_print_wrapped(
        file,
        "uid:N, gid:N: who belongs to it (not for default). socket:/PATH: whoever comes through this socket does, "
        "and may administer nothing, root neither (at most 16 sockets): for containers, where everybody is uid 0; "
        "mount its directory into the tenant's alone. It has daemon.socket_mode and "
        "daemon.socket_group. dram:SIZE, nvme:SIZE: most memory for its "
        "blocks, most bytes on disk. weight:N: its share beside others, 1 if not said; "
        "who is over its share gives way first. read-only: its engines load and do not "
        "store, and open their pools so.");
    kvist_config_print_wrapped(
        file,
        "Memory that engines have mapped, leased or been granted comes back only when "
        "they let it go. Each tenant here, and default, can count on a sixteenth of the "
        "arena (less beside more than three others); quotas keep more for the rest. "
        "Live; who belongs where, and read-only, for new connections; a socket needs a "
        "restart. An engine whose tenant is another one than when it began is refused, and "
        "the log says so, until it is restarted.");
    (void)fputs("#team-a = uid:1000, uid:1001, dram:64G, nvme:1T\n"
                "#team-b = gid:2000, weight:2\n"
                "#team-c = socket:/run/kvist/team-c/kvist.sock, dram:16G\n"
                "#guests = gid:3000, read-only\n"
                "#default = dram:8G\n",
                file);
}
