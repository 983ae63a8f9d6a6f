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

static void watch_corrupt(struct kvist_daemon *daemon, uint64_t now_us)
{
    struct kvist_store_stats stats;
    kvist_store_stats(daemon->store, &stats);
    say_corrupt(&daemon->corrupt_memory,
                "memory",
                stats.checksum_mismatch_total,
                stats.corrupt_pool,
                now_us);
    say_corrupt(
        &daemon->corrupt_nvme, "nvme", stats.tier.corrupt_total, stats.tier.corrupt_pool, now_us);
}

/* Say when health changes: once, where operators look. */
void kvist_watch_health(struct kvist_daemon *daemon, uint64_t now_us)
{
    if (now_us - daemon->health_us < HEALTH_US) {
        return;
    }
    daemon->health_us = now_us;
    watch_tier(daemon);
    watch_corrupt(daemon, now_us);
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
