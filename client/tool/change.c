/* kvist clear, save: what kvistd is told to do. */
#include "client/tool/tool.h"
#include "proto/key/key.h"

#include <string.h>
#include <unistd.h>

#define LONG_TIMEOUT_US 600000000U /* of what waits for a disk, unless --timeout says otherwise */

static uint64_t long_timeout(const struct kvist_tool *tool)
{
    return tool->timeout_given ? tool->timeout_us : LONG_TIMEOUT_US;
}

/* --- clear --------------------------------------------------------------------------------- */

static bool confirm(const char *what)
{
    char answer[16] = "";
    (void)fprintf(stderr, "Drop all blocks of %s, in memory and on NVMe? Type yes: ", what);
    return fgets(answer, sizeof(answer), stdin) != NULL && strcmp(answer, "yes\n") == 0;
}

/* kvistd decides by who asks; that root is asked for all tenants is known here. */
static const char *what_is_all(void)
{
    return geteuid() == 0 ? "every pool of every tenant"
                          : "every pool of your tenant (of every tenant, as kvistd's own user)";
}

static int send_clear(struct kvist_tool *tool, Kvist__Wire__Clear *clear)
{
    int exit_code = KVIST_EXIT_FAILED;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_CLEAR;
    envelope.clear = clear;
    struct kvist_request *request = kvist_tool_connect(tool, &exit_code);
    Kvist__Wire__Envelope *reply = NULL;
    if (request != NULL) {
        reply = kvist_tool_ask(tool,
                               request,
                               &envelope,
                               KVIST__WIRE__ENVELOPE__BODY_CLEAR_REPLY,
                               long_timeout(tool),
                               &exit_code);
    }
    if (reply != NULL && tool->json) {
        struct kvist_json json;
        kvist_json_init(&json, stdout);
        kvist_json_object(&json, NULL);
        kvist_json_number(&json, "blocks", reply->clear_reply->blocks);
        kvist_json_close(&json);
    } else if (reply != NULL) {
        (void)printf("%llu blocks dropped\n", (unsigned long long)reply->clear_reply->blocks);
    }
    exit_code = reply != NULL ? KVIST_EXIT_OK : exit_code;
    kvist_message_free(&reply);
    kvist_request_close(&request);
    return exit_code;
}

int kvist_tool_clear(struct kvist_tool *tool,
                     const struct kvist_tool_command *command,
                     int argc,
                     char **argv)
{
    const char *pool = NULL;
    const char *all = NULL;
    const char *yes = NULL;
    const struct kvist_tool_option options[] = {
        {"pool ID", true, "one pool, as `kvist pools` names it", &pool},
        {"all",
         false,
         "every pool of your tenant; of all tenants for root and kvistd's user",
         &all},
        {"yes", false, "do not ask", &yes},
    };
    uint8_t id[KVIST_KEY_BYTES];
    int exit_code = kvist_tool_parse(tool, command, argc, argv, options, 3, 0);
    if (exit_code >= 0) {
        return exit_code;
    }
    if ((pool != NULL) == (all != NULL)) {
        return kvist_tool_usage(command, "say what to clear: --pool ID or --all");
    }
    if (pool != NULL && kvist_key_parse(pool, id) != KVIST_OK) {
        return kvist_tool_usage(command, "\"%s\" is no pool; see kvist pools", pool);
    }
    if (yes == NULL && !isatty(STDIN_FILENO)) {
        return kvist_tool_usage(command, "say --yes: there is no terminal to ask on");
    }
    if (yes == NULL && !confirm(pool != NULL ? "that pool" : what_is_all())) {
        (void)fputs("kvist: nothing was cleared\n", stderr);
        return KVIST_EXIT_FAILED;
    }
    Kvist__Wire__Clear clear;
    kvist__wire__clear__init(&clear);
    clear.scope =
        pool != NULL ? KVIST__WIRE__CLEAR__SCOPE__SCOPE_POOL : KVIST__WIRE__CLEAR__SCOPE__SCOPE_ALL;
    clear.pool_id.data = pool != NULL ? id : NULL;
    clear.pool_id.len = pool != NULL ? sizeof(id) : 0;
    return send_clear(tool, &clear);
}

/* --- save ---------------------------------------------------------------------------------- */

static void print_saved(const struct kvist_tool *tool, const Kvist__Wire__AdminReply *saved)
{
    char size[32];
    if (tool->json) {
        struct kvist_json json;
        kvist_json_init(&json, stdout);
        kvist_json_object(&json, NULL);
        kvist_json_number(&json, "blocks", saved->blocks);
        kvist_json_number(&json, "bytes", saved->bytes);
        kvist_json_number(&json, "unsaved_blocks", saved->unsaved_blocks);
        kvist_json_number(&json, "unsaved_bytes", saved->unsaved_bytes);
        kvist_json_text(&json, "reason", saved->reason);
        kvist_json_close(&json);
    } else {
        (void)printf("%llu blocks written to NVMe (%s)\n",
                     (unsigned long long)saved->blocks,
                     kvist_tool_size(saved->bytes, size));
    }
    if (saved->unsaved_blocks > 0) {
        (void)fprintf(stderr,
                      "kvist: %llu of %llu blocks could not be written (%s): %s\n",
                      (unsigned long long)saved->unsaved_blocks,
                      (unsigned long long)(saved->blocks + saved->unsaved_blocks),
                      kvist_tool_size(saved->unsaved_bytes, size),
                      saved->reason);
    }
}

int kvist_tool_save(struct kvist_tool *tool,
                    const struct kvist_tool_command *command,
                    int argc,
                    char **argv)
{
    int exit_code = kvist_tool_parse(tool, command, argc, argv, NULL, 0, 0);
    if (exit_code >= 0) {
        return exit_code;
    }
    Kvist__Wire__Admin admin;
    Kvist__Wire__Envelope envelope;
    kvist__wire__admin__init(&admin);
    kvist__wire__envelope__init(&envelope);
    admin.action = KVIST__WIRE__ADMIN__ACTION__ACTION_SAVE;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_ADMIN;
    envelope.admin = &admin;
    struct kvist_request *request = kvist_tool_connect(tool, &exit_code);
    Kvist__Wire__Envelope *reply = NULL;
    if (request != NULL) {
        reply = kvist_tool_ask(tool,
                               request,
                               &envelope,
                               KVIST__WIRE__ENVELOPE__BODY_ADMIN_REPLY,
                               long_timeout(tool),
                               &exit_code);
    }
    if (reply != NULL) {
        print_saved(tool, reply->admin_reply);
        exit_code = reply->admin_reply->unsaved_blocks == 0 ? KVIST_EXIT_OK : KVIST_EXIT_FAILED;
    }
    kvist_message_free(&reply);
    kvist_request_close(&request);
    return exit_code;
}
