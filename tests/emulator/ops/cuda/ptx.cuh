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

/* In double and rounded once: not the hardware's bits, but the same ones wherever it is asked. */
static inline void mma_16816(float c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             uint32_t b0, uint32_t b1)
{
    struct operands {
        uint32_t a[4], b[2];
    } all[32];
    emulator::exchange(operands{{a0, a1, a2, a3}, {b0, b1}}, all);
    int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        int row = i / 2, column = 2 * t + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            uint32_t a = all[4 * g + k % 8 / 2].a[row + k / 8 * 2];
            uint32_t b = all[4 * column + k % 8 / 2].b[k / 8];
            sum += (double)bf16_half(a, k % 2) * bf16_half(b, k % 2);
        }
        c[i] = (float)sum;
    }
}

/* Copies come to pass when they are waited for. */
template <int SIZE> static inline void copy_async(void *to, const void *from, bool there)
{
    emulator::current->copies.push_back({to, there ? from : nullptr, SIZE});
}

static inline void copy_commit(void)
{
}

template <int N> static inline void copy_wait(void)
{
    static_assert(N == 0, "groups are not told apart");
    for (const emulator::pending_copy &c : emulator::current->copies)
        if (c.from)
            memcpy(c.to, c.from, c.n);
        else
            memset(c.to, 0, c.n);
    emulator::current->copies.clear();
}

static inline void load_8x8(uint32_t r[4], const bf16 *row, bool transposed)
{
    const bf16 *all[32];
    emulator::exchange(row, all);
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        const bf16 *const *rows = all + 8 * i;
        uint16_t low = transposed ? rows[2 * t][g].bits : rows[g][2 * t].bits;
        uint16_t high = transposed ? rows[2 * t + 1][g].bits : rows[g][2 * t + 1].bits;
        r[i] = low | (uint32_t)high << 16;
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

/* A barrier in shared memory: how many copies have come. They come at once. */
static inline void bulk_copy(void *to, const void *from, uint32_t bytes, uint64_t *barrier)
{
    memcpy(to, from, bytes);
    ++*barrier;
}

static inline bool has_come(const uint64_t *barrier, uint32_t parity)
{
    return (*barrier & 1) != parity;
}

static inline void wait_copy(uint32_t barrier, uint32_t parity)
{
    const uint64_t *at = (const uint64_t *)at_shared(barrier);
    emulator::wait([=] { return has_come(at, parity); });
}

static inline void arrival_begin(uint64_t *barrier)
{
    *barrier = 0;
}
static inline void arrivals_begun()
{
}

static inline void previous_wait()
{
}
static inline void next_launch()
{
}

static inline void sync_named(int id, int threads)
{
    emulator::barrier_sync(id, threads);
}
static inline void arrive_named(int id, int threads)
{
    emulator::barrier_arrive(id, threads);
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
