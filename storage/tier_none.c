/* The tier of a build without RocksDB: it can never be opened, so nothing else is ever called. */
#include "storage/tier.h"

enum kvist_status kvist_tier_check(const char *path, struct kvist_error *err)
{
    return kvist_error_set(err,
                           KVIST_UNSUPPORTED,
                           0,
                           "tier",
                           "this kvistd was built without RocksDB, so it has no NVMe tier for %s: "
                           "remove the path from the configuration, or install librocksdb-dev and "
                           "build again",
                           path != NULL ? path : "it");
}

enum kvist_status kvist_tier_open(const struct kvist_tier_options *options,
                                  struct kvist_tier **tier_out,
                                  struct kvist_error *err)
{
    (void)tier_out;
    return kvist_tier_check(options->path, err);
}

bool kvist_tier_may_pass(const char *path, int code)
{
    (void)path;
    (void)code;
    return false;
}

void kvist_tier_close(struct kvist_tier **tier)
{
    *tier = NULL;
}

int kvist_tier_fd(const struct kvist_tier *tier)
{
    (void)tier;
    return -1;
}

bool kvist_tier_turn(struct kvist_tier *tier)
{
    (void)tier;
    return false;
}

enum kvist_status kvist_tier_put_pool(struct kvist_tier *tier,
                                      const struct kvist_tier_pool *pool,
                                      kvist_tier_done_fn *done,
                                      void *ctx)
{
    (void)tier;
    (void)pool;
    (void)done;
    (void)ctx;
    return KVIST_UNSUPPORTED;
}

void kvist_tier_forget_pool(struct kvist_tier *tier, const uint8_t pool_id[KVIST_KEY_BYTES])
{
    (void)tier;
    (void)pool_id;
}

enum kvist_status kvist_tier_write(struct kvist_tier *tier,
                                   const struct kvist_tier_block *block,
                                   const void *source,
                                   kvist_tier_done_fn *done,
                                   void *ctx)
{
    (void)tier;
    (void)block;
    (void)source;
    (void)done;
    (void)ctx;
    return KVIST_UNSUPPORTED;
}

enum kvist_status kvist_tier_read(struct kvist_tier *tier,
                                  const uint8_t pool_id[KVIST_KEY_BYTES],
                                  const uint8_t key[KVIST_KEY_BYTES],
                                  uint64_t pool_generation,
                                  void *target,
                                  uint64_t target_bytes,
                                  kvist_tier_done_fn *done,
                                  void *ctx)
{
    (void)tier;
    (void)pool_id;
    (void)key;
    (void)pool_generation;
    (void)target;
    (void)target_bytes;
    (void)done;
    (void)ctx;
    return KVIST_UNSUPPORTED;
}

enum kvist_status kvist_tier_sync(struct kvist_tier *tier, kvist_tier_done_fn *done, void *ctx)
{
    (void)tier;
    (void)done;
    (void)ctx;
    return KVIST_UNSUPPORTED;
}

void kvist_tier_stats(const struct kvist_tier *tier, struct kvist_tier_stats *stats_out)
{
    (void)tier;
    *stats_out = (struct kvist_tier_stats){0};
}

void kvist_tier_set_tenant(struct kvist_tier *tier,
                           const char *tenant,
                           uint64_t bytes_max,
                           uint32_t weight)
{
    (void)tier;
    (void)tenant;
    (void)bytes_max;
    (void)weight;
}

uint64_t kvist_tier_tenant_bytes(struct kvist_tier *tier, const char *tenant)
{
    (void)tier;
    (void)tenant;
    return 0;
}
