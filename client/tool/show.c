/* kvist status, stat, pools, inspect: what is there. */
#include "client/tool/tool.h"
#include "proto/base/check.h"
#include "proto/key/key.h"

#include <stdlib.h>
#include <string.h>

/* --- Asking -------------------------------------------------------------------------------- */

static Kvist__Wire__Envelope *
ask_stat(const struct kvist_tool *tool, struct kvist_request *request, int *exit_out)
{
    Kvist__Wire__Stat stat;
    Kvist__Wire__Envelope envelope;
    kvist__wire__stat__init(&stat);
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_STAT;
    envelope.stat = &stat;
    return kvist_tool_ask(tool,
                          request,
                          &envelope,
                          KVIST__WIRE__ENVELOPE__BODY_STAT_REPLY,
                          tool->timeout_us,
                          exit_out);
}

/* All pages of List. */
struct listing {
    Kvist__Wire__Envelope **pages;
    size_t page_count;
};

static void free_listing(struct listing *listing)
{
    for (size_t index = 0; index < listing->page_count; index++) {
        kvist_message_free(&listing->pages[index]);
    }
    free(listing->pages);
    *listing = (struct listing){.pages = NULL};
}

static Kvist__Wire__Envelope *ask_page(const struct kvist_tool *tool,
                                       struct kvist_request *request,
                                       uint32_t offset,
                                       int *exit_out)
{
    Kvist__Wire__List list;
    Kvist__Wire__Envelope envelope;
    kvist__wire__list__init(&list);
    kvist__wire__envelope__init(&envelope);
    list.offset = offset;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_LIST;
    envelope.list = &list;
    return kvist_tool_ask(tool,
                          request,
                          &envelope,
                          KVIST__WIRE__ENVELOPE__BODY_LIST_REPLY,
                          tool->timeout_us,
                          exit_out);
}

static bool ask_listing(const struct kvist_tool *tool,
                        struct kvist_request *request,
                        struct listing *listing,
                        int *exit_out)
{
    uint32_t offset = 0;
    *listing = (struct listing){.pages = NULL};
    do {
        *exit_out = KVIST_EXIT_FAILED;
        Kvist__Wire__Envelope **pages =
            realloc(listing->pages, (listing->page_count + 1) * sizeof(void *));
        listing->pages = pages != NULL ? pages : listing->pages;
        Kvist__Wire__Envelope *page =
            pages != NULL ? ask_page(tool, request, offset, exit_out) : NULL;
        if (page == NULL) {
            free_listing(listing);
            return false;
        }
        listing->pages[listing->page_count++] = page;
        uint32_t next = page->list_reply->next_offset;
        offset = next > offset ? next : 0; /* a list that does not go on has ended */
    } while (offset != 0);
    return true;
}

/* --- status -------------------------------------------------------------------------------- */

static double metric(const Kvist__Wire__StatReply *stat, const char *name)
{
    for (size_t index = 0; index < stat->n_metrics; index++) {
        if (strcmp(stat->metrics[index]->name, name) == 0) {
            return stat->metrics[index]->value;
        }
    }
    return 0;
}

static uint64_t count(const Kvist__Wire__StatReply *stat, const char *name)
{
    double value = metric(stat, name);
    return value > 0 && value < 1e18 ? (uint64_t)value : 0;
}

static void json_session(struct kvist_json *json, const Kvist__Wire__SessionInfo *session)
{
    kvist_json_object(json, NULL);
    kvist_json_hex(json, "session_id", session->session_id.data, session->session_id.len);
    kvist_json_text(json, "name", session->name);
    kvist_json_text(json, "tenant", session->tenant);
    kvist_json_number(json, "processes", session->processes);
    kvist_json_number(json, "rank_count", session->rank_count);
    kvist_json_number(json, "leased_slots", session->leased_slots);
    kvist_json_number(json, "granted_slots", session->granted_slots);
    kvist_json_array(json, "pids");
    for (size_t index = 0; index < session->n_pids; index++) {
        kvist_json_number(json, NULL, session->pids[index]);
    }
    kvist_json_close(json);
    kvist_json_close(json);
}

