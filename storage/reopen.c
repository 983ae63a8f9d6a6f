/*
 * reopen - the tier of a store, opened at start, or later.
 *
 * Role        a tier whose disk is in trouble at start does not keep the store from serving from
 *             DRAM: it is opened again and again, on a worker, and taken up when that succeeds.
 * Limits      1 s between two tries, doubled up to 30 s
 * Errors      what kvist_tier_open() answers, but for UNAVAILABLE; the store's stats say why a tier
 *             is away
 */
#include "storage/internal.h"

#include <string.h>

#define WAIT_US_MIN 1000000U
#define WAIT_US_MAX 30000000U

enum kvist_status kvist_reopen_init(struct kvist_store *store, struct kvist_error *err)
{
    struct kvist_reopen *reopen = &store->reopen;
    if (store->options.tier == NULL) {
        return KVIST_OK;
    }
    store->tier_options = *store->options.tier;
    store->options.tier = &store->tier_options;
    store->tier_options.events = kvist_promote_events;
    store->tier_options.ctx = store;
    reopen->store = store;
    reopen->wait_us = WAIT_US_MIN;
    reopen->after_us = store->now_us + WAIT_US_MIN;
    enum kvist_status status = kvist_tier_open(&store->tier_options, &store->tier, &reopen->err);
    if (status == KVIST_OK || status == KVIST_UNAVAILABLE) {
        return KVIST_OK;
    }
    return kvist_error_set(
        err, status, reopen->err.code, reopen->err.origin, "%s", reopen->err.text);
}

static void open_run(struct kvist_job *job)
{
    struct kvist_reopen *reopen = (struct kvist_reopen *)job;
    reopen->status =
        kvist_tier_open(&reopen->store->tier_options, &reopen->tier, &reopen->tried_err);
}

/* The pools that are here are to be known there, and their blocks written if all are. */
static void take_up(struct kvist_store *store)
{
    for (uint32_t index = 0; index < store->pool_high; index++) {
        struct kvist_store_pool *pool = store->pools[index];
        if (pool == NULL) {
            continue;
        }
        pool->put_wanted = true;
        pool->put_after_us = 0;
        for (uint32_t slot = pool->ops->hottest(pool->policy, KVIST_SLOT_NONE);
             slot != KVIST_SLOT_NONE && store->options.admission == KVIST_ADMIT_ALL;
             slot = pool->ops->hottest(pool->policy, slot)) {
            kvist_spill_queue_behind(pool, slot);
        }
    }
}

static void open_done(struct kvist_job *job)
{
    struct kvist_reopen *reopen = (struct kvist_reopen *)job;
    struct kvist_store *store = reopen->store;
    reopen->busy = false;
    if (reopen->status == KVIST_OK) {
        store->tier = reopen->tier;
        take_up(store);
        return;
    }
    reopen->err = reopen->tried_err;
    reopen->wait_us = 2 * reopen->wait_us < WAIT_US_MAX ? 2 * reopen->wait_us : WAIT_US_MAX;
    reopen->after_us = store->now_us + reopen->wait_us;
}

void kvist_reopen_turn(struct kvist_store *store)
{
    struct kvist_reopen *reopen = &store->reopen;
    if (!kvist_store_tier_is_away(store) || reopen->busy || store->closing ||
        store->now_us < reopen->after_us) {
        return;
    }
    reopen->job = (struct kvist_job){.run = open_run, .done = open_done};
    reopen->busy = kvist_workers_submit(store->duty, &reopen->job) == KVIST_OK;
}

bool kvist_store_tier_is_away(const struct kvist_store *store)
{
    return store->tier == NULL && store->options.tier != NULL;
}

void kvist_reopen_stats(const struct kvist_store *store, struct kvist_tier_stats *stats_out)
{
    *stats_out = (struct kvist_tier_stats){.disk_bytes_max = store->tier_options.bytes_max};
    const char *why = store->reopen.err.text;
    bool named = strstr(why, store->tier_options.path) != NULL;
    struct kvist_error said;
    (void)kvist_error_set(&said,
                          KVIST_UNAVAILABLE,
                          0,
                          "tier",
                          "no NVMe tier%s%.100s until its disk is well: %s",
                          named ? "" : " in ",
                          named ? "" : store->tier_options.path,
                          why);
    memcpy(stats_out->degraded, said.text, sizeof(said.text));
}
