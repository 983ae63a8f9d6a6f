#include "daemon/peer.h"

#include <linux/capability.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BIT(capability) (UINT64_C(1) << (capability))
#define PRIVILEGES                                                                                 \
    (BIT(CAP_CHOWN) | BIT(CAP_DAC_OVERRIDE) | BIT(CAP_FOWNER) | BIT(CAP_SETFCAP) |                 \
     BIT(CAP_SETUID) | BIT(CAP_SYS_ADMIN) | BIT(CAP_SYS_PTRACE))

bool kvist_peer_is_privileged(uid_t uid, pid_t pid)
{
    char path[64];
    char line[256];
    (void)snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    FILE *file = pid > 0 && uid != geteuid() ? fopen(path, "re") : NULL;
    if (file == NULL) {
        return true;
    }
    /* What is permitted may become effective at any time, and root has its bounding set again
       after an exec. */
    const char *name = uid == 0 ? "CapBnd:" : "CapPrm:";
    uint64_t permitted = UINT64_MAX;
    while (fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, name, strlen(name)) == 0) {
            permitted = strtoull(line + strlen(name), NULL, 16);
        }
    }
    (void)fclose(file);
    return (permitted & PRIVILEGES) != 0;
}
