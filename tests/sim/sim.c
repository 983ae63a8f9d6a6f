/*
 * sim - the operations of a world, and one seed from its beginning to its end.
 *
 * Role        after every operation what is leased is as it was; kvist_store_check() holds, and no
 *             bound is exceeded. At the end all goes home: nothing is granted, leased, retired or
 *             loading, no fd is left.
 */
#include "tests/sim/sim.h"

#include "proto/base/fault.h"
#include "storage/internal.h"
#include "tests/support/vault.h"

#include <dirent.h>
#include <unistd.h>

#define ARENA_BYTES  (16ULL << 20)
#define BULK         2U /* the pool of many small slots */
#define KEYS         200U
#define BULK_KEYS    3000U
#define SEED_SECONDS 60U
#define CHECK_STEPS  4U /* between two full checks */
#define START_ROUNDS 4U
#define HOME_ROUNDS  40U
#define PATIENCE     100U

static const uint64_t slot_bytes[KVIST_SIM_POOLS] = {128ULL << 10, 256ULL << 10, 4096, 1ULL << 20};

static struct {
    struct kvist_store *store;
    struct kvist_tier_options tier;
    struct kvist_store_options options;
    struct kvist_test_vault vault;
    bool has_vault;
    bool has_tier;
    bool bulky; /* much of what happens is to the pool of many slots */
    uint32_t fault_percent;
    uint32_t clears_asked;
    uint32_t clears_done;
    bool saving;
} sim;

struct kvist_sim_run kvist_sim_run;

static void count_store(void)
{
    struct kvist_store_stats stats;
    kvist_store_stats(sim.store, &stats);
    kvist_sim_run.totals->commits += stats.commits_total;
    kvist_sim_run.totals->evictions += stats.evictions_total;
    kvist_sim_run.totals->kept_leased += stats.evictions_leased_total;
    kvist_sim_run.totals->spills += stats.spills_total;
    kvist_sim_run.totals->promotions += stats.promotes_total;
    kvist_sim_run.totals->revokes += stats.revokes_total;
    kvist_sim_run.totals->clears += stats.clears_total;
}

/* --- Whom and what --------------------------------------------------------------------------- */

/* An engine that lives and runs, or NULL. */
static struct kvist_sim_engine *any_engine(void)
{
    struct kvist_sim_engine *mine = &kvist_sim_engines[kvist_sim_below(KVIST_SIM_ENGINES)];
    return mine->engine != NULL && !mine->stopped ? mine : NULL;
}

/* An ordinal that it has a pool under; KVIST_SESSION_POOLS_MAX: none was found. */
static uint32_t any_ordinal(const struct kvist_sim_engine *mine)
{
    uint32_t count = mine->engine->pool_count;
    uint32_t start = count > 0 ? kvist_sim_below(count) : 0;
    for (uint32_t step = 0; step < count; step++) {
        uint32_t ordinal = (start + step) % count;
        if (kvist_sim_engine_pool(mine, ordinal) != KVIST_SIM_POOLS) {
            return ordinal;
        }
    }
    return KVIST_SESSION_POOLS_MAX;
}

static uint64_t any_key(const struct kvist_sim_engine *mine, uint32_t ordinal)
{
    return kvist_sim_engine_pool(mine, ordinal) == BULK ? kvist_sim_below(BULK_KEYS)
                                                        : kvist_sim_below(KEYS);
}

/* One that may be there, mostly. */
static uint64_t known_key(const struct kvist_sim_engine *mine, uint32_t ordinal)
{
    uint64_t key = any_key(mine, ordinal);
    if (kvist_sim_chance(80)) {
        (void)kvist_sim_model_any_key(kvist_sim_engine_pool(mine, ordinal), &key);
    }
    return key;
}

static struct kvist_store_pool *any_pool(void)
{
    uint8_t number = (uint8_t)kvist_sim_below(KVIST_SIM_POOLS);
    if (kvist_sim_chance(80)) {
        number = sim.bulky ? BULK : number == BULK ? 0 : number;
    }
    return kvist_test_pool_open(sim.store, number, slot_bytes[number]);
}