static void json_status(const struct kvist_tool *tool,
                        const Kvist__Wire__HelloReply *daemon,
                        const Kvist__Wire__StatReply *stat,
                        const struct listing *listing)
{
    static const char *const shown[] = {
        "up_seconds",
        "arena_bytes",
        "arena_used_bytes",
        "populated_bytes",
        "block_bytes_ready",
        "slots_ready",
        "slots_free",
        "leased_slots",
        "slots_granted",
        "free_bytes",
        "granted_bytes",
        "pools",
        "sessions",
        "processes",
        "nvme_blocks",
        "nvme_disk_bytes",
        "nvme_disk_bytes_max",
    };
    struct kvist_json json;
    kvist_json_init(&json, stdout);
    kvist_json_object(&json, NULL);
    kvist_json_text(&json, "socket", tool->socket_path);
    kvist_json_text(&json, "version", daemon->version);
    char instance[17];
    (void)snprintf(instance, sizeof(instance), "%016llx", (unsigned long long)daemon->instance);
    kvist_json_text(&json, "instance", instance);
    kvist_json_text(&json, "health", stat->health);
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(shown); index++) {
        kvist_json_real(&json, shown[index], metric(stat, shown[index]));
    }
    kvist_json_bool(&json, "nvme_present", count(stat, "nvme_present") != 0);
    kvist_json_array(&json, "engines");
    for (size_t page = 0; page < listing->page_count; page++) {
        const Kvist__Wire__ListReply *list = listing->pages[page]->list_reply;
        for (size_t index = 0; index < list->n_sessions; index++) {
            json_session(&json, list->sessions[index]);
        }
    }
    kvist_json_close(&json);
    kvist_json_close(&json);
}

static void print_session(const Kvist__Wire__SessionInfo *session)
{
    (void)printf("engine     %s: %u processes, %u ranks, leased %llu, granted %llu, pids",
                 session->name[0] != '\0' ? session->name : "(no name)",
                 session->processes,
                 session->rank_count,
                 (unsigned long long)session->leased_slots,
                 (unsigned long long)session->granted_slots);
    for (size_t index = 0; index < session->n_pids; index++) {
        (void)printf(" %u", session->pids[index]);
    }
    (void)putchar('\n');
}

static void print_status(const struct kvist_tool *tool,
                         const Kvist__Wire__HelloReply *daemon,
                         const Kvist__Wire__StatReply *stat,
                         const struct listing *listing)
{
    char one[32];
    char two[32];
    (void)printf("kvistd     %s at %s, up %llu s\n",
                 daemon->version,
                 tool->socket_path,
                 (unsigned long long)count(stat, "up_seconds"));
    (void)printf("health     %s\n", stat->health);
    (void)printf("memory     %s of %s in use, %llu blocks (%s)\n",
                 kvist_tool_size(count(stat, "arena_used_bytes"), one),
                 kvist_tool_size(count(stat, "arena_bytes"), two),
                 (unsigned long long)count(stat, "slots_ready"),
                 kvist_tool_size(count(stat, "block_bytes_ready"), (char[32]){0}));
    (void)printf("slots      %llu free (%s), %llu granted (%s), %llu leased\n",
                 (unsigned long long)count(stat, "slots_free"),
                 kvist_tool_size(count(stat, "free_bytes"), one),
                 (unsigned long long)count(stat, "slots_granted"),
                 kvist_tool_size(count(stat, "granted_bytes"), two),
                 (unsigned long long)count(stat, "leased_slots"));
    if (count(stat, "nvme_present") != 0) {
        (void)printf("nvme       %llu blocks, %s of %s on disk\n",
                     (unsigned long long)count(stat, "nvme_blocks"),
                     kvist_tool_size(count(stat, "nvme_disk_bytes"), one),
                     kvist_tool_size(count(stat, "nvme_disk_bytes_max"), two));
    } else {
        (void)puts("nvme       none");
    }
    (void)printf("pools      %llu\n", (unsigned long long)count(stat, "pools"));
    for (size_t page = 0; page < listing->page_count; page++) {
        const Kvist__Wire__ListReply *list = listing->pages[page]->list_reply;
        for (size_t index = 0; index < list->n_sessions; index++) {
            print_session(list->sessions[index]);
        }
    }
}

int kvist_tool_status(struct kvist_tool *tool,
                      const struct kvist_tool_command *command,
                      int argc,
                      char **argv)
{
    int exit_code = kvist_tool_parse(tool, command, argc, argv, NULL, 0, 0);
    if (exit_code >= 0) {
        return exit_code;
    }
    struct listing listing = {.pages = NULL};
    Kvist__Wire__Envelope *stat = NULL;
    struct kvist_request *request = kvist_tool_connect(tool, &exit_code);
    if (request != NULL) {
        stat = ask_stat(tool, request, &exit_code);
    }
    if (stat != NULL && ask_listing(tool, request, &listing, &exit_code)) {
        (tool->json ? json_status : print_status)(
            tool, kvist_request_daemon(request), stat->stat_reply, &listing);
        exit_code = KVIST_EXIT_OK;
    }
    free_listing(&listing);
    kvist_message_free(&stat);
    kvist_request_close(&request);
    return exit_code;
}

/* --- stat ---------------------------------------------------------------------------------- */

