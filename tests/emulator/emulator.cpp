/* emulator.cpp - switching between fibers, and the order in which they run. */
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>

#include <deque>
#include <memory>
#include <mutex>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator
{
fiber *current;
index gridDim, blockDim;
bool early;

static fiber scheduler;
static list ready, polling;
static const std::function<void()> *body;
static size_t left;

void set_early(bool on)
{
    early = on;
}

/* ---- stacks ------------------------------------------------------------------------------ */

/* Not a power of two apart, so that they do not fall on one another in the caches. */
enum { STACK = 64 << 10, STRIDE = STACK + 576, CANARY = 0x5A, GUARD = 1 << 14 };

static void enter();

#ifdef __x86_64__
/* Puts what a function must preserve on this stack and goes on from another: swapcontext asks the
 * system for the signal mask each time, which takes most of the test's time. */
__attribute__((naked, noinline)) static void switch_stack(void **, void *)
{
    asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

static void prepare(fiber *f, unsigned char *stack)
{
    void **top = (void **)(((uintptr_t)stack + STACK) / 16 * 16);
    *--top = nullptr; /* whom enter() would return to */
    *--top = (void *)enter;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f->context = top;
}

static void switch_to(fiber *to)
{
    fiber *from = current;
    current = to;
    switch_stack(&from->context, to->context);
}
#else
static void prepare(fiber *f, unsigned char *stack)
{
    ucontext_t *c = (ucontext_t *)f->context;
    if (!c) f->context = c = new ucontext_t;
    getcontext(c);
    c->uc_stack.ss_sp = stack;
    c->uc_stack.ss_size = STACK;
    makecontext(c, enter, 0);
}

static void switch_to(fiber *to)
{
    fiber *from = current;
    if (!from->context) from->context = new ucontext_t; /* the scheduler's */
    current = to;
    swapcontext((ucontext_t *)from->context, (ucontext_t *)to->context);
}
#endif

/* ---- order ------------------------------------------------------------------------------- */

static void append(list *l, fiber *f)
{
    f->next = nullptr;
    if (l->last)
        l->last->next = f;
    else
        l->first = f;
    l->last = f;
}

static void suspend()
{
    fiber *next = ready.first;
    if (!next) {
        switch_to(&scheduler);
        return;
    }
    ready.first = next->next;
    if (!ready.first) ready.last = nullptr;
    switch_to(next);
}

static void enter()
{
    (*body)();
    current->done = true;
    left--;
    suspend();
}

void wait_in(list *l)
{
    append(l, current);
    suspend();
}

void release(list *l)
{
    if (!l->first) return;
    if (ready.last)
        ready.last->next = l->first;
    else
        ready.first = l->first;
    ready.last = l->last;
    *l = {};
}

void wait(const std::function<bool()> &condition)
{
    if (condition()) return;
    current->condition = &condition;
    wait_in(&polling);
}

void yield()
{
    bool once = false;
    wait([&] {
        bool was = once;
        once = true;
        return was;
    });
}

bool barrier_arrive(int id, int n)
{
    named &b = current->block->barriers[id];
    if (++b.arrived < n) return false;
    b.arrived = 0;
    release(&b.waiting);
    return true;
}

void barrier_sync(int id, int n)
{
    if (!barrier_arrive(id, n)) wait_in(&current->block->barriers[id].waiting);
}

/* True if any that waits for a condition may go on. */
static bool poll()
{
    list old = polling;
    polling = {};
    for (fiber *f = old.first, *next; f; f = next) {
        next = f->next;
        append((*f->condition)() ? &ready : &polling, f);
    }
    return ready.first;
}

/* Half of the time of a test. */
#ifdef __x86_64__
__attribute__((target_clones("avx2", "default")))
#endif
void multiply(const double a[16][16], const double b[16][8], double sum[16][8])
{
    for (int row = 0; row < 16; row++) {
        double out[8];
        memcpy(out, sum[row], sizeof out);
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++) out[column] += a[row][k] * b[k][column];
        memcpy(sum[row], out, sizeof out);
    }
}

/* ---- launches ---------------------------------------------------------------------------- */

static std::deque<fiber> fibers;
static std::vector<std::unique_ptr<unsigned char[]>> stacks;

/* Static shared memory: a section of its own, see __shared__. */
extern "C" unsigned char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern "C" unsigned char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));

static void begin_block(block *b, index id, unsigned n_threads, size_t shared, size_t first)
{
    b->id = id;
    b->memory.assign(shared + 256 + GUARD, 0xFF);
    b->shared = b->memory.data() + (256 - (uintptr_t)b->memory.data() % 256) % 256;
    b->n_shared = shared;
    memset(b->shared + shared, CANARY, GUARD);
    b->warps.resize((n_threads + 31) / 32);
    for (warp &w : b->warps) w.arrived = 0, w.waiting = {};
    for (named &n : b->barriers) n = {};
    memset(__start_shared_memory, 0xFF, (size_t)(__stop_shared_memory - __start_shared_memory));
    while (fibers.size() < first + n_threads) {
        fibers.emplace_back();
        stacks.emplace_back(new unsigned char[STRIDE]);
    }
    for (unsigned i = 0; i < n_threads; i++) {
        unsigned t = early ? n_threads - 1 - i : i;
        fiber *f = &fibers[first + t];
        f->thread = {t};
        f->block = b;
        f->operations = 0;
        f->copies.clear();
        f->groups.clear();
        f->done = false;
        stacks[first + t][0] = CANARY;
        prepare(f, stacks[first + t].get());
        append(&ready, f);
    }
    left += n_threads;
}

static void finish_blocks(size_t n_fibers, const std::deque<block> &blocks, size_t n_blocks)
{
    current = &scheduler;
    while (left > 0) {
        if (!ready.first && !poll() && !poll()) { /* who yields goes on the second time */
            fprintf(stderr, "emulator: all threads wait for ever\n");
            abort();
        }
        suspend();
    }
    for (size_t i = 0; i < n_fibers; i++)
        if (stacks[i][0] != CANARY) {
            fprintf(stderr, "emulator: a stack is too small\n");
            abort();
        }
    for (size_t i = 0; i < n_blocks; i++)
        for (size_t k = 0; k < GUARD; k++)
            if (blocks[i].shared[blocks[i].n_shared + k] != CANARY) {
                fprintf(stderr, "emulator: a kernel writes beyond its shared memory\n");
                abort();
            }
}

void run(index blocks, unsigned n_threads, size_t shared, bool together,
         const std::function<void()> &kernel)
{
    static std::recursive_mutex mutex;
    static std::deque<block> all;
    std::lock_guard<std::recursive_mutex> lock(mutex);
    unsigned n = blocks.x * blocks.y * blocks.z;
    gridDim = blocks, blockDim = {n_threads}, body = &kernel;
    while (all.size() < (together ? n : 1)) all.emplace_back();
    for (unsigned i = 0; i < n; i++) {
        unsigned k = early ? n - 1 - i : i, slot = together ? i : 0;
        index id = {k % blocks.x, k / blocks.x % blocks.y, k / blocks.x / blocks.y};
        begin_block(&all[slot], id, n_threads, shared, (size_t)slot * n_threads);
        if (!together) finish_blocks(n_threads, all, 1);
    }
    if (together) finish_blocks((size_t)n * n_threads, all, n);
}
} // namespace emulator