static void turn(void)
{
    bool fails = kvist_sim_chance(sim.fault_percent);
    if (fails) {
        kvist_fault_arm(NULL, 1 + kvist_sim_below(4), kvist_sim_chance(30));
    }
    (void)kvist_store_turn(sim.store, kvist_sim_now_us());
    (void)kvist_fault_disarm();
    kvist_sim_run.totals->faults += fails;
    if (sim.has_vault && kvist_sim_chance(60)) {
        kvist_store_kept(sim.store, sim.store->keep_count); /* what was handed over is safe now */
    }
}

/* --- Operations ------------------------------------------------------------------------------ */

static void op_turn(void)
{
    kvist_sim_pass_time(kvist_sim_below(500));
    turn();
}

static void op_workers(void)
{
    bool fails = kvist_sim_chance(sim.fault_percent);
    if (fails) {
        kvist_fault_arm(NULL, 1, kvist_sim_chance(50));
    }
    for (uint32_t left = 1 + kvist_sim_below(8); left > 0 && kvist_sim_workers_step(); left--) {
    }
    (void)kvist_fault_disarm();
}

static void op_disk(void)
{
    for (uint32_t left = 1 + kvist_sim_below(8); left > 0 && kvist_sim_disk_step(); left--) {
    }
}

static void op_receive(void)
{
    struct kvist_sim_engine *mine = any_engine();
    if (mine != NULL) {
        kvist_sim_engine_receive(mine, 1 + kvist_sim_below(12));
    }
}

static void op_send(void)
{
    struct kvist_sim_engine *mine = any_engine();
    if (mine != NULL) {
        kvist_sim_engine_send(mine, 1 + kvist_sim_below(20));
    }
}

static void op_time(void)
{
    static const uint32_t most_us[] = {1000, 30000, 300000, 2500000};
    kvist_sim_pass_time(kvist_sim_below(most_us[kvist_sim_below(4)]));
    turn();
}

static void op_open(void)
{
    struct kvist_sim_engine *mine = &kvist_sim_engines[kvist_sim_below(KVIST_SIM_ENGINES)];
    if (mine->engine == NULL) {
        kvist_sim_engine_open(mine, sim.store);
        kvist_sim_engine_attach(mine, any_pool());
    }
}

static void op_die(void)
{
    struct kvist_sim_engine *mine = &kvist_sim_engines[kvist_sim_below(KVIST_SIM_ENGINES)];
    if (mine->engine != NULL) {
        kvist_sim_engine_close(mine);
    }
}

static void op_stop(void)
{
    struct kvist_sim_engine *mine = any_engine();
    if (mine != NULL) {
        mine->stopped = true;
    }
}

static void op_go_on(void)
{
    kvist_sim_engines[kvist_sim_below(KVIST_SIM_ENGINES)].stopped = false;
}

static void op_attach(void)
{
    struct kvist_sim_engine *mine = any_engine();
    if (mine != NULL) {
        kvist_sim_engine_attach(mine, any_pool());
    }
}

static void op_detach(void)
{
    struct kvist_sim_engine *mine = any_engine();
    uint32_t ordinal = mine != NULL ? any_ordinal(mine) : KVIST_SESSION_POOLS_MAX;
    if (ordinal != KVIST_SESSION_POOLS_MAX) {
        kvist_sim_engine_detach(mine, ordinal);
    }
}

static void op_disconnect(void)
{
    struct kvist_sim_engine *mine = any_engine();
    uint32_t member = mine != NULL ? kvist_sim_below(mine->engine->member_count) : 0;
    if (mine != NULL && mine->connected[member]) {
        kvist_sim_engine_disconnect(mine, member);
    }
}

static void reconnect_all(struct kvist_sim_engine *mine)
{
    for (uint32_t member = 0; member < mine->engine->member_count; member++) {
        if (!mine->connected[member]) {
            kvist_sim_engine_reconnect(mine, member);
        }
    }
}

static void op_reconnect(void)
{
    struct kvist_sim_engine *mine = any_engine();
    if (mine != NULL) {
        reconnect_all(mine);
    }
}

static void op_take(void)
{
    struct kvist_sim_engine *mine = any_engine();
    uint32_t ordinal = mine != NULL ? any_ordinal(mine) : KVIST_SESSION_POOLS_MAX;
    for (uint32_t left = 1 + kvist_sim_below(6);
         left > 0 && ordinal != KVIST_SESSION_POOLS_MAX &&
         kvist_sim_engine_take(mine, ordinal, any_key(mine, ordinal));
         left--) {
    }
}

