#include "cuda/copy_internal.h"

#include <pthread.h>
#include <signal.h>

int kvist_copy_thread_start(pthread_t *thread_out,
                            const char *name,
                            void *(*run)(void *),
                            void *ctx)
{
    /* Signals belong to the program, not to us: the thread inherits a mask that blocks them. */
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    int error = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (error != 0) {
        return error;
    }
    error = pthread_create(thread_out, NULL, run, ctx);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0) {
        (void)pthread_setname_np(*thread_out, name);
    }
    return error;
}
