/* kvist: looks at kvistd, tells it what to do, measures it. */
#include "client/tool/tool.h"
#include "proto/base/check.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#ifndef KVIST_RELEASE
#define KVIST_RELEASE "unknown"
#endif

#define TIMEOUT_US_DEFAULT 5000000U

static const struct kvist_tool_command commands[] = {
    {"status", "", "is it well, how full is it, who uses it", kvist_tool_status},
    {"stat", "", "every metric of kvistd", kvist_tool_stat},
    {"pools", "", "pools: blocks of one model and layout", kvist_tool_pools},
    {"inspect", "KEY", "where a block is (64 hex digits)", kvist_tool_inspect},
    {"clear", "", "drop blocks from memory and NVMe", kvist_tool_clear},
    {"save", "", "write what is only in memory to NVMe", kvist_tool_save},
    {"bench", "", "measure beside memcpy, with a kvistd of its own; with --socket it fills that one's cache", kvist_tool_bench},
    {"replay", "TRACE", "what an eviction policy makes of a trace", kvist_tool_replay},
};

static void print_usage(FILE *out)
{
    (void)fputs("kvist - the KV cache of this host\n\n"
                "usage: kvist COMMAND [options]\n\n",
                out);
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(commands); index++) {
        (void)fprintf(out, "  %-10s %s\n", commands[index].name, commands[index].text);
    }
    (void)fputs("\nOptions of every command: --socket PATH, --timeout SECONDS, --json, --help.\n"
                "Exit status: 0 done, 1 failed, 2 wrong usage, 3 kvistd cannot be reached.\n",
                out);
}

/* Common options may also stand before the command: they are moved behind it. */
static int find_command(int argc, char **argv)
{
    for (int index = 1; index < argc; index++) {
        bool has_value =
            strcmp(argv[index], "--socket") == 0 || strcmp(argv[index], "--timeout") == 0;
        if (argv[index][0] != '-') {
            return index;
        }
        index += has_value;
    }
    return 0;
}

static const struct kvist_tool_command *lookup(const char *name)
{
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(commands); index++) {
        if (strcmp(commands[index].name, name) == 0) {
            return &commands[index];
        }
    }
    return NULL;
}

int main(int argc, char **argv)
{
    struct kvist_tool tool = {.timeout_us = TIMEOUT_US_DEFAULT};
    (void)signal(SIGPIPE, SIG_IGN); /* `kvist stat | head` ends with a sentence, not a signal; */
    (void)signal(SIGXFSZ, SIG_IGN); /* `kvist replay >file` under `ulimit -f`, too */
    /* NOLINTNEXTLINE(concurrency-mt-unsafe): one thread */
    tool.socket_path = getenv("KVIST_SOCKET");
    if (tool.socket_path == NULL || tool.socket_path[0] == '\0') {
        tool.socket_path = "/run/kvist/kvist.sock";
    }
    int at = find_command(argc, argv);
    if (at == 0) {
        bool version = argc > 1 && strcmp(argv[1], "--version") == 0;
        bool help = argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
        if (version) {
            (void)puts("kvist " KVIST_RELEASE);
        } else {
            print_usage(help ? stdout : stderr);
        }
        return kvist_tool_finish(version || help ? KVIST_EXIT_OK : KVIST_EXIT_USAGE);
    }
    const struct kvist_tool_command *command = lookup(argv[at]);
    if (command == NULL) {
        (void)fprintf(stderr, "kvist: there is no command \"%s\"; see kvist --help\n", argv[at]);
        return KVIST_EXIT_USAGE;
    }
    /* Take the command out, so that what stood before it is parsed with the rest. */
    memmove(&argv[at], &argv[at + 1], (size_t)(argc - at) * sizeof(argv[0]));
    return kvist_tool_finish(command->run(&tool, command, argc - 1, argv));
}
