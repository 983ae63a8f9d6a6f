/* protocol: the shared-memory protocols of proto/shm/layout.h, as storage/ and client/ have them,
 * in every execution that C11 allows; and which of their memory orders are needed for what is
 * proved. */
#include "tests/model/world.h"
#include "tests/support/unit.h"

#include <stdio.h>

#define SCHEDULER 0U /* engine processes, by their ranks */
#define RANK      1U
#define OTHER     2U /* not of this session */

/* Bits of an engine's note, and the daemon's. */
#define HIT    1U
#define MISS   2U
#define REUSED 1U
#define KEPT   2U

/* --- What engines do -----------------------------------------------------------------------------
 */

/* Lease, use and release a block, if it is there. */
static bool use(uint32_t engine, uint32_t block)
{
    const struct kvist_world *world = kvist_world_get();
    uint64_t block_bytes = 0;
    uint32_t slot = kvist_engine_acquire(engine, block, &block_bytes);
    if (slot == KVIST_SLOT_NONE) {
        return false;
    }
    kvist_model_check(slot < KVIST_WORLD_SLOTS, "a lease of no slot");
    kvist_model_check(kvist_model_data_read(&world->mapping) == 1, "a lease of unmapped memory");
    kvist_model_check(kvist_model_data_read(&world->bytes[slot]) == block,
                      "another block's bytes under a lease");
    kvist_model_check(block_bytes == block, "another block's length under a lease");
    kvist_engine_release(engine);
    return true;
}

static void note_uses(uint32_t engine, uint32_t first, uint32_t second)
{
    uint32_t note = use(engine, first) ? HIT : MISS;
    if (second != 0) {
        note |= (use(engine, second) ? HIT : MISS) << 2;
    }
    kvist_model_note((uint16_t)note);
}

static void engine_uses_one(void)
{
    kvist_engine_begin(SCHEDULER);
    note_uses(SCHEDULER, 1, 0);
}

static void engine_uses_what_follows(void)
{
    kvist_engine_begin(SCHEDULER);
    note_uses(SCHEDULER, 1, 2);
}

/* The record that named the first slot names the second. */
static void engine_uses_another(void)
{
    kvist_engine_begin(SCHEDULER);
    note_uses(SCHEDULER, 1, 3);
}

static void engine_finds_new(void)
{
    kvist_engine_begin(OTHER);
    note_uses(OTHER, 2, 0);
}

static void engine_verifies(void)
{
    uint64_t block_bytes = 0;
    kvist_engine_begin(SCHEDULER);
    if (kvist_engine_acquire(SCHEDULER, 1, &block_bytes) != KVIST_SLOT_NONE) {
        enum kvist_status status = kvist_engine_verify(SCHEDULER, 1);
        kvist_model_check(status == KVIST_OK || status == KVIST_NOT_FOUND, "no right checksum");
        kvist_model_note(status == KVIST_OK ? HIT : MISS);
        kvist_engine_release(SCHEDULER);
    }
}

static void engine_touches(void)
{
    kvist_engine_begin(SCHEDULER);
    kvist_engine_touch(SCHEDULER, 1);
    kvist_engine_touch(SCHEDULER, 3);
}

static void scheduler_fills(void)
{
    kvist_engine_begin(SCHEDULER);
    kvist_model_receive(0);
    kvist_model_data_write(&kvist_world_get()->bytes[0], 2);
    kvist_engine_mark(SCHEDULER);
}

/* Its part of the block has no datum of its own. */
static void rank_fills(void)
{
    kvist_engine_begin(RANK);
    kvist_model_receive(1);
    kvist_engine_mark(RANK);
}

static void rank_maps(void)
{
    kvist_engine_begin(RANK);
    kvist_engine_map(RANK);
}

static void rank_unmaps(void)
{
    kvist_engine_begin(RANK);
    kvist_model_receive(0);
    kvist_engine_unmap(RANK);
}

static void rank_leaves(void)
{
    kvist_engine_begin(RANK);
    kvist_engine_leave(RANK);
}

/* --- What the daemon does ------------------------------------------------------------------------
 */

static void reuse(uint32_t block)
{
    kvist_model_note(REUSED);
    kvist_daemon_grant(0);
    kvist_model_data_write(&kvist_world_get()->bytes[0], block);
    kvist_daemon_publish(0, block);
}

static void daemon_evicts(void)
{
    kvist_daemon_begin();
    kvist_model_note(KEPT);
    if (kvist_daemon_evict(0)) {
        reuse(2);
    }
}

/* The same key comes back into the same slot. */
static void daemon_evicts_and_puts_back(void)
{
    kvist_daemon_begin();
    kvist_model_note(KEPT);
    if (kvist_daemon_evict(0)) {
        reuse(1);
    }
}