static void json_stat(const Kvist__Wire__StatReply *stat)
{
    struct kvist_json json;
    kvist_json_init(&json, stdout);
    kvist_json_object(&json, NULL);
    kvist_json_text(&json, "health", stat->health);
    kvist_json_object(&json, "metrics");
    for (size_t index = 0; index < stat->n_metrics; index++) {
        kvist_json_real(&json, stat->metrics[index]->name, stat->metrics[index]->value);
    }
    kvist_json_close(&json);
    kvist_json_close(&json);
}

static void print_stat(const Kvist__Wire__StatReply *stat)
{
    for (size_t index = 0; index < stat->n_metrics; index++) {
        const Kvist__Wire__Metric *row = stat->metrics[index];
        (void)printf("%-32s %20.15g  %s\n", row->name, row->value, row->help);
    }
}

int kvist_tool_stat(struct kvist_tool *tool,
                    const struct kvist_tool_command *command,
                    int argc,
                    char **argv)
{
    int exit_code = kvist_tool_parse(tool, command, argc, argv, NULL, 0, 0);
    if (exit_code >= 0) {
        return exit_code;
    }
    Kvist__Wire__Envelope *stat = NULL;
    struct kvist_request *request = kvist_tool_connect(tool, &exit_code);
    if (request != NULL) {
        stat = ask_stat(tool, request, &exit_code);
    }
    if (stat != NULL) {
        (tool->json ? json_stat : print_stat)(stat->stat_reply);
        exit_code = KVIST_EXIT_OK;
    }
    kvist_message_free(&stat);
    kvist_request_close(&request);
    return exit_code;
}

/* --- pools --------------------------------------------------------------------------------- */

static void json_pool(struct kvist_json *json, const Kvist__Wire__PoolInfo *pool)
{
    kvist_json_object(json, NULL);
    kvist_json_hex(json, "pool_id", pool->pool_id.data, pool->pool_id.len);
    kvist_json_text(json, "tenant", pool->tenant);
    kvist_json_text(json, "description", pool->description);
    kvist_json_number(json, "slot_bytes", pool->slot_bytes);
    kvist_json_number(json, "segments", pool->segments);
    kvist_json_number(json, "dram_blocks", pool->dram_blocks);
    kvist_json_number(json, "dram_bytes", pool->dram_bytes);
    kvist_json_number(json, "nvme_blocks", pool->nvme_blocks);
    kvist_json_number(json, "leased_slots", pool->leased_slots);
    kvist_json_number(json, "granted_slots", pool->granted_slots);
    kvist_json_number(json, "granted_bytes", pool->granted_slots * pool->slot_bytes);
    kvist_json_number(json, "free_slots", pool->free_slots);
    kvist_json_number(json, "free_bytes", pool->free_slots * pool->slot_bytes);
    kvist_json_number(json, "generation", pool->generation);
    kvist_json_number(json, "sessions", pool->sessions);
    kvist_json_close(json);
}

static void print_pool(const Kvist__Wire__PoolInfo *pool)
{
    char id[2 * KVIST_KEY_BYTES + 1];
    char slot[32];
    char dram[32];
    char granted[32];
    char unused[32];
    kvist_key_format(pool->pool_id.data, id);
    (void)printf("%s\n  %s\n  slots of %s: %llu blocks in memory (%s), %llu on NVMe, %llu leased, "
                 "%llu granted (%s), %llu free (%s); %llu segments, %llu engines%s%s\n",
                 id,
                 pool->description,
                 kvist_tool_size(pool->slot_bytes, slot),
                 (unsigned long long)pool->dram_blocks,
                 kvist_tool_size(pool->dram_bytes, dram),
                 (unsigned long long)pool->nvme_blocks,
                 (unsigned long long)pool->leased_slots,
                 (unsigned long long)pool->granted_slots,
                 kvist_tool_size(pool->granted_slots * pool->slot_bytes, granted),
                 (unsigned long long)pool->free_slots,
                 kvist_tool_size(pool->free_slots * pool->slot_bytes, unused),
                 (unsigned long long)pool->segments,
                 (unsigned long long)pool->sessions,
                 pool->tenant[0] != '\0' ? ", tenant " : "",
                 pool->tenant);
}

static void show_pools(const struct kvist_tool *tool, const struct listing *listing)
{
    struct kvist_json json;
    if (tool->json) {
        kvist_json_init(&json, stdout);
        kvist_json_object(&json, NULL);
        kvist_json_array(&json, "pools");
    }
    size_t shown = 0;
    for (size_t page = 0; page < listing->page_count; page++) {
        const Kvist__Wire__ListReply *list = listing->pages[page]->list_reply;
        for (size_t index = 0; index < list->n_pools; index++, shown++) {
            if (tool->json) {
                json_pool(&json, list->pools[index]);
            } else {
                print_pool(list->pools[index]);
            }
        }
    }
    if (tool->json) {
        kvist_json_close(&json);
        kvist_json_close(&json);
    } else if (shown == 0) {
        (void)puts("no pools yet: no engine has stored anything");
    }
}

