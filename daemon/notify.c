#include "daemon/notify.h"

#include "proto/base/clock.h"

#include <systemd/sd-daemon.h>

void kvist_notify_ready(const char *status)
{
    (void)sd_notifyf(0, "READY=1\nSTATUS=%s", status);
}

void kvist_notify_status(const char *status)
{
    (void)sd_notifyf(0, "STATUS=%s", status);
}

void kvist_notify_reloading(void)
{
    (void)sd_notifyf(
        0, "RELOADING=1\nMONOTONIC_USEC=%llu", (unsigned long long)kvist_clock_now_us());
}

void kvist_notify_stopping(const char *status, uint64_t extend_us)
{
    (void)sd_notifyf(0,
                     "STOPPING=1\nSTATUS=%s\nEXTEND_TIMEOUT_USEC=%llu",
                     status,
                     (unsigned long long)extend_us);
}

void kvist_notify_alive(void)
{
    (void)sd_notify(0, "WATCHDOG=1");
}

uint64_t kvist_notify_interval_us(void)
{
    uint64_t timeout_us = 0;
    return sd_watchdog_enabled(0, &timeout_us) > 0 ? timeout_us / 3 : 0;
}
