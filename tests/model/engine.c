#include "client/core.h"
#include "proto/shm/memfd.h"
#include "tests/model/world.h"
#include "tests/support/unit.h"

#include <stdlib.h>
#include <unistd.h>

/* The private memory of engine processes: a client with one pool, in one epoch. */
static struct engine {
    struct kvist_client client;
    struct kvist_pool pool;
    struct kvist_epoch epoch;
    struct kvist_view *view;
    uint32_t free_records[8];
    struct kvist_lease lease;
    void *segment; /* that the client has mapped itself */
} engines[KVIST_WORLD_ENGINES];

static int segment_fd = -1;

void kvist_engine_open(void)
{
    for (uint32_t index = 0; index < KVIST_WORLD_ENGINES; index++) {
        engines[index].view = calloc(1, sizeof(*engines[index].view));
        KVIST_TEST_FATAL(engines[index].view != NULL);
    }
    KVIST_TEST_FATAL(kvist_memfd_create("model", kvist_world_segment_bytes(), &segment_fd, NULL) ==
                     KVIST_OK);
}

static void unmap_segment(struct engine *engine)
{
    if (engine->segment != NULL) {
        kvist_memfd_unmap(&engine->segment, kvist_world_segment_bytes());
    }
}

void kvist_engine_close(void)
{
    for (uint32_t index = 0; index < KVIST_WORLD_ENGINES; index++) {
        unmap_segment(&engines[index]);
        free(engines[index].view);
    }
    (void)close(segment_fd);
}

static void mapped(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes)
{
    struct engine *engine = ctx;
    (void)pool;
    (void)bytes;
    engine->segment = base;
    kvist_model_data_write(&kvist_world_get()->mapping, 1);
}

/* The thread ends where it would unmap: what follows is the kernel's. */
static void unmapping(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes)
{
    (void)ctx;
    (void)pool;
    (void)base;
    (void)bytes;
    kvist_model_data_write(&kvist_world_get()->mapping, 0);
    kvist_model_stop();
}

static void begin_view(struct engine *engine)
{
    const struct kvist_world *world = kvist_world_get();
    struct kvist_view *view = engine->view;
    view->leases = 0;
    view->map.base = world->map;
    memcpy(&view->map.header, world->map, offsetof(struct kvist_map_header, reserved));
    view->leaving_count = 0;
    view->segments[0] = (struct kvist_segment_view){.base = NULL};
    if (world->mapping == 1) {
        view->segments[0] = (struct kvist_segment_view){
            .base = engine, .bytes = kvist_world_segment_bytes(), .serial = KVIST_WORLD_SERIAL};
    }
}

void kvist_engine_begin(uint32_t number)
{
    struct engine *engine = &engines[number];
    const struct kvist_world *world = kvist_world_get();
    unmap_segment(engine);
    engine->client = (struct kvist_client){
        .magic = KVIST_CLIENT_MAGIC,
        .rank = number,
        .schedules = true,
        .maps = true,
        .segment_mapped = mapped,
        .segment_unmapping = unmapping,
        .ctx = engine,
        .mutex = PTHREAD_MUTEX_INITIALIZER,
        .current = &engine->epoch,
        .pools = {&engine->pool},
        .socket_fd = -1,
        .wake_fd = -1,
    };
    engine->client.lock = &engine->client.mutex;
    engine->pool = (struct kvist_pool){
        .magic = KVIST_POOL_MAGIC,
        .client = &engine->client,
        .slot_bytes = world->map->slot_bytes,
        .state = KVIST_POOL_OPEN,
    };
    engine->epoch.next = NULL;
    engine->epoch.instance = 1;
    engine->epoch.page = world->page;
    engine->epoch.lease_next = 0;
    engine->epoch.free_count = 0;
    engine->epoch.free_records = engine->free_records;
    engine->epoch.views[0] = engine->view;
    memcpy(&engine->epoch.page_header, world->page, offsetof(struct kvist_page_header, reserved));
    begin_view(engine);
}

uint32_t kvist_engine_acquire(uint32_t number, uint32_t block, uint64_t *block_bytes_out)
{
    struct engine *engine = &engines[number];
    uint8_t key[KVIST_KEY_BYTES];
    size_t count = 0;
    enum kvist_probe stop = KVIST_PROBE_MISS;
    kvist_world_key(block, key);
    KVIST_TEST_FATAL(kvist_pool_acquire(&engine->pool, key, 1, &engine->lease, &count, &stop) ==
                     KVIST_OK);
    *block_bytes_out = count == 1 ? engine->lease.block_bytes : 0;
    return count == 1 ? engine->lease.slot : KVIST_SLOT_NONE;
}

void kvist_engine_release(uint32_t number)
{
    kvist_pool_release(&engines[number].pool, &engines[number].lease, 1);
}

void kvist_engine_mark(uint32_t number)
{
    const struct kvist_take take = {
        .instance = 1, .reservation = KVIST_WORLD_GRANT, .ticket = KVIST_WORLD_TICKET};
    KVIST_TEST_FATAL(kvist_pool_mark(&engines[number].pool, &take) == KVIST_OK);
}

enum kvist_status kvist_engine_verify(uint32_t number, uint32_t block)
{
    static const char bytes[KVIST_BLOCK_BYTES_MIN]; /* as the daemon's side has them */
    const struct kvist_lease *lease = &engines[number].lease;
    uint8_t key[KVIST_KEY_BYTES];
    kvist_world_key(block, key);
    return kvist_pool_verify(&engines[number].pool, key, 1, lease->slot, bytes, lease->block_bytes);
}

void kvist_engine_touch(uint32_t number, uint32_t block)
{
    uint8_t key[KVIST_KEY_BYTES];
    kvist_world_key(block, key);
    kvist_pool_touch(&engines[number].pool, key, 1);
}

void kvist_engine_map(uint32_t number)
{
    Kvist__Wire__Segment segment;
    Kvist__Wire__Envelope envelope;
    kvist__wire__segment__init(&segment);
    kvist__wire__envelope__init(&envelope);
    segment.serial = KVIST_WORLD_SERIAL;
    segment.bytes = kvist_world_segment_bytes();
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_SEGMENT;
    envelope.segment = &segment;
    KVIST_TEST_FATAL(kvist_receive(&engines[number].client, &envelope, dup(segment_fd), NULL) ==
                     KVIST_OK);
}

void kvist_engine_unmap(uint32_t number)
{
    Kvist__Wire__Revoke revoke;
    Kvist__Wire__Envelope envelope;
    kvist__wire__revoke__init(&revoke);
    kvist__wire__envelope__init(&envelope);
    revoke.serial = KVIST_WORLD_SERIAL;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_REVOKE;
    envelope.revoke = &revoke;
    KVIST_TEST_FATAL(kvist_receive(&engines[number].client, &envelope, -1, NULL) == KVIST_OK);
    (void)kvist_epoch_sweep(&engines[number].client);
}

void kvist_engine_leave(uint32_t number)
{
    struct engine *engine = &engines[number];
    kvist_epoch_retire_locked(&engine->client);
    (void)kvist_epoch_sweep(&engine->client);
}
