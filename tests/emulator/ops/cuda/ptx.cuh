/* ptx.cuh - src/ops/cuda/ptx.cuh for kernels that run on the host. */
#ifndef LINNET_OPS_CUDA_PTX_CUH
#define LINNET_OPS_CUDA_PTX_CUH

#include "ops/cuda/cuda_internal.h"

/* Offsets in the block's dynamic shared memory; 0 is none. */
static inline uint32_t shared_address(const void *p)
{
    return (uint32_t)((const unsigned char *)p - emulator::current->block->shared) + 16;
}

static inline unsigned char *at_shared(uint32_t address)
{
    return emulator::current->block->shared + address - 16;
}

static inline uint8_t *dynamic_shared()
{
    return emulator::current->block->shared;
}

static inline float bf16_half(uint32_t pair, int high)
{
    return __bfloat162float({(uint16_t)(high ? pair >> 16 : pair)});
}

/* In double and rounded once: not the hardware's bits, but the same ones wherever it is asked. The
 * last lane to come computes for all. */
static inline void mma_16816(float c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             uint32_t b0, uint32_t b1)
{
    struct operands {
        uint32_t a[4], b[2];
        float c[4];
    } mine = {{a0, a1, a2, a3}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    auto all = emulator::meet(mine, [](const emulator::given<operands> &lanes) {
        double a[16][16], b[16][8], sum[16][8];
        for (int lane = 0; lane < 32; lane++) {
            operands o = lanes[lane];
            int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 2; i++) {
                for (int k = 0; k < 4; k++)
                    a[g + k % 2 * 8][2 * t + i + k / 2 * 8] = bf16_half(o.a[k], i);
                for (int k = 0; k < 2; k++) b[2 * t + i + k * 8][g] = bf16_half(o.b[k], i);
                for (int k = 0; k < 2; k++) sum[g + 8 * k][2 * t + i] = o.c[2 * k + i];
            }
        }
        emulator::multiply(a, b, sum);
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                float v = (float)sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
                memcpy(lanes.data[lane] + offsetof(operands, c) + sizeof v * i, &v, sizeof v);
            }
    });
    memcpy(c, all[(int)threadIdx.x % 32].c, sizeof mine.c);
}

static inline void copy_now(const emulator::pending_copy &c)
{
    if (c.from)
        memcpy(c.to, c.from, c.n);
    else
        memset(c.to, 0, c.n);
}

/* Copies come to pass when their group is waited for, or at once. */
template <int SIZE> static inline void copy_async(void *to, const void *from, bool there)
{
    emulator::pending_copy copy = {to, there ? from : nullptr, SIZE};
    if (emulator::early)
        copy_now(copy);
    else
        emulator::current->copies.push_back(copy);
}

static inline void copy_commit(void)
{
    emulator::fiber *f = emulator::current;
    f->groups.push_back(f->copies.size());
}

template <int N> static inline void copy_wait(void)
{
    emulator::fiber *f = emulator::current;
    if (f->groups.size() <= N) return;
    auto groups = f->groups.begin(), end = f->groups.end() - N;
    size_t n = end[-1];
    for (size_t i = 0; i < n; i++) copy_now(f->copies[i]);
    f->copies.erase(f->copies.begin(), f->copies.begin() + (long)n);
    f->groups.erase(groups, end);
    for (size_t &group : f->groups) group -= n;
}

static inline void load_8x8(uint32_t r[4], const bf16 *row, bool transposed)
{
    auto all = emulator::exchange(row);
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        int low = 8 * i + (transposed ? 2 * t : g), high = 8 * i + (transposed ? 2 * t + 1 : g);
        r[i] = all[low][transposed ? g : 2 * t].bits |
               (uint32_t)all[high][transposed ? g : 2 * t + 1].bits << 16;
    }
}

static inline void ldmatrix(uint32_t r[4], const bf16 *row)
{
    load_8x8(r, row, false);
}
static inline void ldmatrix_transposed(uint32_t r[4], const bf16 *row)
{
    load_8x8(r, row, true);
}

static inline uint4 load_shared(uint32_t address)
{
    uint4 v;
    memcpy(&v, at_shared(address), 16);
    return v;
}

/* What a barrier in shared memory holds. Copies come at once. */
struct shared_barrier {
    uint16_t count, missing;
    uint32_t phases; /* that have ended */
};

static inline void barrier_init(uint64_t *barrier, uint32_t count)
{
    *(shared_barrier *)barrier = {(uint16_t)count, (uint16_t)count, 0};
}

static inline void barriers_ready()
{
}

static inline void barrier_arrive(uint64_t *barrier)
{
    shared_barrier *b = (shared_barrier *)barrier;
    if (--b->missing > 0) return;
    b->missing = b->count;
    b->phases++;
}

static inline void barrier_wait(const uint64_t *barrier, uint32_t parity)
{
    const volatile shared_barrier *b = (const volatile shared_barrier *)barrier;
    emulator::wait([=] { return (b->phases & 1) != parity; });
}

static inline bool has_come(uint32_t barrier, uint32_t parity)
{
    return (((shared_barrier *)at_shared(barrier))->phases & 1) != parity;
}

static inline void barrier_arrive(uint32_t barrier)
{
    barrier_arrive((uint64_t *)at_shared(barrier));
}

static inline void barrier_wait(uint32_t barrier, uint32_t parity)
{
    barrier_wait((const uint64_t *)at_shared(barrier), parity);
}

static inline void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    (void)bytes;
    barrier_arrive(barrier);
}

static inline void bulk_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    (void)barrier;
    memcpy(at_shared(to), from, bytes);
}

static inline void previous_wait()
{
}
static inline void next_launch()
{
}

template <int N> static inline void take_registers(void)
{
}
template <int N> static inline void leave_registers(void)
{
}

static inline float exp2_normal(float x)
{
    return exp2f(x);
}

static inline void sync_named(int id, int threads)
{
    emulator::barrier_sync(id, threads);
}
static inline void arrive_named(int id, int threads)
{
    emulator::barrier_arrive(id, threads);
}

static inline void store_tagged(uint64_t *to, uint32_t v0, uint32_t v1, uint32_t tag)
{
    to[0] = (uint64_t)tag << 32 | v0;
    to[1] = (uint64_t)tag << 32 | v1;
}

/* If the tags are not there it comes back when they are: who polls is not to keep others from
 * running. But it says that they were not. */
static inline bool load_tagged(const uint64_t *from, uint32_t tag, uint32_t *v0, uint32_t *v1)
{
    auto there = [=] {
        const volatile uint64_t *at = from;
        return at[0] >> 32 == tag && at[1] >> 32 == tag;
    };
    bool at_once = there();
    if (!at_once) emulator::wait(there);
    *v0 = *v1 = 0xFFFFFFFFu;
    if (at_once) *v0 = (uint32_t)from[0], *v1 = (uint32_t)from[1];
    return at_once;
}

static inline void signal_add(unsigned *signal)
{
    ++*signal;
}
static inline void signal_await(const unsigned *signal, unsigned target)
{
    emulator::wait([=] { return (int)(*(volatile const unsigned *)signal - target) >= 0; });
}

#endif
