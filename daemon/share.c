#include "daemon/share.h"

#include "proto/base/clock.h"
#include "proto/base/log.h"

#include <string.h>

bool kvist_share_fits(bool is_operator, uint32_t own, uint32_t used, uint32_t max)
{
    uint32_t open = is_operator ? max : max - max / KVIST_SHARE_KEPT;
    return used < open && (is_operator || own < open - used);
}

bool kvist_share_is_one(const char *tenant, uid_t uid, const char *other_tenant, uid_t other_uid)
{
    return strcmp(tenant, other_tenant) == 0 &&
           (uid == other_uid || strcmp(tenant, KVIST_TENANT_DEFAULT) != 0);
}

enum kvist_status kvist_share_check(struct kvist_connection *connection,
                                    const char *what,
                                    uint32_t own,
                                    uint32_t used,
                                    uint32_t max,
                                    struct kvist_error *err)
{
    if (kvist_share_fits(connection->is_operator, own, used, max)) {
        return KVIST_OK;
    }
    struct kvist_counters *counters = connection->server->counters;
    counters->share_refusals_total++;
    connection->server->handler.refused(connection->server->handler.ctx, connection->tenant);
    counters->share_refused_us = kvist_clock_now_us();
    (void)snprintf(counters->share_refused,
                   sizeof(counters->share_refused),
                   "%s were refused to tenant %s, uid %u, within the last minute",
                   what,
                   connection->tenant,
                   (unsigned)connection->uid);
    if (kvist_connection_may_log(connection)) {
        kvist_log(KVIST_LOG_WARN,
                  "over its share what=%s tenant=%s uid=%u pid=%d own=%u used=%u max=%u "
                  "action=refused",
                  what,
                  connection->tenant,
                  (unsigned)connection->uid,
                  (int)connection->pid,
                  own,
                  used,
                  max);
    }
    bool is_default = strcmp(connection->tenant, KVIST_TENANT_DEFAULT) == 0;
    char holder[KVIST_TENANT_BYTES_MAX + 16] = "kvistd's own user";
    if (!connection->is_operator && is_default) {
        (void)snprintf(holder, sizeof(holder), "user %u", (unsigned)connection->uid);
    } else if (!connection->is_operator) {
        (void)snprintf(holder, sizeof(holder), "tenant %s", connection->tenant);
    }
    return kvist_error_set(err,
                           KVIST_BUSY,
                           0,
                           "share",
                           "%s has %u of kvistd's %u %s, and no more are to be had for it while "
                           "%u are in use: close some, or try again later",
                           holder,
                           own,
                           max,
                           what,
                           used);
}
