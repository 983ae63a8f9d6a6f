/* The runtime of a build without CUDA: there is none. */
#include "cuda/runtime.h"

const struct kvist_copy_runtime *kvist_copy_runtime_cuda(void)
{
    return NULL;
}
