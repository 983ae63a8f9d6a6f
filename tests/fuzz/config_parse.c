/*
 * Fuzz target: the configuration file, flags that go over it, and the address of the status pages.
 *
 * Input: the file; after a byte 1, a flag's `section.key=value`; and so on. Whatever is refused
 * says why and changes nothing; what is accepted is within the limits of config.def.
 */
#include "daemon/config.h"
#include "daemon/http.h"
#include "tests/fuzz/fuzz.h"

#include <sys/mman.h>
#include <unistd.h>

#define SEPARATOR       '\1'
#define INPUT_BYTES_MAX 16384U
#define FLAGS_MAX       8U

static void check_text(const char *text, uint64_t min, uint64_t max)
{
    size_t length = strnlen(text, KVIST_CONFIG_TEXT_BYTES);
    KVIST_FUZZ_REQUIRE(length < KVIST_CONFIG_TEXT_BYTES && length >= min && length <= max);
}

static void check_number(uint64_t value, uint64_t min, uint64_t max, const char *also)
{
    KVIST_FUZZ_REQUIRE((value >= min && value <= max) || (also[0] != '\0' && value == 0));
}

static void check_choice(uint64_t value, const char *choices)
{
    uint64_t count = 1;
    for (const char *at = choices; *at != '\0'; at++) {
        count += *at == '|';
    }
    KVIST_FUZZ_REQUIRE(value < count);
}

#define CHECK_TEXT(value, min, max, choices)   check_text(value, min, max)
#define CHECK_SIZE(value, min, max, choices)   check_number(value, min, max, choices)
#define CHECK_COUNT(value, min, max, choices)  check_number(value, min, max, choices)
#define CHECK_MODE(value, min, max, choices)   check_number(value, min, max, "")
#define CHECK_CHOICE(value, min, max, choices) check_choice(value, choices)

static void check_config(const struct kvist_config *config)
{
#define KVIST_CONFIG(section, name, kind, min, max, fallback, choices, live, help)                 \
    CHECK_##kind(config->section##_##name, min, max, choices);
#include "daemon/config.def"
#undef KVIST_CONFIG
    KVIST_FUZZ_REQUIRE(config->rule_count <= KVIST_CONFIG_RULES_MAX);
    for (size_t index = 0; index < config->rule_count; index++) {
        const struct kvist_tenant_rule *rule = &config->rules[index];
        gid_t group = rule->id;
        KVIST_FUZZ_REQUIRE(strnlen(rule->tenant, sizeof(rule->tenant)) <= KVIST_TENANT_BYTES_MAX);
        const char *tenant = rule->group ? kvist_config_tenant(config, UINT32_MAX, &group, 1)
                                         : kvist_config_tenant(config, rule->id, NULL, 0);
        KVIST_FUZZ_REQUIRE(strcmp(tenant, KVIST_TENANT_DEFAULT) != 0);
    }
}

static void check_address(const struct kvist_config *config)
{
    struct kvist_http_address address = {.tcp_bytes = 99};
    struct kvist_error err = KVIST_ERROR_INIT;
    for (int remote = 0; remote < 2; remote++) {
        enum kvist_status status =
            kvist_http_address_parse(config->daemon_metrics_listen, remote != 0, &address, &err);
        KVIST_FUZZ_REQUIRE(status == KVIST_OK || err.text[0] != '\0');
        KVIST_FUZZ_REQUIRE(status != KVIST_OK ||
                           address.tcp_bytes <= sizeof(struct sockaddr_storage));
    }
}

static int make_file(const char *bytes, size_t length)
{
    int fd = memfd_create("config", MFD_CLOEXEC);
    KVIST_FUZZ_REQUIRE(fd >= 0 && write(fd, bytes, length) == (ssize_t)length);
    return fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct kvist_config config;
    struct kvist_config_override flags[FLAGS_MAX];
    char text[INPUT_BYTES_MAX + 1];
    char path[64];
    if (size > INPUT_BYTES_MAX) {
        return 0;
    }
    memcpy(text, data, size);
    text[size] = '\0';
    size_t flag_count = 0;
    char *end = memchr(text, SEPARATOR, size);
    size_t file_bytes = end != NULL ? (size_t)(end - text) : size;
    while (end != NULL && flag_count < FLAGS_MAX) {
        *end = '\0';
        flags[flag_count++] = (struct kvist_config_override){"--flag", end + 1};
        end = strchr(end + 1, SEPARATOR);
    }
    if (end != NULL) {
        *end = '\0';
    }
    int fd = make_file(text, file_bytes);
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    memset(&config, 0x5a, sizeof(config));
    struct kvist_error err = KVIST_ERROR_INIT;
    enum kvist_status status = kvist_config_load(path, flags, flag_count, &config, &err);
    (void)close(fd);
    if (status != KVIST_OK) {
        KVIST_FUZZ_REQUIRE(status == KVIST_INVALID && err.text[0] != '\0');
        KVIST_FUZZ_REQUIRE(*(const uint8_t *)&config == 0x5a && config.rule_count != 0);
        return 0;
    }
    check_config(&config);
    check_address(&config);
    return 0;
}

void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx)
{
    char *example = NULL;
    size_t length = 0;
    FILE *file = open_memstream(&example, &length);
    KVIST_FUZZ_REQUIRE(file != NULL);
    kvist_config_print_example(file);
    KVIST_FUZZ_REQUIRE(fclose(file) == 0);
    emit(ctx, example, length < INPUT_BYTES_MAX ? length : INPUT_BYTES_MAX);
    free(example);
#define KVIST_CONFIG(section, name, kind, min, max, fallback, choices, live, help)                 \
    "[" #section "]\n" #name " = " fallback "\n"
    static const char lines[] =
#include "daemon/config.def"
        ;
#undef KVIST_CONFIG
    static const char tenants[] = "[tenants]\nalpha = uid:1000, gid:2000\nbeta = gid:7\n"
                                  "\1tenants.gamma=uid:3\1memory.arena=64M";
    static const char nvme[] = "[nvme]\npath = /x\nbytes = 1T\n\1daemon.metrics_listen=[::1]:80"
                               "\1daemon.metrics_allow_remote=yes";
    emit(ctx, lines, sizeof(lines) - 1);
    emit(ctx, tenants, sizeof(tenants) - 1);
    emit(ctx, nvme, sizeof(nvme) - 1);
}