static void daemon_evicts_until_it_can(void)
{
    kvist_daemon_begin();
    kvist_model_note(KEPT);
    if (kvist_daemon_evict(0) || kvist_daemon_evict(0)) {
        reuse(2);
    }
}

static void daemon_clears(void)
{
    kvist_daemon_begin();
    kvist_model_note(KEPT);
    if (kvist_daemon_clear(0)) {
        reuse(2);
    }
}

static void daemon_grows(void)
{
    kvist_daemon_begin();
    kvist_model_note(KEPT);
    kvist_daemon_grow();
    if (kvist_daemon_evict(0)) {
        reuse(2);
    }
}

static void daemon_revokes(void)
{
    kvist_daemon_begin();
    kvist_model_note(KEPT);
    if (kvist_daemon_evict(0) && kvist_daemon_evict(1)) {
        kvist_daemon_revoke();
        kvist_model_note(REUSED);
        kvist_model_send(0);
    }
}

/* Commits as soon as it is told to: that the marks are there is for itself to see. */
static void daemon_commits(void)
{
    kvist_daemon_begin();
    if (kvist_daemon_evict(0)) {
        kvist_daemon_grant(0);
        kvist_model_send(0);
        kvist_model_send(1);
        kvist_model_note(kvist_daemon_commit(0, 2) ? REUSED : KEPT);
    }
}

static void daemon_sums(void)
{
    kvist_daemon_begin();
    kvist_daemon_sum(0);
}

static void daemon_takes_touches(void)
{
    kvist_daemon_begin();
    uint16_t count = 0;
    for (uint64_t ref = kvist_daemon_touch(); ref != UINT64_MAX; ref = kvist_daemon_touch()) {
        kvist_model_check(ref == kvist_slot_ref(0, count), "a touch that nobody made");
        count++;
    }
    kvist_model_note(count);
}

/* --- An entry alone ------------------------------------------------------------------------------
 */

static struct kvist_index_entry lone_entry;

static struct kvist_entry_copy entry_of(uint32_t number)
{
    struct kvist_entry_copy copy = {
        .state = number == 0 ? KVIST_ENTRY_EMPTY : KVIST_ENTRY_READY,
        .slot = number,
        .extent = number,
        .generation = number,
        .parent_tag = number,
        .key = {number, number, number, number},
    };
    return copy;
}

static void entry_writer(void)
{
    struct kvist_entry_copy copy = entry_of(1);
    kvist_entry_write(&lone_entry, &copy);
}

static void entry_reader(void)
{
    uint16_t note = 0xff;
    struct kvist_entry_copy copy;
    if (kvist_entry_read(&lone_entry, &copy)) {
        const struct kvist_entry_copy whole = entry_of(copy.slot);
        kvist_model_check(copy.state == whole.state && copy.extent == whole.extent &&
                              copy.generation == whole.generation &&
                              copy.parent_tag == whole.parent_tag &&
                              memcmp(copy.key, whole.key, sizeof(copy.key)) == 0,
                          "a torn entry");
        note = (uint16_t)copy.slot;
    }
    kvist_model_note(note);
}

/* --- Programs ------------------------------------------------------------------------------------
 */

#define DAEMON    "daemon"
#define ENGINE    "engine"

#define RANK_ROLE "rank"

struct program {
    const char *name;
    void (*threads[KVIST_MODEL_THREADS_MAX])(void);
    const char *roles[KVIST_MODEL_THREADS_MAX];
    uint64_t outcomes[4]; /* that have to be possible, so that something was proved; 0 ends them */
    bool is_fenced;       /* it breaks when either fence of the lease protocol is missing */
    bool is_unmapped;     /* a rank has not mapped the segment yet */
};

#define NOTES(first, second) ((uint64_t)(first) | (uint64_t)(second) << 16)
#define LEASED_OR_NOT_KEPT_OR_REUSED                                                               \
    {                                                                                              \
        NOTES(HIT, KEPT), NOTES(HIT, REUSED), NOTES(MISS, KEPT), NOTES(MISS, REUSED)               \
    }

