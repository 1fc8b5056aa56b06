/*
 * emulator.h - threads of a kernel as fibers, and what they do together: warp operations, barriers.
 * A fiber runs until it waits for others. Launches run one after another, and blocks too unless the
 * launch is cooperative.
 *
 * What hardware leaves open is at one of two extremes (set_early): blocks in descending order,
 * streams at work at once and asynchronous copies done when they begin; or blocks in ascending
 * order, and everything as late as it may be. Results must not depend on it.
 */
#ifndef LINNET_EMULATOR_H
#define LINNET_EMULATOR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <vector>

namespace emulator
{
struct index {
    unsigned x, y = 0, z = 0;
};

struct fiber;

/* Fibers in order; each is in one list at most. */
struct list {
    fiber *first = nullptr, *last = nullptr;
};

struct warp {
    int arrived = 0; /* lanes, in this operation */
    unsigned char data[2][32][64];
    list waiting;
};

struct named {
    int arrived = 0;
    list waiting;
};

struct block {
    index id;
    std::vector<unsigned char> memory; /* dynamic shared memory */
    unsigned char *shared;
    size_t n_shared;
    std::vector<warp> warps;
    named barriers[16];
};

struct pending_copy {
    void *to;
    const void *from; /* NULL: zeros */
    size_t n;
};

struct fiber {
    void *context = nullptr; /* the saved stack, or a ucontext_t */
    index thread;
    struct block *block = nullptr;
    long operations = 0; /* of its warp */
    std::vector<pending_copy> copies;
    std::vector<size_t> groups; /* ends in `copies` */
    const std::function<bool()> *condition = nullptr;
    fiber *next = nullptr;
    bool done = false;
};

extern fiber *current;
extern index gridDim, blockDim;
extern bool early;

void set_early(bool on);

/* Runs a launch to its end; aborts if all that are left wait for ever. */
void run(index blocks, unsigned n_threads, size_t shared, bool together,
         const std::function<void()> &kernel);

void wait_in(list *l);
void release(list *l);
/* Tries the condition whenever nobody else can go on. */
void wait(const std::function<bool()> &condition);
/* Lets all others go on. */
void yield();
bool barrier_arrive(int id, int n);
void barrier_sync(int id, int n);

/* sum += a b, k ascending */
void multiply(const double a[16][16], const double b[16][8], double sum[16][8]);

/* What the lanes of a warp have given, until the operation after the next. */
template <class T> struct given {
    unsigned char (*data)[64];

    T operator[](int lane) const
    {
        T v;
        memcpy(&v, data[lane], sizeof v);
        return v;
    }
};

/* Every lane of the warp must call. The last one calls all(given), which may put results in their
 * places. */
template <class T, class F> inline given<T> meet(const T &mine, F all)
{
    static_assert(sizeof(T) <= 64, "room for an operand");
    struct warp &w = current->block->warps[current->thread.x / 32];
    given<T> g = {w.data[current->operations++ % 2]};
    memcpy(g.data[current->thread.x % 32], &mine, sizeof mine);
    if (++w.arrived < 32) {
        wait_in(&w.waiting);
    } else {
        w.arrived = 0;
        all(g);
        release(&w.waiting);
    }
    return g;
}

template <class T> inline given<T> exchange(const T &mine)
{
    return meet(mine, [](const given<T> &) {});
}

template <class T> inline T shuffle(T mine, int from)
{
    given<T> all = exchange(mine);
    return from >= 0 && from < 32 ? all[from] : mine;
}

template <class T, class F> inline T reduce(T mine, F f)
{
    return meet(mine, [&](const given<T> &all) {
        T v = all[0];
        for (int i = 1; i < 32; i++) v = f(v, all[i]);
        memcpy(all.data[0], &v, sizeof v);
    })[0];
}
} // namespace emulator

#endif