static void op_fill(void)
{
    struct kvist_sim_engine *mine = any_engine();
    for (uint32_t index = 0; mine != NULL && index < KVIST_SIM_FILLS; index++) {
        if (mine->fills[index].version != 0 && kvist_sim_chance(60)) {
            kvist_sim_engine_fill(mine, &mine->fills[index]);
        }
    }
}

static void store_prompt(struct kvist_sim_engine *mine, uint32_t ordinal)
{
    uint64_t key = any_key(mine, ordinal);
    for (uint32_t left = kvist_sim_below(KVIST_SIM_FILLS);
         left > 0 && kvist_sim_engine_take(mine, ordinal, key++);
         left--) {
    }
    for (uint32_t index = 0; index < KVIST_SIM_FILLS; index++) {
        kvist_sim_engine_fill_all(mine, &mine->fills[index]);
    }
}

/* Some whole prompts, with all that this needs: without it little would get stored. */
static void op_store(void)
{
    struct kvist_sim_engine *mine = any_engine();
    uint32_t ordinal = mine != NULL ? any_ordinal(mine) : KVIST_SESSION_POOLS_MAX;
    for (uint32_t left = 1 + kvist_sim_below(6); left > 0 && ordinal != KVIST_SESSION_POOLS_MAX;
         left--) {
        store_prompt(mine, ordinal);
        kvist_sim_engine_send(mine, kvist_sim_below(KVIST_SIM_ORDERS));
        op_workers();
        op_disk();
        op_turn();
        kvist_sim_engine_receive(mine, kvist_sim_below(20));
    }
}

static void op_lease(void)
{
    struct kvist_sim_engine *mine = any_engine();
    uint32_t ordinal = mine != NULL ? any_ordinal(mine) : KVIST_SESSION_POOLS_MAX;
    for (uint32_t left = 1 + kvist_sim_below(8); left > 0 && ordinal != KVIST_SESSION_POOLS_MAX;
         left--) {
        kvist_sim_engine_lease(mine, ordinal, known_key(mine, ordinal));
    }
}

static void op_release(void)
{
    struct kvist_sim_engine *mine = any_engine();
    for (uint32_t record = 0; mine != NULL && record < KVIST_SIM_LEASES; record++) {
        if (kvist_sim_chance(30)) {
            kvist_sim_engine_release(mine, record);
        }
    }
}

static void op_touch(void)
{
    struct kvist_sim_engine *mine = any_engine();
    if (mine != NULL) {
        kvist_test_engine_touch(mine->engine,
                                kvist_slot_ref(kvist_sim_below(3), kvist_sim_below(64)));
    }
}

static void op_unmap(void)
{
    struct kvist_sim_engine *mine = any_engine();
    if (mine != NULL) {
        kvist_sim_engine_unmap(mine);
    }
}

static void op_prefetch(void)
{
    struct kvist_sim_engine *mine = any_engine();
    uint32_t ordinal = mine != NULL ? any_ordinal(mine) : KVIST_SESSION_POOLS_MAX;
    uint8_t keys[8][KVIST_KEY_BYTES];
    if (ordinal == KVIST_SESSION_POOLS_MAX || !mine->connected[0]) {
        return;
    }
    for (uint32_t index = 0; index < 8; index++) {
        uint64_t key = known_key(mine, ordinal);
        for (uint32_t left = 8;
             left > 0 && kvist_test_engine_probe(mine->engine, ordinal, key) != KVIST_ENTRY_NVME;
             left--) {
            key = known_key(mine, ordinal);
        }
        kvist_test_key(key, keys[index]);
    }
    KVIST_SIM_REQUIRE(kvist_store_prefetch(mine->engine->session,
                                           ordinal,
                                           (const uint8_t(*)[KVIST_KEY_BYTES])keys,
                                           8) == KVIST_OK);
}

static void op_suspect(void)
{
    struct kvist_sim_engine *mine = any_engine();
    uint32_t ordinal = mine != NULL ? any_ordinal(mine) : KVIST_SESSION_POOLS_MAX;
    if (ordinal != KVIST_SESSION_POOLS_MAX && mine->connected[0]) {
        (void)kvist_test_engine_suspect(mine->engine, ordinal, known_key(mine, ordinal), 8);
    }
}

