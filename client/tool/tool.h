/*
 * tool - what the subcommands of `kvist` share.
 *
 * Role        common options, exit codes, sentences on stderr, tables and JSON on stdout
 * Errors      every failure is one sentence that says what is wrong and what to do
 */
#ifndef KVIST_TOOL_TOOL_H
#define KVIST_TOOL_TOOL_H

#include "client/tool/json.h"
#include "client/tool/request.h"

#include <getopt.h>

enum kvist_exit {
    KVIST_EXIT_OK = 0,
    KVIST_EXIT_FAILED = 1,
    KVIST_EXIT_USAGE = 2,
    KVIST_EXIT_UNREACHABLE = 3,
};

struct kvist_tool {
    const char *socket_path;
    bool socket_given;
    bool json;
    bool timeout_given;
    uint64_t timeout_us;
};

/* An option of a subcommand, beside the common ones. */
struct kvist_tool_option {
    const char *name;
    bool has_value;
    const char *text;   /* what --help says */
    const char **value; /* set to the value, or to "" */
};

struct kvist_tool_command {
    const char *name;
    const char *operands; /* for --help: "KEY", "" */
    const char *text;     /* one sentence */
    int (*run)(struct kvist_tool *tool,
               const struct kvist_tool_command *command,
               int argc,
               char **argv);
};

/**
 * Parse a subcommand's options.
 *
 * @param options  [option_count]
 * @param operand_max  operands that may stand beside the options; they begin at argv[optind]
 * @return -1 to go on, else the exit code (after --help or a usage error)
 */
int kvist_tool_parse(struct kvist_tool *tool,
                     const struct kvist_tool_command *command,
                     int argc,
                     char **argv,
                     const struct kvist_tool_option *options,
                     size_t option_count,
                     int operand_max);

/** Print a failure and choose the exit code for it. */
int kvist_tool_fail(const struct kvist_tool *tool, const struct kvist_error *err);

/** Print a usage error. */
int kvist_tool_usage(const struct kvist_tool_command *command, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/** Connect; on failure the sentence is printed and *exit_out set. */
struct kvist_request *kvist_tool_connect(const struct kvist_tool *tool, int *exit_out);

/** Ask; NULL on failure, with the sentence printed and *exit_out set. */
Kvist__Wire__Envelope *kvist_tool_ask(const struct kvist_tool *tool,
                                      struct kvist_request *request,
                                      Kvist__Wire__Envelope *envelope,
                                      Kvist__Wire__Envelope__BodyCase expected,
                                      uint64_t timeout_us,
                                      int *exit_out);

/** "1.5 GiB", for people. */
const char *kvist_tool_size(uint64_t bytes, char text_out[32]);

/** "512K", "2M", "1.5G", "4096": bytes. False for anything else. */
bool kvist_tool_parse_size(const char *text, uint64_t *bytes_out);

/** stdout took it all. @return exit_code, or FAILED with a sentence */
int kvist_tool_finish(int exit_code);

int kvist_tool_status(struct kvist_tool *, const struct kvist_tool_command *, int, char **);
int kvist_tool_stat(struct kvist_tool *, const struct kvist_tool_command *, int, char **);
int kvist_tool_pools(struct kvist_tool *, const struct kvist_tool_command *, int, char **);
int kvist_tool_inspect(struct kvist_tool *, const struct kvist_tool_command *, int, char **);
int kvist_tool_clear(struct kvist_tool *, const struct kvist_tool_command *, int, char **);
int kvist_tool_save(struct kvist_tool *, const struct kvist_tool_command *, int, char **);
int kvist_tool_bench(struct kvist_tool *, const struct kvist_tool_command *, int, char **);
int kvist_tool_replay(struct kvist_tool *, const struct kvist_tool_command *, int, char **);

#endif
