/*
 * emulator.h - threads of a kernel as fibers, and what they do together: warp operations, barriers.
 * A fiber that has to wait gives a condition, which is tried again when its turn comes.
 */
#ifndef LINNET_EMULATOR_H
#define LINNET_EMULATOR_H

#include <stdio.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

namespace emulator
{
struct index {
    unsigned x, y = 0, z = 0;
};

struct pending_copy {
    void *to;
    const void *from; /* NULL: zeros */
    size_t n;
};

struct warp {
    long arrived = 0; /* lanes, in all operations so far */
    unsigned char data[2][32][64];
};

struct named {
    int arrived = 0;
    long generation = 0;
};

struct block {
    index id;
    std::vector<unsigned char> memory; /* dynamic shared memory */
    unsigned char *shared;
    std::vector<warp> warps;
    named barriers[16];
};

struct fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    index thread;
    struct block *block;
    long operations = 0; /* of its warp */
    std::vector<pending_copy> copies;
    const std::function<bool()> *condition = nullptr;
    bool done = false;
};

inline fiber *current;
inline ucontext_t scheduler;
inline unsigned threads;
inline const std::function<void()> *body;

inline void wait(const std::function<bool()> &condition)
{
    if (condition()) return;
    current->condition = &condition;
    swapcontext(&current->context, &scheduler);
    current->condition = nullptr;
}

/* Lets all others go on. */
inline void yield()
{
    bool once = false;
    std::function<bool()> second = [&] {
        bool was = once;
        once = true;
        return was;
    };
    wait(second);
}

inline void entry()
{
    (*body)();
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

/* Runs a launch to its end; aborts if all that are left wait for ever. */
inline void run(unsigned n_blocks, unsigned n_threads, size_t shared, std::function<void()> kernel)
{
    enum { STACK = 64 << 10 };
    std::vector<std::unique_ptr<block>> blocks;
    std::vector<std::unique_ptr<fiber>> fibers;
    threads = n_threads, body = &kernel;
    for (unsigned b = 0; b < n_blocks; b++) {
        blocks.push_back(std::make_unique<block>());
        block *p = blocks.back().get();
        p->id = {b};
        p->memory.assign(shared + 256, 0xFF);
        p->shared = p->memory.data() + (256 - (uintptr_t)p->memory.data() % 256) % 256;
        p->warps.resize((n_threads + 31) / 32);
        for (unsigned t = 0; t < n_threads; t++) {
            fibers.push_back(std::make_unique<fiber>());
            fiber *f = fibers.back().get();
            f->stack.reset(new char[STACK]);
            f->thread = {t};
            f->block = p;
            getcontext(&f->context);
            f->context.uc_stack.ss_sp = f->stack.get();
            f->context.uc_stack.ss_size = STACK;
            f->context.uc_link = &scheduler;
            makecontext(&f->context, entry, 0);
        }
    }
    size_t left = fibers.size();
    for (long idle = 0; left > 0;) {
        bool moved = false;
        for (auto &f : fibers) {
            if (f->done) continue;
            current = f.get();
            if (f->condition && !(*f->condition)()) continue;
            swapcontext(&scheduler, &f->context);
            moved = true;
            if (f->done) left--;
        }
        idle = moved ? 0 : idle + 1;
        if (idle > 4) {
            fprintf(stderr, "emulator: all threads wait for ever\n");
            abort();
        }
    }
}

/* What all lanes of the warp have given; every lane of it must call. */
template <class T> inline const T *exchange(const T &mine, T all[32])
{
    static_assert(sizeof(T) <= 64, "room for an operand");
    struct warp &w = current->block->warps[current->thread.x / 32];
    long turn = current->operations++;
    memcpy(w.data[turn % 2][current->thread.x % 32], &mine, sizeof mine);
    w.arrived++;
    wait([&w, turn] { return w.arrived >= 32 * (turn + 1); });
    for (int i = 0; i < 32; i++) memcpy(&all[i], w.data[turn % 2][i], sizeof(T));
    return all;
}

template <class T> inline T shuffle(T mine, int from)
{
    T all[32];
    exchange(mine, all);
    return from >= 0 && from < 32 ? all[from] : mine;
}

inline bool barrier_arrive(int id, int n)
{
    named &b = current->block->barriers[id];
    if (++b.arrived < n) return false;
    b.arrived = 0;
    b.generation++;
    return true;
}

inline void barrier_sync(int id, int n)
{
    named &b = current->block->barriers[id];
    long before = b.generation;
    if (!barrier_arrive(id, n)) wait([&b, before] { return b.generation != before; });
}
} // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx  (emulator::current->block->id)
inline emulator::index gridDim;

static inline void __syncthreads()
{
    emulator::barrier_sync(0, (int)emulator::threads);
}
static inline void __syncwarp()
{
    int all[32];
    emulator::exchange(0, all);
}
static inline void __nanosleep(unsigned)
{
    emulator::yield();
}
template <class T> static inline T __shfl_sync(unsigned, T v, int lane)
{
    return emulator::shuffle(v, lane);
}
template <class T> static inline T __shfl_xor_sync(unsigned, T v, int mask)
{
    return emulator::shuffle(v, (int)(threadIdx.x % 32) ^ mask);
}
template <class T> static inline T __shfl_up_sync(unsigned, T v, int n)
{
    return emulator::shuffle(v, (int)(threadIdx.x % 32) - n);
}
static inline bool __all_sync(unsigned, bool v)
{
    int all[32], n = 0;
    emulator::exchange((int)v, all);
    for (int i = 0; i < 32; i++) n += all[i];
    return n == 32;
}

#endif
