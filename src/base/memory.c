#include "base/memory.h"

#include <linux/mempolicy.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

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

bool mem_interleave(void *pages, size_t bytes)
{
    enum { MAX_NODES = 1024, BITS = 8 * sizeof(unsigned long) };
    unsigned long nodes[MAX_NODES / BITS] = {0};
    if (syscall(SYS_get_mempolicy, NULL, nodes, MAX_NODES, NULL, MPOL_F_MEMS_ALLOWED) != 0)
        return false;
    if (bytes == 0) bytes = 1;
    return syscall(SYS_mbind, pages, bytes, MPOL_INTERLEAVE, nodes, MAX_NODES, 0) == 0;
}

void mem_pages_free(void *pages, size_t bytes)
{
    if (pages) munmap(pages, bytes ? bytes : 1);
}
