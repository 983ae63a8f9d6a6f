/*
 * stdatomic - stands in for the compiler's <stdatomic.h> in what is compiled for the model.
 *
 * Role        every atomic access of the code under test becomes a call into the machine of
 *             tests/model/machine.h, with the place that it stands at. There are the accesses that
 *             the code uses and no others: one that uses another does not compile, until the
 *             machine knows it.
 */
#ifndef KVIST_TESTS_MODEL_STDATOMIC_H
#define KVIST_TESTS_MODEL_STDATOMIC_H

#include <stdbool.h>
#include <stdint.h>

enum memory_order {
    memory_order_relaxed = __ATOMIC_RELAXED,
    memory_order_acquire = __ATOMIC_ACQUIRE,
    memory_order_release = __ATOMIC_RELEASE,
    memory_order_acq_rel = __ATOMIC_ACQ_REL,
    memory_order_seq_cst = __ATOMIC_SEQ_CST,
};

struct kvist_model_site {
    const char *file;
    const char *function;
    const char *what; /* the operand, as it is written */
    uint32_t line;
};

uint32_t kvist_model_load_u32(const _Atomic uint32_t *object,
                              enum memory_order order,
                              const struct kvist_model_site *site);
uint64_t kvist_model_load_u64(const _Atomic uint64_t *object,
                              enum memory_order order,
                              const struct kvist_model_site *site);
bool kvist_model_load_bool(const _Atomic bool *object,
                           enum memory_order order,
                           const struct kvist_model_site *site);
void kvist_model_store_u32(_Atomic uint32_t *object,
                           uint32_t value,
                           enum memory_order order,
                           const struct kvist_model_site *site);
void kvist_model_store_u64(_Atomic uint64_t *object,
                           uint64_t value,
                           enum memory_order order,
                           const struct kvist_model_site *site);
void kvist_model_fence(enum memory_order order, const struct kvist_model_site *site);

/* Stands for KVIST_INDEX_READ_MAX, see world.h. */
extern uint32_t kvist_world_reads;

#define KVIST_MODEL_HERE(what)                                                                     \
    (&(const struct kvist_model_site){__FILE__, __func__, what, __LINE__})

#define atomic_load_explicit(object, order)                                                        \
    _Generic((object),                                                                             \
        _Atomic uint32_t *: kvist_model_load_u32,                                                  \
        const _Atomic uint32_t *: kvist_model_load_u32,                                            \
        _Atomic uint64_t *: kvist_model_load_u64,                                                  \
        const _Atomic uint64_t *: kvist_model_load_u64,                                            \
        _Atomic bool *: kvist_model_load_bool,                                                     \
        const _Atomic bool *: kvist_model_load_bool)(object, order, KVIST_MODEL_HERE(#object))
#define atomic_store_explicit(object, value, order)                                                \
    _Generic((object),                                                                             \
        _Atomic uint32_t *: kvist_model_store_u32,                                                 \
        _Atomic uint64_t *: kvist_model_store_u64)(object, value, order, KVIST_MODEL_HERE(#object))
#define atomic_thread_fence(order) kvist_model_fence(order, KVIST_MODEL_HERE("fence"))

#endif
