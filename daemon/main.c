/* kvistd: the command line. What it runs is in daemon.c. */
#include "daemon/daemon.h"
#include "daemon/logging.h"
#include "proto/base/fault.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OVERRIDE_BYTES (KVIST_CONFIG_TEXT_BYTES + 64)

enum { FLAG_CONFIG = 1, FLAG_SET, FLAG_CHECK, FLAG_PRINT, FLAG_HELP, FLAG_VERSION, FLAG_SETTING };

/* Flags that stand for a setting. */
static const struct {
    const char *flag;
    const char *setting;
} short_settings[] = {
    {"socket", "daemon.socket"},
    {"metrics", "daemon.metrics_listen"},
    {"log-level", "daemon.log_level"},
    {"arena", "memory.arena_bytes"},
    {"nvme", "nvme.path"},
    {"nvme-bytes", "nvme.bytes"},
};

#define SETTING_COUNT (sizeof(short_settings) / sizeof(short_settings[0]))
#define PLAIN_COUNT   6

struct command_line {
    struct kvist_daemon_options options;
    struct kvist_config_override overrides[KVIST_CONFIG_OVERRIDES_MAX];
    char texts[KVIST_CONFIG_OVERRIDES_MAX][OVERRIDE_BYTES];
    char flags[KVIST_CONFIG_OVERRIDES_MAX][32];
    bool check;
};

/* What was printed has arrived. */
static int finish(int exit_code)
{
    if (fflush(stdout) != 0 || ferror(stdout)) {
        (void)fprintf(stderr, "kvistd: cannot write to stdout: %s\n", strerror(errno));
        return KVIST_EXIT_FAILURE;
    }
    return exit_code;
}

static void print_help(void)
{
    (void)puts(
        "kvistd - KV-cache daemon for LLM inference\n"
        "\n"
        "usage: kvistd [--config FILE] [--set SECTION.NAME=VALUE ...]\n"
        "\n"
        "  --config FILE      configuration; without it " KVIST_CONFIG_PATH ", if there is one\n"
        "  --set S.N=VALUE    a setting, over the file\n"
        "  --socket PATH      daemon.socket\n"
        "  --metrics ADDRESS  daemon.metrics_listen\n"
        "  --log-level LEVEL  daemon.log_level\n"
        "  --arena BYTES      memory.arena_bytes\n"
        "  --nvme PATH        nvme.path\n"
        "  --nvme-bytes BYTES nvme.bytes\n"
        "  --check-config     check the configuration against this machine, and exit\n"
        "  --print-config     print an example configuration that explains it all, and exit\n"
        "  --version\n"
        "\n"
        "It stays in the foreground and logs to stderr. SIGTERM: save and stop; again: stop "
        "at once.\nSIGHUP: reload. Exit status: 0 stopped, 1 failed, 2 wrong usage or "
        "configuration.\n"
        "\n"
        "Settings and defaults:");
    kvist_config_print_help(stdout);
}

static bool
add_override(struct command_line *line, const char *flag, const char *name, const char *value)
{
    size_t index = line->options.override_count;
    if (index == KVIST_CONFIG_OVERRIDES_MAX) {
        (void)fprintf(stderr, "kvistd: over %d settings in flags\n", KVIST_CONFIG_OVERRIDES_MAX);
        return false;
    }
    int length = snprintf(
        line->texts[index], OVERRIDE_BYTES, "%s%s%s", name, name[0] != '\0' ? "=" : "", value);
    if (length < 0 || length >= OVERRIDE_BYTES) {
        (void)fprintf(stderr, "kvistd: the value of --%s is too long\n", flag);
        return false;
    }
    (void)snprintf(line->flags[index], sizeof(line->flags[index]), "--%s", flag);
    line->overrides[index].flag = line->flags[index];
    line->overrides[index].assignment = line->texts[index];
    line->options.override_count++;
    return true;
}