static const struct program programs[] = {
    {.name = "an entry is read whole",
     .threads = {entry_reader, entry_writer},
     .roles = {ENGINE, DAEMON},
     .outcomes = {NOTES(1, 0), NOTES(0xff, 0)}},
    {.name = "lease against eviction",
     .threads = {engine_uses_one, daemon_evicts},
     .roles = {ENGINE, DAEMON},
     .outcomes = LEASED_OR_NOT_KEPT_OR_REUSED,
     .is_fenced = true},
    {.name = "lease against eviction and return of the key",
     .threads = {engine_uses_one, daemon_evicts_and_puts_back},
     .roles = {ENGINE, DAEMON},
     .outcomes = LEASED_OR_NOT_KEPT_OR_REUSED,
     .is_fenced = true},
    {.name = "lease against repeated eviction",
     .threads = {engine_uses_one, daemon_evicts_until_it_can},
     .roles = {ENGINE, DAEMON},
     .outcomes = LEASED_OR_NOT_KEPT_OR_REUSED,
     .is_fenced = true},
    {.name = "lease of the block that follows",
     .threads = {engine_uses_what_follows, daemon_evicts},
     .roles = {ENGINE, DAEMON},
     .outcomes = {NOTES(HIT | HIT << 2, REUSED), NOTES(MISS | HIT << 2, REUSED)},
     .is_fenced = true},
    {.name = "lease of another slot in the same record",
     .threads = {engine_uses_another, daemon_evicts},
     .roles = {ENGINE, DAEMON},
     .outcomes = {NOTES(HIT | HIT << 2, REUSED),
                  NOTES(HIT | HIT << 2, KEPT),
                  NOTES(MISS | HIT << 2, REUSED)},
     .is_fenced = true},
    {.name = "lease against a clear",
     .threads = {engine_uses_one, daemon_clears},
     .roles = {ENGINE, DAEMON},
     .outcomes = LEASED_OR_NOT_KEPT_OR_REUSED,
     .is_fenced = true},
    {.name = "lease against growth of the map",
     .threads = {engine_uses_one, daemon_grows},
     .roles = {ENGINE, DAEMON},
     .outcomes = LEASED_OR_NOT_KEPT_OR_REUSED,
     .is_fenced = true},
    {.name = "lease against a revoke",
     .threads = {engine_uses_one, daemon_revokes, rank_unmaps},
     .roles = {ENGINE, DAEMON, RANK_ROLE},
     .outcomes = LEASED_OR_NOT_KEPT_OR_REUSED,
     .is_fenced = true},
    {.name = "lease against a rank that leaves",
     .threads = {engine_uses_one, rank_leaves},
     .roles = {ENGINE, RANK_ROLE},
     .outcomes = {HIT, MISS}},
    {.name = "lease beside a rank that maps",
     .threads = {engine_uses_one, rank_maps},
     .roles = {ENGINE, RANK_ROLE},
     .outcomes = {HIT, MISS},
     .is_unmapped = true},
    {.name = "fill, commit, find",
     .threads = {daemon_commits, scheduler_fills, rank_fills, engine_finds_new},
     .roles = {DAEMON, RANK_ROLE, RANK_ROLE, ENGINE},
     .outcomes = {REUSED | (uint64_t)HIT << 48,
                  REUSED | (uint64_t)MISS << 48,
                  KEPT | (uint64_t)MISS << 48}},
    {.name = "checksum",
     .threads = {engine_verifies, daemon_sums},
     .roles = {ENGINE, DAEMON},
     .outcomes = {HIT, MISS}},
    {.name = "touches",
     .threads = {engine_touches, daemon_takes_touches},
     .roles = {ENGINE, DAEMON},
     .outcomes = {NOTES(0, 1), NOTES(0, 2)}},
};
#define PROGRAM_COUNT (sizeof(programs) / sizeof(programs[0]))

static bool met[PROGRAM_COUNT][KVIST_MODEL_ORDERS_MAX];

static void explore(const struct program *program, struct kvist_model_result *result_out)
{
    const struct kvist_world *world = kvist_world_get();
    struct kvist_model_program run = {
        .name = program->name,
        .regions = {{world->map, world->map->map_bytes},
                    {world->page, world->page->page_bytes},
                    {&lone_entry, sizeof(lone_entry)}},
    };
    kvist_world_set_mapped(!program->is_unmapped);
    while (run.thread_count < KVIST_MODEL_THREADS_MAX &&
           program->threads[run.thread_count] != NULL) {
        run.threads[run.thread_count] = program->threads[run.thread_count];
        run.roles[run.thread_count] = program->roles[run.thread_count];
        run.thread_count++;
    }
    kvist_model_explore(&run, result_out);
}

static bool is_possible(const struct kvist_model_result *result, uint64_t outcome)
{
    for (uint32_t index = 0; index < result->outcome_count; index++) {
        if (result->outcomes[index] == outcome) {
            return true;
        }
    }
    return false;
}

static void hold_in_every_execution(void)
{
    for (size_t index = 0; index < PROGRAM_COUNT; index++) {
        const struct program *program = &programs[index];
        struct kvist_model_result result;
        explore(program, &result);
        memcpy(met[index], result.met, sizeof(met[index]));
        (void)printf("\n    %s: %llu states, %llu ends",
                     program->name,
                     (unsigned long long)result.states,
                     (unsigned long long)result.executions);
        if (result.failed) {
            (void)printf("\n    %s\n", result.what);
            kvist_model_print_trace();
        }
        KVIST_TEST_TRUE(!result.failed);
        for (size_t outcome = 0; outcome < 4 && program->outcomes[outcome] != 0; outcome++) {
            KVIST_TEST_TRUE(is_possible(&result, program->outcomes[outcome]));
        }
    }
    (void)printf("\n");
}

