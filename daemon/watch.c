#include "daemon/watch.h"

#include "daemon/notify.h"
#include "proto/base/log.h"
#include "proto/key/key.h"

#include <string.h>

#define HEALTH_US  1000000ULL
#define CORRUPT_US 10000000ULL

/* What the tier lost before it was opened, said once. */
static void watch_tier(struct kvist_daemon *daemon)
{
    struct kvist_store_stats stats;
    kvist_store_stats(daemon->store, &stats);
    if (stats.tier.notice[0] != '\0' && !daemon->tier_noticed) {
        daemon->tier_noticed = true;
        kvist_log(KVIST_LOG_WARN, "%s", stats.tier.notice);
    }
}

/* Say that blocks were corrupt: how many since it was last said, and of which pool the last one. */
static void say_corrupt(struct kvist_said_corrupt *said,
                        const char *where,
                        uint64_t total,
                        const uint8_t pool_id[KVIST_KEY_BYTES],
                        uint64_t now_us)
{
    static const uint8_t none[KVIST_KEY_BYTES];
    char pool[2 * KVIST_KEY_BYTES + 1];
    if (memcmp(pool_id, none, sizeof(none)) == 0) {
        said->total = total; /* the tier's index: its notice says so */
        return;
    }
    if (total == said->total || (said->us != 0 && now_us - said->us < CORRUPT_US)) {
        return;
    }
    kvist_key_format(pool_id, pool);
    kvist_log(KVIST_LOG_WARN,
              "blocks were corrupt where=%s blocks=%llu last_pool=%s action=dropped",
              where,
              (unsigned long long)(total - said->total),
              pool);
    *said = (struct kvist_said_corrupt){.total = total, .us = now_us};
}

static void watch_resized(struct kvist_daemon *daemon, uint64_t total)
{
    if (total != daemon->said_resized) {
        kvist_log(KVIST_LOG_WARN,
                  "pools were opened with slots of another size than their blocks on nvme have "
                  "pools=%llu action=dropped",
                  (unsigned long long)(total - daemon->said_resized));
        daemon->said_resized = total;
    }
}

static void watch_blocks(struct kvist_daemon *daemon, uint64_t now_us)
{
    struct kvist_store_stats stats;
    kvist_store_stats(daemon->store, &stats);
    watch_resized(daemon, stats.pools_resized_total);
    say_corrupt(&daemon->corrupt_memory,
                "memory",
                stats.checksum_mismatch_total,
                stats.corrupt_pool,
                now_us);
    say_corrupt(
        &daemon->corrupt_nvme, "nvme", stats.tier.corrupt_total, stats.tier.corrupt_pool, now_us);
}

void kvist_watch_clears(struct kvist_daemon *daemon)
{
    if (kvist_store_clears_are_durable(daemon->store)) {
        kvist_cleared_forget(&daemon->cleared);
    }
}

/* Say when health changes: once, where operators look. */
void kvist_watch_health(struct kvist_daemon *daemon, uint64_t now_us)
{
    if (now_us - daemon->health_us < HEALTH_US) {
        return;
    }
    daemon->health_us = now_us;
    watch_tier(daemon);
    kvist_watch_clears(daemon);
    watch_blocks(daemon, now_us);
    char health[KVIST_HEALTH_BYTES];
    kvist_metrics_health(&daemon->metrics, health);
    if (strcmp(health, daemon->health) == 0) {
        return;
    }
    /* Its end is as loud as its beginning: who logs warnings alone sees both. */
    if (strcmp(health, "ok") != 0 || daemon->health[0] != '\0') {
        kvist_log(KVIST_LOG_WARN, "health changed health=\"%s\"", health);
        kvist_notify_status(&daemon->notify, health);
    }
    (void)snprintf(daemon->health, sizeof(daemon->health), "%s", health);
}

/* What another arena_bytes means for the pools that are there. */
static void log_resize(const struct kvist_daemon *daemon, const struct kvist_adoption *adoption)
{
    if (adoption->arena_bytes != daemon->arena_bytes) {
        kvist_log(KVIST_LOG_INFO,
                  "the arena has another size than before arena_bytes=%llu before_bytes=%llu",
                  (unsigned long long)daemon->arena_bytes,
                  (unsigned long long)adoption->arena_bytes);
    }
    if (adoption->pools_bound > 0) {
        kvist_log(KVIST_LOG_WARN,
                  "pools are cut into segments of a smaller arena and cannot fill this one alone; "
                  "they can after kvistd was stopped, not restarted pools=%u",
                  adoption->pools_bound);
    }
}

void kvist_watch_adoption(const struct kvist_daemon *daemon)
{
    struct kvist_adoption adoption;
    kvist_store_adoption(daemon->store, &adoption);
    if (adoption.files_mistaken > 0) {
        kvist_log(KVIST_LOG_WARN,
                  "stored fds are not what they were stored as fds=%u action=closed",
                  adoption.files_mistaken);
    }
    if (adoption.processes_dropped > 0 || adoption.pools_dropped > 0) {
        kvist_log(KVIST_LOG_WARN,
                  "not all was stored when kvistd ended processes=%u pools=%u action=dropped",
                  adoption.processes_dropped,
                  adoption.pools_dropped);
    }
    if (adoption.adopted) {
        kvist_log(KVIST_LOG_INFO,
                  "adopted what kvistd had left blocks=%llu bytes=%llu blocks_dropped=%llu "
                  "pools=%u segments=%u sessions=%u took_ms=%llu",
                  (unsigned long long)adoption.blocks,
                  (unsigned long long)adoption.bytes,
                  (unsigned long long)adoption.blocks_dropped,
                  adoption.pools,
                  adoption.segments,
                  adoption.sessions,
                  (unsigned long long)(adoption.took_us / 1000));
        log_resize(daemon, &adoption);
    } else if (adoption.why[0] != '\0') {
        kvist_log(KVIST_LOG_WARN,
                  "starting without what kvistd had left reason=\"%s\" released_bytes=%llu",
                  adoption.why,
                  (unsigned long long)adoption.released_bytes);
    }
}