/* @return -1 to go on, else an exit status */
static int parse(struct command_line *line, int argc, char **argv)
{
    struct option table[PLAIN_COUNT + SETTING_COUNT + 1] = {
        {"config", required_argument, NULL, FLAG_CONFIG},
        {"set", required_argument, NULL, FLAG_SET},
        {"check-config", no_argument, NULL, FLAG_CHECK},
        {"print-config", no_argument, NULL, FLAG_PRINT},
        {"help", no_argument, NULL, FLAG_HELP},
        {"version", no_argument, NULL, FLAG_VERSION},
    };
    for (int index = 0; index < (int)SETTING_COUNT; index++) {
        table[PLAIN_COUNT + index].name = short_settings[index].flag;
        table[PLAIN_COUNT + index].has_arg = required_argument;
        table[PLAIN_COUNT + index].val = FLAG_SETTING + index;
    }
    /* NOLINTNEXTLINE(concurrency-mt-unsafe): no threads yet */
    for (int flag = 0; (flag = getopt_long(argc, argv, "h", table, NULL)) != -1;) {
        switch (flag) {
        case FLAG_CONFIG:
            line->options.config_path = optarg;
            break;
        case FLAG_SET:
            if (!add_override(line, "set", "", optarg)) {
                return KVIST_EXIT_CONFIG;
            }
            break;
        case FLAG_CHECK:
            line->check = true;
            break;
        case FLAG_PRINT:
            kvist_config_print_example(stdout);
            return finish(KVIST_EXIT_OK);
        case 'h':
        case FLAG_HELP:
            print_help();
            return finish(KVIST_EXIT_OK);
        case FLAG_VERSION:
            (void)puts("kvistd " KVIST_RELEASE);
            return finish(KVIST_EXIT_OK);
        case '?':
            (void)fputs("kvistd: see kvistd --help\n", stderr);
            return KVIST_EXIT_CONFIG;
        default:
            if (!add_override(line,
                              short_settings[flag - FLAG_SETTING].flag,
                              short_settings[flag - FLAG_SETTING].setting,
                              optarg)) {
                return KVIST_EXIT_CONFIG;
            }
            break;
        }
    }
    if (optind < argc) {
        (void)fprintf(stderr, "kvistd: \"%s\" is no flag; see kvistd --help\n", argv[optind]);
        return KVIST_EXIT_CONFIG;
    }
    return -1;
}

static int check(const struct kvist_daemon_options *options)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    struct kvist_config *config = calloc(1, sizeof(*config));
    if (config == NULL) {
        (void)fputs("kvistd: out of memory\n", stderr);
        return KVIST_EXIT_FAILURE;
    }
    enum kvist_status status = kvist_daemon_check(options, config, &err);
    bool without = status != KVIST_OK && kvist_tier_may_pass(config->nvme_path, err.code);
    int exit_code = kvist_daemon_exit_code(status);
    if (status == KVIST_OK || without) {
        char size[32];
        const char *path = options->config_path != NULL ? options->config_path : KVIST_CONFIG_PATH;
        (void)printf("the configuration is good: %s%s; arena_bytes = %s\n",
                     path,
                     access(path, F_OK) == 0 ? "" : " (not there: defaults and flags)",
                     kvist_size_format(config->memory_arena_bytes, size));
        exit_code = KVIST_EXIT_OK;
    }
    if (status != KVIST_OK) {
        (void)fprintf(stderr,
                      "kvistd: %s%s\n",
                      without ? "for now it would start without its NVMe tier: " : "",
                      err.text);
    }
    free(config);
    return exit_code;
}

int main(int argc, char **argv)
{
    static struct command_line line;
    line.options.overrides = line.overrides;
    int exit_code = parse(&line, argc, argv);
    if (exit_code >= 0) {
        return exit_code;
    }
    if (line.check) {
        return finish(check(&line.options));
    }
    kvist_logging_start(KVIST_LOG_INFO);
    const char *fault = getenv("KVIST_FAULT"); /* NOLINT(concurrency-mt-unsafe): no threads yet */
    if (fault != NULL) {
        if (!kvist_fault_arm_text(fault)) {
            kvist_log(KVIST_LOG_ERROR, "KVIST_FAULT must be NAME:NTH or NAME:NTH+");
            return KVIST_EXIT_CONFIG;
        }
        kvist_log(KVIST_LOG_WARN, "a fault is armed for a test name=%s", fault);
    }
    return kvist_daemon_run(&line.options);
}
