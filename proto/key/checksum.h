/*
 * checksum - XXH3-64 of a block's bytes.
 *
 * Role        the one checksum of both sides: the daemon takes it after commit and at every tier
 *             crossing, an engine that verifies computes it again.
 * Threads     any
 * Source      xxHash 0.8 XXH3_64bits_withSeed; the seed is kvist_key_checksum_seed()
 */
#ifndef KVIST_KEY_CHECKSUM_H
#define KVIST_KEY_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/** Checksum of length bytes. About memory speed. */
uint64_t kvist_checksum(const void *bytes, size_t length, uint64_t seed);

#endif
