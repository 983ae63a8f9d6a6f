/* config: files, flags, reload, tenants, printing. */
#include "daemon/config.h"
#include "proto/base/check.h"
#include "tests/support/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DIFFERS_BYTES 128

static char path[64];
static struct kvist_config config;
static struct kvist_error err;

static void setup(void)
{
    (void)snprintf(path, sizeof(path), "/tmp/kvist-config-XXXXXX");
    int fd = mkstemp(path);
    KVIST_TEST_FATAL(fd >= 0);
    (void)close(fd);
    memset(&config, 0xaa, sizeof(config));
    err = (struct kvist_error)KVIST_ERROR_INIT;
}

static void teardown(void)
{
    (void)unlink(path);
}

static void write_file(const char *bytes, size_t length)
{
    FILE *file = fopen(path, "w");
    KVIST_TEST_FATAL(file != NULL);
    KVIST_TEST_FATAL(fwrite(bytes, 1, length, file) == length);
    KVIST_TEST_FATAL(fclose(file) == 0);
}

static enum kvist_status load(const char *text)
{
    write_file(text, strlen(text));
    return kvist_config_load(path, NULL, 0, &config, &err);
}

static enum kvist_status load_flag(const char *assignment)
{
    const struct kvist_config_override override = {"--set", assignment};
    return kvist_config_load(path, &override, 1, &config, &err);
}

static void an_empty_file_is_the_defaults(void)
{
    KVIST_TEST_STATUS(load(""), KVIST_OK);
    CU_ASSERT_STRING_EQUAL(config.daemon_socket, "/run/kvist/kvist.sock");
    KVIST_TEST_EQUAL(config.daemon_socket_mode, 0660);
    KVIST_TEST_EQUAL(config.memory_arena_bytes, 0);
    KVIST_TEST_EQUAL(config.nvme_bytes, 0);
    KVIST_TEST_EQUAL(config.daemon_log_level, 2);
    KVIST_TEST_EQUAL(config.rule_count, 0);
    KVIST_TEST_STATUS(kvist_config_load(NULL, NULL, 0, &config, &err), KVIST_OK);
}

static void values_are_read(void)
{
    KVIST_TEST_STATUS(load("; comment\n[memory]\r\n  arena_bytes=3g\r\nhuge_pages = off\n"
                           "[ nvme ]\npath = /srv/a b=c\nbytes\t=\t1536M\nadmission=all\n"
                           "[limits]\nhold_ms = 10"),
                      KVIST_OK);
    KVIST_TEST_EQUAL(config.memory_arena_bytes, 3ULL << 30);
    KVIST_TEST_EQUAL(config.memory_huge_pages, 1);
    CU_ASSERT_STRING_EQUAL(config.nvme_path, "/srv/a b=c");
    KVIST_TEST_EQUAL(config.nvme_bytes, 1536ULL << 20);
    KVIST_TEST_EQUAL(config.nvme_admission, 1);
    KVIST_TEST_EQUAL(config.limits_hold_ms, 10);
}

static void limits_hold_on_both_sides(void)
{
    static const struct {
        const char *text;
        enum kvist_status status;
    } cases[] = {
        {"[memory]\narena_bytes = 16M\n", KVIST_OK},
        {"[memory]\narena_bytes = 16777215\n", KVIST_INVALID},
        {"[memory]\narena_bytes = 64T\n", KVIST_OK},
        {"[memory]\narena_bytes = 70368744177665\n", KVIST_INVALID},
        {"[memory]\narena_bytes = 99999999999999999999\n", KVIST_INVALID},
        {"[memory]\narena_bytes = 16777216T\n", KVIST_INVALID},
        {"[memory]\narena_bytes = 0\n", KVIST_INVALID},
        {"[memory]\narena_bytes = 1GB\n", KVIST_INVALID},
        {"[memory]\narena_bytes = 1 G\n", KVIST_INVALID},
        {"[memory]\narena_bytes = +1G\n", KVIST_INVALID},
        {"[memory]\narena_bytes =\n", KVIST_INVALID},
        {"[memory]\narena_bytes = auto\n", KVIST_OK},
        {"[memory]\nhuge_pages = \n", KVIST_INVALID},
        {"[memory]\nhuge_pages = auto|off\n", KVIST_INVALID},
        {"[limits]\nhold_ms = 0x10\n", KVIST_INVALID},
        {"[limits]\nhold_ms = 600000\n", KVIST_OK},
        {"[limits]\nhold_ms = 600001\n", KVIST_INVALID},
        {"[daemon]\nsocket_mode = 666\n", KVIST_OK},
        {"[daemon]\nsocket_mode = 0800\n", KVIST_INVALID},
        {"[daemon]\nsocket_group =\n", KVIST_OK},
    };
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(cases); index++) {
        KVIST_TEST_STATUS(load(cases[index].text), cases[index].status);
    }
}

