/*
 * copy_bytes - memcpy for blocks that are larger than what the cache should hold of them.
 *
 * Role        a block's target is not read soon, so its lines need not be fetched before they
 *             are overwritten: stores go past the cache. Four pages advance side by side, which
 *             keeps more DRAM banks and prefetch streams busy than one. Below NT_BYTES_MIN, and
 *             on other processors than x86-64, plain memcpy.
 * Source      tests/bench/copy_bench.c has the figures; glibc's large_memcpy works by the same
 *             plan, above a threshold that is larger than any block
 */
#include "cuda/copy_internal.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

#define NT_BYTES_MIN   (16UL << 10)
#define PAGE_BYTES     4096UL
#define PAGES          4UL
#define LINE_BYTES     64UL
#define PREFETCH_BYTES 256UL

static void line_stream(unsigned char *target, const unsigned char *source)
{
    const __m128i *from = (const void *)source;
    __m128i *to = (void *)target;
    __m128i first = _mm_loadu_si128(from);
    __m128i second = _mm_loadu_si128(from + 1);
    __m128i third = _mm_loadu_si128(from + 2);
    __m128i fourth = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, first);
    _mm_stream_si128(to + 1, second);
    _mm_stream_si128(to + 2, third);
    _mm_stream_si128(to + 3, fourth);
}

static void pages_stream(unsigned char *target, const unsigned char *source)
{
    for (size_t offset = 0; offset < PAGE_BYTES; offset += LINE_BYTES) {
        for (size_t page = 0; page < PAGES; page++) {
            size_t at = page * PAGE_BYTES + offset;
            _mm_prefetch((const char *)source + at + PREFETCH_BYTES, _MM_HINT_T0);
            line_stream(target + at, source + at);
        }
    }
}

void kvist_copy_bytes(void *target, const void *source, size_t bytes)
{
    unsigned char *to = target;
    const unsigned char *from = source;
    size_t head = -(uintptr_t)to & (LINE_BYTES - 1);
    if (bytes >= NT_BYTES_MIN + head) {
        memcpy(to, from, head);
        to += head;
        from += head;
        bytes -= head;
        for (; bytes >= PAGES * PAGE_BYTES; bytes -= PAGES * PAGE_BYTES) {
            pages_stream(to, from);
            to += PAGES * PAGE_BYTES;
            from += PAGES * PAGE_BYTES;
        }
        /* Streamed stores are weakly ordered: they are visible before the job is reported. */
        _mm_sfence();
    }
    memcpy(to, from, bytes);
}

#else

void kvist_copy_bytes(void *target, const void *source, size_t bytes)
{
    memcpy(target, source, bytes);
}

#endif
