#include "storage/policy/policy.h"

const struct kvist_policy_ops *const kvist_policies[KVIST_EVICTIONS] = {
    [KVIST_EVICTION_REUSE] = &kvist_policy_reuse,
    [KVIST_EVICTION_LRU] = &kvist_policy_lru,
    [KVIST_EVICTION_S3FIFO] = &kvist_policy_s3fifo,
};