static void a_failure_names_place_and_remedy(void)
{
    KVIST_TEST_STATUS(load("[daemon]\n\nlog_levle = info\n"), KVIST_INVALID);
    char expected[256];
    (void)snprintf(expected,
                   sizeof(expected),
                   "%s:3: there is no setting daemon.log_levle; did you mean daemon.log_level?",
                   path);
    CU_ASSERT_STRING_EQUAL(err.text, expected);
    KVIST_TEST_STATUS(load(""), KVIST_OK);
    KVIST_TEST_STATUS(load_flag("nvme.path"), KVIST_INVALID);
    KVIST_TEST_TRUE(strncmp(err.text, "--set: ", 7) == 0);
    KVIST_TEST_STATUS(kvist_config_load("/nonexistent", NULL, 0, &config, &err), KVIST_NOT_FOUND);
    KVIST_TEST_STATUS(kvist_config_load("/", NULL, 0, &config, &err), KVIST_INVALID);
}

static void nothing_is_written_on_failure(void)
{
    struct kvist_config before = config;
    KVIST_TEST_STATUS(load("[daemon]\nlog_level = debug\nnonsense = 1\n"), KVIST_INVALID);
    /* NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): padding must stay, too */
    KVIST_TEST_EQUAL(memcmp(&before, &config, sizeof(config)), 0);
}

static void flags_go_over_the_file(void)
{
    write_file("[daemon]\nlog_level = error\n", 27);
    KVIST_TEST_STATUS(load_flag("daemon.log_level=debug"), KVIST_OK);
    KVIST_TEST_EQUAL(config.daemon_log_level, 3);
    KVIST_TEST_STATUS(load_flag(" memory.arena_bytes = 1G"), KVIST_OK);
    KVIST_TEST_EQUAL(config.memory_arena_bytes, 1ULL << 30);
    KVIST_TEST_STATUS(load_flag("tenants.a=uid:7"), KVIST_OK);
    KVIST_TEST_EQUAL(config.rule_count, 1);
    KVIST_TEST_STATUS(load_flag("daemon=1"), KVIST_INVALID);
    KVIST_TEST_STATUS(load_flag(".=x"), KVIST_INVALID);
    KVIST_TEST_STATUS(load_flag(""), KVIST_INVALID);
}

static void bytes_that_are_no_text_are_refused(void)
{
    write_file("[daemon]\n\0\n", 11);
    KVIST_TEST_STATUS(kvist_config_load(path, NULL, 0, &config, &err), KVIST_INVALID);
    char longer[KVIST_CONFIG_LINE_BYTES + 2];
    memset(longer, '#', sizeof(longer));
    longer[KVIST_CONFIG_LINE_BYTES - 2] = '\n';
    write_file(longer, KVIST_CONFIG_LINE_BYTES - 1);
    KVIST_TEST_STATUS(kvist_config_load(path, NULL, 0, &config, &err), KVIST_OK);
    longer[KVIST_CONFIG_LINE_BYTES - 2] = '#';
    write_file(longer, KVIST_CONFIG_LINE_BYTES);
    KVIST_TEST_STATUS(kvist_config_load(path, NULL, 0, &config, &err), KVIST_INVALID);
}

/* The same numbers in every run. */
static size_t next_number(uint64_t *state, size_t below)
{
    *state = *state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (size_t)(*state >> 33) % below;
}

static void random_bytes_never_harm(void)
{
    uint64_t state = 7;
    static const char *const parts[] = {"[",
                                        "]",
                                        "daemon",
                                        "=",
                                        "\n",
                                        "socket",
                                        " ",
                                        "#",
                                        "\0",
                                        "nvme",
                                        "tenants",
                                        "uid:",
                                        "4",
                                        "M",
                                        "\xff",
                                        ",",
                                        ".",
                                        "x"};
    for (int turn = 0; turn < 3000; turn++) {
        char text[512];
        size_t length = 0;
        for (size_t count = next_number(&state, 40); count > 0; count--) {
            const char *part = parts[next_number(&state, KVIST_ARRAY_COUNT(parts))];
            size_t bytes = part[0] == '\0' ? 1 : strlen(part);
            for (size_t index = 0; index < bytes; index++) {
                text[length + index] = part[index];
            }
            length += bytes;
        }
        write_file(text, length);
        enum kvist_status status = kvist_config_load(path, NULL, 0, &config, &err);
        KVIST_TEST_TRUE(status == KVIST_OK || (status == KVIST_INVALID && err.text[0] != '\0'));
    }
}