/* A reader that finds an entry busy looks again; the programs above look once. */
static void hold_when_entries_are_read_again(void)
{
    kvist_world_set_reads(2);
    for (size_t index = 0; index < 2; index++) {
        struct kvist_model_result result;
        explore(&programs[index], &result);
        KVIST_TEST_TRUE(!result.failed);
    }
    kvist_world_set_reads(1);
}

/* --- Weaker orders -------------------------------------------------------------------------------
 */

/*
 * What stands in the code and is not needed for what the programs above prove. Nothing else may be
 * unneeded, and nothing here needed.
 */
static const struct {
    const char *role;
    const char *function;
    const char *what;
    const char *why;
} unneeded[] = {
    {DAEMON, "kvist_entry_read", "&entry->sequence", "the writer reads what it wrote itself"},
    {DAEMON, "kvist_entry_read", "fence", "the writer reads what it wrote itself"},
    {ENGINE,
     "is_segment_mapped",
     "kvist_page_mapped(epoch, rank, view->ordinal, segment)",
     "pairs with the record of a rank that maps anew between the two looks"},
    {DAEMON,
     "set_state",
     "&pool->map.slots[slot].state",
     "comes last for the daemon that adopts the map of one that was killed"},
    {DAEMON,
     "set_entry",
     "&entry->state",
     "comes last for the daemon that adopts the map of one that was killed"},
    {DAEMON,
     "kvist_map_move",
     "&map->header->moved",
     "comes last for the daemon that adopts the map of one that was killed"},
};

static bool is_unneeded(const struct kvist_model_order *order)
{
    for (size_t index = 0; index < sizeof(unneeded) / sizeof(unneeded[0]); index++) {
        if (strcmp(unneeded[index].role, order->role) == 0 &&
            strcmp(unneeded[index].function, order->function) == 0 &&
            strcmp(unneeded[index].what, order->what) == 0) {
            return true;
        }
    }
    return false;
}

static bool breaks(size_t program, uint32_t order, enum memory_order weaker)
{
    struct kvist_model_result result = {.failed = false};
    if (met[program][order]) {
        kvist_model_weaken(order, weaker);
        explore(&programs[program], &result);
        kvist_model_weaken(UINT32_MAX, memory_order_relaxed);
    }
    return result.failed;
}

/* The first program that fails when an order is weaker, or NULL. */
static const struct program *find_broken(uint32_t order, enum memory_order weaker)
{
    for (size_t index = 0; index < PROGRAM_COUNT; index++) {
        if (breaks(index, order, weaker)) {
            return &programs[index];
        }
    }
    return NULL;
}

static void need_their_orders(void)
{
    const struct kvist_model_order *orders = NULL;
    uint32_t count = kvist_model_orders(&orders);
    uint32_t unneeded_count = 0;
    for (uint32_t index = 0; index < count; index++) {
        const struct kvist_model_order *order = &orders[index];
        const struct program *broken = find_broken(index, memory_order_relaxed);
        (void)printf("\n    %s in %s(): %s: %s",
                     order->role,
                     order->function,
                     order->what,
                     broken != NULL ? broken->name : "-");
        KVIST_TEST_TRUE((broken == NULL) == is_unneeded(order));
        unneeded_count += broken == NULL;
    }
    KVIST_TEST_EQUAL(unneeded_count, sizeof(unneeded) / sizeof(unneeded[0]));
    (void)printf("\n");
}

static void need_both_fences(void)
{
    const struct kvist_model_order *orders = NULL;
    uint32_t count = kvist_model_orders(&orders);
    uint32_t fences = 0;
    for (uint32_t index = 0; index < count; index++) {
        if (orders[index].order != memory_order_seq_cst) {
            continue;
        }
        fences++;
        KVIST_TEST_TRUE(find_broken(index, memory_order_acq_rel) != NULL);
        for (size_t program = 0; program < PROGRAM_COUNT; program++) {
            if (programs[program].is_fenced && met[program][index]) {
                KVIST_TEST_TRUE(breaks(program, index, memory_order_relaxed));
                KVIST_TEST_TRUE(breaks(program, index, memory_order_acq_rel));
            }
        }
    }
    KVIST_TEST_EQUAL(fences, 3); /* the engine's, the daemon's, a rank's that leaves */
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"they hold in every execution", hold_in_every_execution},
        {"they hold when entries are read again", hold_when_entries_are_read_again},
        {"they need both fences", need_both_fences},
        {"they need their orders", need_their_orders},
    };
    kvist_world_open();
    int status = kvist_unit_main("protocol", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL);
    kvist_world_close();
    return status;
}