/* An engine writes where it must not. */
static void op_spoil(void)
{
    struct kvist_sim_engine *mine = any_engine();
    uint32_t record = kvist_sim_below(KVIST_SIM_LEASES);
    if (mine != NULL && mine->leases[record].bytes != NULL) {
        uint8_t *bytes = kvist_test_engine_slot(
            mine->engine,
            mine->leases[record].ordinal,
            kvist_sim_engine_slot(mine, mine->leases[record].ordinal, mine->leases[record].bytes));
        bytes[8 + kvist_sim_below(8)] ^= 1;
        kvist_sim_model_spoil(mine->leases[record].version);
    }
}

static void cleared(void *ctx, enum kvist_status status, uint64_t blocks, uint64_t bytes)
{
    uint32_t *of = ctx;
    if (status == KVIST_OK) {
        kvist_sim_model_cleared(of[0], of[1]);
    }
    free(of);
    (void)blocks;
    (void)bytes;
    sim.clears_done++;
}

static void saved(void *ctx, const struct kvist_store_saved *what)
{
    (void)ctx;
    (void)what;
    sim.saving = false;
}

static void op_save(void)
{
    if (!sim.saving && kvist_store_save(sim.store, saved, NULL) == KVIST_OK) {
        sim.saving = true;
    }
}

static void op_weather(void)
{
    static const uint32_t percents[] = {0, 0, 5, 40};
    kvist_sim_disk_set_faults(percents[kvist_sim_below(4)]);
    sim.fault_percent = percents[kvist_sim_below(4)];
}

static void op_look(void)
{
    struct kvist_store_block_info block;
    struct kvist_store_pool *pool = any_pool();
    uint8_t key[KVIST_KEY_BYTES];
    kvist_test_key(kvist_sim_below(KEYS), key);
    enum kvist_status status = kvist_store_inspect(pool, key, &block);
    KVIST_SIM_REQUIRE(status == KVIST_OK || status == KVIST_NOT_FOUND);
}

/* The daemon is killed, and comes again; engines read and write meanwhile. */
static void op_restart(void)
{
    for (uint32_t index = 0; index < KVIST_SIM_ENGINES; index++) {
        if (kvist_sim_engines[index].engine != NULL) {
            kvist_sim_engine_lose(&kvist_sim_engines[index]);
        }
    }
    count_store();
    kvist_sim_disk_kill();
    kvist_test_vault_kill(&sim.store);
    bool warm = sim.has_vault && !kvist_sim_chance(30);
    if (!warm) {
        kvist_test_vault_fini(&sim.vault);
    }
    for (uint32_t left = kvist_sim_below(8); left > 0; left--) {
        static void (*const alone[])(void) = {op_lease, op_release, op_fill, op_take, op_touch};
        alone[kvist_sim_below(5)]();
    }
    if (sim.has_vault) {
        kvist_test_vault_options(&sim.vault, &sim.options);
    }
    sim.store = kvist_test_store_open(&sim.options);
    struct kvist_adoption adoption;
    kvist_store_adoption(sim.store, &adoption);
    kvist_sim_trace("  adopted %d blocks %llu dropped %llu %s",
                    adoption.adopted,
                    (unsigned long long)adoption.blocks,
                    (unsigned long long)adoption.blocks_dropped,
                    adoption.why);
    KVIST_SIM_REQUIRE(adoption.adopted == warm);
    KVIST_SIM_REQUIRE(adoption.blocks_dropped == 0);
    if (!warm) {
        kvist_sim_model_forget_memory();
    }
    *(warm ? &kvist_sim_run.totals->adoptions : &kvist_sim_run.totals->cold) += 1;
    for (uint32_t index = 0; index < KVIST_SIM_ENGINES; index++) {
        struct kvist_sim_engine *mine = &kvist_sim_engines[index];
        if (mine->engine != NULL && warm) {
            kvist_sim_engine_adopt(mine, sim.store);
        } else if (mine->engine != NULL) {
            kvist_sim_engine_abandon(mine);
        }
    }
    if (!warm) {
        op_open();
        op_open();
    }
}

static void op_clear(void)
{
    struct kvist_store_pool *pool = any_pool();
    uint32_t *of = calloc(2, sizeof(*of)); /* which pool, which generation */
    KVIST_SIM_REQUIRE(of != NULL);
    enum kvist_status status = kvist_store_clear(sim.store, pool, cleared, of);
    if (status == KVIST_BUSY) { /* the disk stands still */
        free(of);
        return;
    }
    KVIST_SIM_REQUIRE(status == KVIST_OK);
    sim.clears_asked++;
    of[0] = kvist_store_pool_id(pool)[0];
    of[1] = kvist_sim_model_clear(of[0]);
    if (kvist_sim_chance(20)) { /* is it as durable as it was said to be? */
        op_turn();
        op_restart();
    }
}