int kvist_tool_pools(struct kvist_tool *tool,
                     const struct kvist_tool_command *command,
                     int argc,
                     char **argv)
{
    int exit_code = kvist_tool_parse(tool, command, argc, argv, NULL, 0, 0);
    if (exit_code >= 0) {
        return exit_code;
    }
    struct listing listing = {.pages = NULL};
    struct kvist_request *request = kvist_tool_connect(tool, &exit_code);
    if (request != NULL && ask_listing(tool, request, &listing, &exit_code)) {
        show_pools(tool, &listing);
        exit_code = KVIST_EXIT_OK;
    }
    free_listing(&listing);
    kvist_request_close(&request);
    return exit_code;
}

/* --- inspect ------------------------------------------------------------------------------- */

static void json_place(struct kvist_json *json, const Kvist__Wire__InspectReply__Place *place)
{
    char checksum[17];
    (void)snprintf(checksum, sizeof(checksum), "%016llx", (unsigned long long)place->checksum);
    kvist_json_object(json, NULL);
    kvist_json_hex(json, "pool_id", place->pool_id.data, place->pool_id.len);
    kvist_json_text(json, "tier", place->tier);
    kvist_json_number(json, "block_bytes", place->block_bytes);
    kvist_json_number(json, "generation", place->generation);
    kvist_json_hex(json, "parent_tag", place->parent_tag.data, place->parent_tag.len);
    kvist_json_bool(json, "checksummed", place->checksummed);
    kvist_json_text(json, "checksum", checksum);
    kvist_json_bool(json, "leased", place->leased);
    kvist_json_close(json);
}

static void show_places(const struct kvist_tool *tool, const Kvist__Wire__InspectReply *reply)
{
    struct kvist_json json;
    if (tool->json) {
        kvist_json_init(&json, stdout);
        kvist_json_object(&json, NULL);
        kvist_json_array(&json, "places");
    }
    for (size_t index = 0; index < reply->n_places; index++) {
        const Kvist__Wire__InspectReply__Place *place = reply->places[index];
        char id[2 * KVIST_KEY_BYTES + 1];
        if (tool->json) {
            json_place(&json, place);
            continue;
        }
        kvist_key_format(place->pool_id.data, id);
        (void)printf("%s in pool %.16s: %llu bytes, generation %llu, %s",
                     place->tier,
                     id,
                     (unsigned long long)place->block_bytes,
                     (unsigned long long)place->generation,
                     place->leased ? "leased" : "not leased");
        if (place->checksummed) {
            (void)printf(", checksum %016llx", (unsigned long long)place->checksum);
        }
        (void)putchar('\n');
    }
    if (tool->json) {
        kvist_json_close(&json);
        kvist_json_close(&json);
    } else if (reply->n_places == 0) {
        (void)puts("not stored");
    }
}

int kvist_tool_inspect(struct kvist_tool *tool,
                       const struct kvist_tool_command *command,
                       int argc,
                       char **argv)
{
    uint8_t key[KVIST_KEY_BYTES];
    int exit_code = kvist_tool_parse(tool, command, argc, argv, NULL, 0, 1);
    if (exit_code >= 0) {
        return exit_code;
    }
    if (argv[optind] == NULL || kvist_key_parse(argv[optind], key) != KVIST_OK) {
        return kvist_tool_usage(command, "it needs a key: 64 hex digits");
    }
    Kvist__Wire__Inspect inspect;
    Kvist__Wire__Envelope envelope;
    kvist__wire__inspect__init(&inspect);
    kvist__wire__envelope__init(&envelope);
    inspect.key.data = key;
    inspect.key.len = sizeof(key);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_INSPECT;
    envelope.inspect = &inspect;
    Kvist__Wire__Envelope *reply = NULL;
    struct kvist_request *request = kvist_tool_connect(tool, &exit_code);
    if (request != NULL) {
        reply = kvist_tool_ask(tool,
                               request,
                               &envelope,
                               KVIST__WIRE__ENVELOPE__BODY_INSPECT_REPLY,
                               tool->timeout_us,
                               &exit_code);
    }
    if (reply != NULL) {
        show_places(tool, reply->inspect_reply);
        exit_code = KVIST_EXIT_OK;
    }
    kvist_message_free(&reply);
    kvist_request_close(&request);
    return exit_code;
}
