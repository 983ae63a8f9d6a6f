#include "storage/busy.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

int kvist_busy_open(void)
{
    return open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
}

bool kvist_busy_now(int fd, uint32_t processors)
{
    char text[128];
    ssize_t length = fd < 0 ? -1 : pread(fd, text, sizeof(text) - 1, 0);
    if (length <= 0) {
        return false;
    }
    text[length] = '\0';
    unsigned runnable = 0;
    return sscanf(text, "%*s %*s %*s %u/", &runnable) == 1 && runnable > processors;
}
