#include "base/memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

void *mem_new(size_t count, size_t size)
{
    return calloc(count ? count : 1, size ? size : 1); /* calloc checks the product */
}

void *mem_resize(void *old, size_t count, size_t size)
{
    size_t bytes;
    if (!size_mul(count, size, &bytes)) return NULL;
    return realloc(old, bytes ? bytes : 1);
}

bool mem_reserve(void **items, size_t *capacity, size_t need, size_t size)
{
    if (need <= *capacity) return true;
    size_t grown = *capacity + *capacity / 2;
    if (grown < need) grown = need;
    if (grown < 8) grown = 8;
    void *p = mem_resize(*items, grown, size);
    if (!p) return false;
    *items = p;
    *capacity = grown;
    return true;
}

char *mem_string(const char *bytes, size_t n)
{
    char *s = mem_new(n + 1, 1);
    if (s && n) memcpy(s, bytes, n);
    return s;
}

enum { HUGE_PAGE = 2 << 20 };

void *mem_pages(size_t bytes, bool huge)
{
    if (bytes == 0) bytes = 1;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (huge && bytes >= HUGE_PAGE)
        madvise(p, bytes, MADV_HUGEPAGE); /* advice: failure is no error */
    return p;
}

void mem_pages_free(void *pages, size_t bytes)
{
    if (pages) munmap(pages, bytes ? bytes : 1);
}