static const struct operation {
    const char *name;
    void (*run)(void);
    uint32_t weight;
} operations[] = {
    {"turn", op_turn, 30},
    {"workers", op_workers, 30},
    {"disk", op_disk, 20},
    {"receive", op_receive, 30},
    {"send", op_send, 16},
    {"time", op_time, 8},
    {"open", op_open, 6},
    {"die", op_die, 1},
    {"stop", op_stop, 2},
    {"go on", op_go_on, 4},
    {"attach", op_attach, 5},
    {"detach", op_detach, 1},
    {"disconnect", op_disconnect, 2},
    {"reconnect", op_reconnect, 4},
    {"take", op_take, 12},
    {"fill", op_fill, 20},
    {"store", op_store, 24},
    {"lease", op_lease, 34},
    {"release", op_release, 18},
    {"touch", op_touch, 3},
    {"unmap", op_unmap, 6},
    {"prefetch", op_prefetch, 14},
    {"suspect", op_suspect, 2},
    {"spoil", op_spoil, 1},
    {"clear", op_clear, 2},
    {"save", op_save, 1},
    {"weather", op_weather, 2},
    {"look", op_look, 1},
    {"restart", op_restart, 1},
};
#define OPERATIONS (sizeof(operations) / sizeof(operations[0]))

static const struct operation *any_operation(void)
{
    uint32_t total = 0;
    for (size_t index = 0; index < OPERATIONS; index++) {
        total += operations[index].weight;
    }
    uint32_t left = kvist_sim_below(total);
    const struct operation *operation = operations;
    while (left >= operation->weight) {
        left -= operation->weight;
        operation++;
    }
    return operation;
}

/* --- A seed ---------------------------------------------------------------------------------- */

static void check_leases(void)
{
    for (uint32_t index = 0; index < KVIST_SIM_ENGINES; index++) {
        if (kvist_sim_engines[index].engine != NULL) {
            kvist_sim_engine_check(&kvist_sim_engines[index]);
        }
    }
}

static void check_all(void)
{
    const char *broken = kvist_store_check(sim.store);
    if (broken != NULL) {
        (void)fprintf(stderr, "kvist_store_check: %s\n", broken);
    }
    KVIST_SIM_REQUIRE(broken == NULL);
    struct kvist_store_stats stats;
    kvist_store_stats(sim.store, &stats);
    KVIST_SIM_REQUIRE(stats.arena_used_bytes <= stats.arena_bytes);
}

static uint32_t count_fds(void)
{
    uint32_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    KVIST_SIM_REQUIRE(folder != NULL);
    while (readdir(folder) != NULL) {
        count++;
    }
    (void)closedir(folder);
    return count;
}

/* Let all that is under way arrive, without faults. */
static void settle(uint32_t rounds)
{
    kvist_sim_disk_set_faults(0);
    sim.fault_percent = 0;
    for (uint32_t round = 0; round < rounds; round++) {
        while (kvist_sim_workers_step()) {
        }
        while (kvist_sim_disk_step()) {
        }
        kvist_sim_pass_time(25000);
        turn();
        for (uint32_t index = 0; index < KVIST_SIM_ENGINES; index++) {
            if (kvist_sim_engines[index].engine != NULL) {
                kvist_sim_engine_unmap(&kvist_sim_engines[index]);
            }
        }
    }
}

