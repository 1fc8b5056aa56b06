/*
 * ptx.cuh - instructions that have no intrinsics and that any kernel may use: tensor cores, copies
 * into shared memory, named barriers, signals between blocks. What only wgmma needs is in
 * hopper.cuh. The tests have a second ptx.cuh, for kernels that run on the host.
 */
#ifndef LINNET_OPS_CUDA_PTX_CUH
#define LINNET_OPS_CUDA_PTX_CUH

#include "ops/cuda/cuda_internal.h"

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* The launch's dynamic shared memory, aligned for tensor cores and bulk copies. */
static __device__ __forceinline__ uint8_t *dynamic_shared()
{
    extern __shared__ __align__(128) uint8_t raw[];
    return raw;
}

/* c += a b: 16 x 16 times 16 x 8 */
static __device__ __forceinline__ void mma_16816(float c[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                 uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* exp2f's bits for a result that is not denormal. */
static __device__ __forceinline__ float exp2_normal(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- shared memory --------------------------------------------------------------------------- */

/* SIZE bytes (16 or 4) on their way into shared memory; zeros if they are not `there`. */
template <int SIZE>
static __device__ __forceinline__ void copy_async(void *to, const void *from, bool there)
{
    uint32_t at = shared_address(to), bytes = there ? SIZE : 0;
    if (SIZE == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                     "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(bytes)
                     : "memory");
}

static __device__ __forceinline__ void copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for this thread's groups of copies, but for the last N. */
template <int N> static __device__ __forceinline__ void copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8. */
static __device__ __forceinline__ void ldmatrix(uint32_t r[4], const bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

static __device__ __forceinline__ void ldmatrix_transposed(uint32_t r[4], const bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/* 16 bytes of shared memory. */
static __device__ __forceinline__ uint4 load_shared(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

/* ---- barriers in shared memory --------------------------------------------------------------- */

/*
 * A phase of a barrier ends when `count` have arrived and the bytes have come that bulk copies
 * announced; phases have parities 0, 1, 0 and so on. All lanes that have read or written what a
 * barrier guards arrive themselves: compute-sanitizer does not follow one that arrives for its
 * warp.
 */
static __device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
                 : "memory");
}

/* Before the __syncthreads() behind which barriers are used. */
static __device__ __forceinline__ void barriers_ready()
{
#if __CUDA_ARCH__ >= 900 /* for the unit that copies */
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
                 : "memory");
}

/* Whether the phase of that parity has ended. */
static __device__ __forceinline__ bool has_come(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n.reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900 /* which can sleep meanwhile */
    asm volatile("{\n.reg .pred done;\nAGAIN:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
#else
    while (!has_come(barrier, parity)) __nanosleep(20);
#endif
}

/* ---- bulk copies: Hopper --------------------------------------------------------------------- */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define NEEDS_HOPPER 1
#endif

/* Arrives, and announces bytes that copies will bring. */
static __device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes)
{
#ifndef NEEDS_HOPPER
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
#endif
}

/* Bytes that have been announced to the barrier. */
static __device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t bytes,
                                                 uint32_t barrier)
{
#ifndef NEEDS_HOPPER
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
#endif
}

/* The same by pointers. */
static __device__ __forceinline__ void barrier_arrive(uint64_t *barrier)
{
    barrier_arrive(shared_address(barrier));
}

static __device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity)
{
    barrier_wait(shared_address(barrier), parity);
}

static __device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
    barrier_expect(shared_address(barrier), bytes);
}

static __device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t bytes,
                                                 uint64_t *barrier)
{
    bulk_copy(to, from, bytes, shared_address(barrier));
}

/* ---- kernels that follow one another --------------------------------------------------------- */

/* Waits for the kernels before this one in the stream. */
static __device__ __forceinline__ void previous_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Once all blocks have called it the next kernel may begin: up to its own previous_wait. */
static __device__ __forceinline__ void next_launch()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- registers: Hopper ----------------------------------------------------------------------- */

/* From now on the warps of this group of four have N registers a thread: more, or fewer. */
template <int N> static __device__ __forceinline__ void take_registers(void)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

template <int N> static __device__ __forceinline__ void leave_registers(void)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

/* ---- barriers and signals -------------------------------------------------------------------- */

static __device__ __forceinline__ void sync_named(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

static __device__ __forceinline__ void arrive_named(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Counts up in global memory; what the block has written and synchronised on is seen by who awaits
 * it. */
static __device__ __forceinline__ void signal_add(unsigned *signal)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(signal) : "memory");
}

/*
 * Two values, each in a word with a tag: who finds the tag has the value, without a barrier. Each
 * word is read and written at once. A tag must not have been in that place before.
 */
static __device__ __forceinline__ void store_tagged(uint64_t *to, uint32_t v0, uint32_t v1,
                                                    uint32_t tag)
{
    asm volatile("{\n.reg .b64 w0, w1;\n"
                 "mov.b64 w0, {%1, %3};\n"
                 "mov.b64 w1, {%2, %3};\n"
                 "st.relaxed.gpu.global.v2.b64 [%0], {w0, w1};\n}" ::"l"(to),
                 "r"(v0), "r"(v1), "r"(tag)
                 : "memory");
}

/* As store_tagged wrote them, if both tags are there. */
static __device__ __forceinline__ bool load_tagged(const uint64_t *from, uint32_t tag, uint32_t *v0,
                                                   uint32_t *v1)
{
    uint32_t t0, t1;
    asm volatile("{\n.reg .b64 w0, w1;\n"
                 "ld.relaxed.gpu.global.v2.b64 {w0, w1}, [%4];\n"
                 "mov.b64 {%0, %1}, w0;\n"
                 "mov.b64 {%2, %3}, w1;\n}"
                 : "=r"(*v0), "=r"(t0), "=r"(*v1), "=r"(t1)
                 : "l"(from)
                 : "memory");
    return t0 == tag && t1 == tag;
}

/* Until the signal has come to target, wrapping round. */
static __device__ __forceinline__ void signal_await(const unsigned *signal, unsigned target)
{
    unsigned now;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(signal) : "memory");
    while ((int)(now - target) < 0);
}

#endif