static void tenants_have_limits(void)
{
    KVIST_TEST_STATUS(load("[tenants]\na = uid:10, dram:64G, nvme:1T, weight:3\n"
                           "b = gid:20 read-only\ndefault = dram:1M\nb = uid:9, nvme:64M\n"),
                      KVIST_OK);
    const struct kvist_tenant_limits *a = kvist_config_limits(&config, "a");
    const struct kvist_tenant_limits *b = kvist_config_limits(&config, "b");
    const struct kvist_tenant_limits *rest = kvist_config_limits(&config, KVIST_TENANT_DEFAULT);
    KVIST_TEST_FATAL(a != NULL && b != NULL && rest != NULL);
    KVIST_TEST_TRUE(kvist_config_limits(&config, "c") == NULL);
    KVIST_TEST_EQUAL(a->dram_bytes, 64ULL << 30);
    KVIST_TEST_EQUAL(a->nvme_bytes, 1ULL << 40);
    KVIST_TEST_EQUAL(a->weight, 3);
    KVIST_TEST_TRUE(!a->read_only);
    KVIST_TEST_TRUE(b->read_only);
    KVIST_TEST_EQUAL(b->nvme_bytes, 64ULL << 20); /* lines of one tenant add up */
    KVIST_TEST_EQUAL(b->dram_bytes, 0);
    KVIST_TEST_EQUAL(rest->dram_bytes, 1ULL << 20);
    KVIST_TEST_EQUAL(rest->weight, 1);
    static const char *const bad[] = {
        "dram:",
        "dram:1K",
        "dram:2048T",
        "nvme:63M",
        "nvme:x",
        "weight:0",
        "weight:1001",
        "weight:1M",
        "readonly",
        "read-only:1",
        "dram",
    };
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(bad); index++) {
        char text[128];
        (void)snprintf(text, sizeof(text), "[tenants]\na = uid:1, %s\n", bad[index]);
        KVIST_TEST_STATUS(load(text), KVIST_INVALID);
    }
}

static void tenants_go_by_user_and_group(void)
{
    KVIST_TEST_STATUS(load("[tenants]\na = uid:10, uid:11\nb = gid:20\nc=uid:12,gid:21\n"),
                      KVIST_OK);
    const gid_t none[] = {1, 2};
    const gid_t some[] = {1, 20};
    CU_ASSERT_STRING_EQUAL(kvist_config_tenant(&config, 11, none, 2), "a");
    CU_ASSERT_STRING_EQUAL(kvist_config_tenant(&config, 11, some, 2), "a");
    CU_ASSERT_STRING_EQUAL(kvist_config_tenant(&config, 20, some, 2), "b");
    CU_ASSERT_STRING_EQUAL(kvist_config_tenant(&config, 20, none, 2), "default");
    CU_ASSERT_STRING_EQUAL(kvist_config_tenant(&config, 12, NULL, 0), "c");
    KVIST_TEST_STATUS(load("[tenants]\nA = uid:1\n"), KVIST_INVALID);
    KVIST_TEST_STATUS(load("[tenants]\na = 1\n"), KVIST_INVALID);
    KVIST_TEST_STATUS(load("[tenants]\na = uid:4294967295\n"), KVIST_INVALID); /* nobody's */
    KVIST_TEST_STATUS(load("[tenants]\ndefault = uid:1\n"), KVIST_INVALID);
}

static void tenants_have_sockets(void)
{
    KVIST_TEST_STATUS(load("[tenants]\na = socket:/run/a, dram:1G\nb = uid:1\n"), KVIST_OK);
    CU_ASSERT_STRING_EQUAL(kvist_config_limits(&config, "a")->socket, "/run/a");
    CU_ASSERT_STRING_EQUAL(kvist_config_limits(&config, "b")->socket, "");
    KVIST_TEST_STATUS(load("[tenants]\na = socket:relative\n"), KVIST_INVALID);
    KVIST_TEST_STATUS(load("[tenants]\na = socket:\n"), KVIST_INVALID);
    KVIST_TEST_STATUS(load("[tenants]\na = socket:/s\nb = socket:/s\n"), KVIST_INVALID);
    KVIST_TEST_STATUS(load("[daemon]\nsocket = /s\n[tenants]\na = socket:/s\n"), KVIST_INVALID);
    KVIST_TEST_TRUE(strstr(err.text, "daemon.socket") != NULL);
    char text[2048] = "[tenants]\n";
    for (int index = 0; index <= KVIST_CONFIG_SOCKETS_MAX; index++) {
        KVIST_TEST_STATUS(load(text), KVIST_OK);
        size_t length = strlen(text);
        (void)snprintf(text + length, sizeof(text) - length, "t%d = socket:/%d\n", index, index);
    }
    KVIST_TEST_STATUS(load(text), KVIST_INVALID);
}