/* Everybody gives back what is not needed any more, and goes. */
static void go_home(void)
{
    struct kvist_store_stats stats;
    for (uint32_t index = 0; index < KVIST_SIM_ENGINES; index++) {
        struct kvist_sim_engine *mine = &kvist_sim_engines[index];
        mine->stopped = false;
        if (mine->engine == NULL) {
            continue;
        }
        reconnect_all(mine);
        kvist_sim_engine_receive(mine, UINT32_MAX);
        kvist_sim_engine_send(mine, UINT32_MAX);
        for (uint32_t record = 0; record < KVIST_SIM_LEASES; record++) {
            kvist_sim_engine_release(mine, record);
        }
    }
    uint32_t rounds = 0;
    do {
        settle(HOME_ROUNDS);
        kvist_store_stats(sim.store, &stats);
    } while (++rounds < PATIENCE &&
             (sim.saving || stats.slots_retired > 0 || stats.slots_loading > 0 ||
              sim.clears_done != sim.clears_asked));
    check_all();
    KVIST_SIM_REQUIRE(stats.slots_retired == 0);
    KVIST_SIM_REQUIRE(stats.leased_slots == 0);
    KVIST_SIM_REQUIRE(stats.slots_loading == 0);
    KVIST_SIM_REQUIRE(!sim.saving);
    KVIST_SIM_REQUIRE(sim.clears_done == sim.clears_asked);
    for (uint32_t index = 0; index < KVIST_SIM_ENGINES; index++) {
        if (kvist_sim_engines[index].engine != NULL) {
            kvist_sim_engine_close(&kvist_sim_engines[index]);
        }
    }
    check_all();
    kvist_store_stats(sim.store, &stats);
    KVIST_SIM_REQUIRE(stats.slots_granted == 0);
    KVIST_SIM_REQUIRE(stats.sessions == 0 && stats.processes == 0);
    count_store();
}

static void begin(uint64_t seed, bool verbose)
{
    kvist_sim_run.seed = seed;
    kvist_sim_run.step = 0;
    kvist_sim_world_init(seed, verbose);
    kvist_sim_disk_init();
    kvist_sim_model_init();
    memset(kvist_sim_engines, 0, sizeof(kvist_sim_engines));
    sim.fault_percent = 0;
    sim.clears_asked = 0;
    sim.clears_done = 0;
    sim.saving = false;
    sim.bulky = kvist_sim_chance(15);
    sim.has_tier = kvist_sim_chance(70);
    sim.tier = (struct kvist_tier_options){.path = "none", .bytes_max = 64ULL << 20};
    sim.options = kvist_sim_engine_options(ARENA_BYTES);
    sim.options.admission = kvist_sim_chance(50) ? KVIST_ADMIT_ALL : KVIST_ADMIT_EVICTED;
    sim.has_vault = kvist_sim_chance(75);
    kvist_test_vault_init(&sim.vault);
    if (sim.has_vault) {
        kvist_test_vault_options(&sim.vault, &sim.options);
    }
    sim.options.tier = sim.has_tier ? &sim.tier : NULL;
    sim.store = kvist_test_store_open(&sim.options);
}

void kvist_sim_run_seed(uint64_t seed, bool verbose)
{
    uint32_t fds = count_fds();
    (void)alarm(SEED_SECONDS);
    begin(seed, verbose);
    op_open();
    op_open();
    settle(START_ROUNDS);
    for (kvist_sim_run.step = 1; kvist_sim_run.step <= kvist_sim_run.steps; kvist_sim_run.step++) {
        const struct operation *operation = any_operation();
        kvist_sim_run.operation = operation->name;
        kvist_sim_trace("%u %s", kvist_sim_run.step, operation->name);
        operation->run();
        check_leases();
        if (verbose || kvist_sim_run.step % CHECK_STEPS == 0) {
            check_all();
        }
    }
    kvist_sim_run.operation = "go home";
    struct kvist_store_stats stats;
    kvist_store_stats(sim.store, &stats);
    kvist_sim_trace("pools %llu sessions %llu segments %llu free %llu granted %llu ready %llu "
                    "retired %llu loading %llu commits %llu duplicates %llu evictions %llu",
                    (unsigned long long)stats.pools,
                    (unsigned long long)stats.sessions,
                    (unsigned long long)stats.segments,
                    (unsigned long long)stats.slots_free,
                    (unsigned long long)stats.slots_granted,
                    (unsigned long long)stats.slots_ready,
                    (unsigned long long)stats.slots_retired,
                    (unsigned long long)stats.slots_loading,
                    (unsigned long long)stats.commits_total,
                    (unsigned long long)stats.commits_duplicate_total,
                    (unsigned long long)stats.evictions_total);
    go_home();
    kvist_store_close(&sim.store);
    KVIST_SIM_REQUIRE(sim.vault.count == 0);
    kvist_sim_model_fini();
    kvist_sim_disk_fini();
    (void)alarm(0);
    KVIST_SIM_REQUIRE(count_fds() == fds);
    kvist_sim_run.totals->seeds++;
    kvist_sim_run.totals->hits += kvist_sim_model_hits();
    kvist_sim_run.totals->maps += kvist_sim_engines_maps();
}