static void note_setting(void *ctx, const char *section, const char *name)
{
    char *text = ctx;
    size_t length = strlen(text);
    (void)snprintf(text + length, DIFFERS_BYTES - length, "%s.%s ", section, name);
}

static void a_reload_takes_what_is_live(void)
{
    KVIST_TEST_STATUS(load("[daemon]\nlog_level = info\n"), KVIST_OK);
    struct kvist_config fresh = config;
    char restart[DIFFERS_BYTES] = "";
    fresh.daemon_log_level = 3;
    fresh.daemon_send_timeout_ms = 77;
    kvist_config_reload(&config, &fresh, note_setting, restart);
    CU_ASSERT_STRING_EQUAL(restart, "");
    KVIST_TEST_EQUAL(config.daemon_log_level, 3);
    KVIST_TEST_EQUAL(config.daemon_send_timeout_ms, 77);
    fresh.memory_arena_bytes = 5;
    (void)strcpy(fresh.daemon_socket, "/other");
    kvist_config_reload(&config, &fresh, note_setting, restart);
    CU_ASSERT_STRING_EQUAL(restart, "daemon.socket memory.arena_bytes ");
    KVIST_TEST_EQUAL(config.memory_arena_bytes, 0);
    CU_ASSERT_STRING_EQUAL(config.daemon_socket, "/run/kvist/kvist.sock");
    restart[0] = '\0';
    KVIST_TEST_STATUS(load("[tenants]\na = socket:/a\nb = socket:/b\n"), KVIST_OK);
    fresh = config;
    (void)strcpy(fresh.limits[1].socket, "/c");
    kvist_config_reload(&config, &fresh, note_setting, restart);
    CU_ASSERT_STRING_EQUAL(restart, "tenants.b ");
    restart[0] = '\0';
    KVIST_TEST_STATUS(load(""), KVIST_OK);
    struct kvist_config none = config;
    kvist_config_reload(&config, &fresh, note_setting, restart);
    kvist_config_reload(&config, &none, note_setting, restart);
    CU_ASSERT_STRING_EQUAL(restart, "tenants.a tenants.b tenants.a tenants.b ");
}

static void sizes_are_written_as_people_do(void)
{
    char text[32];
    CU_ASSERT_STRING_EQUAL(kvist_size_format(0, text), "0");
    CU_ASSERT_STRING_EQUAL(kvist_size_format(1000, text), "1000");
    CU_ASSERT_STRING_EQUAL(kvist_size_format(1536ULL << 20, text), "1536M");
    CU_ASSERT_STRING_EQUAL(kvist_size_format(64ULL << 40, text), "64T");
    CU_ASSERT_STRING_EQUAL(kvist_size_format(4096ULL << 40, text), "4096T");
}

static void the_example_is_a_configuration(void)
{
    FILE *file = fopen(path, "w");
    KVIST_TEST_FATAL(file != NULL);
    kvist_config_print_example(file);
    KVIST_TEST_FATAL(fclose(file) == 0);
    KVIST_TEST_STATUS(kvist_config_load(path, NULL, 0, &config, &err), KVIST_OK);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"an empty file is the defaults", an_empty_file_is_the_defaults},
        {"values are read", values_are_read},
        {"limits hold on both sides", limits_hold_on_both_sides},
        {"a failure names place and remedy", a_failure_names_place_and_remedy},
        {"nothing is written on failure", nothing_is_written_on_failure},
        {"flags go over the file", flags_go_over_the_file},
        {"bytes that are no text are refused", bytes_that_are_no_text_are_refused},
        {"random bytes never harm", random_bytes_never_harm},
        {"tenants go by user and group", tenants_go_by_user_and_group},
        {"tenants have limits", tenants_have_limits},
        {"tenants have sockets", tenants_have_sockets},
        {"a reload takes what is live", a_reload_takes_what_is_live},
        {"sizes are written as people do", sizes_are_written_as_people_do},
        {"the example is a configuration", the_example_is_a_configuration},
    };
    return kvist_unit_main("config", cases, KVIST_ARRAY_COUNT(cases), setup, teardown);
}
