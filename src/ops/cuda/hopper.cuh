/*
 * hopper.cuh - instructions of sm_90a that have no intrinsics: barriers in shared memory, bulk
 * copies, clusters, warpgroup products. HOPPER_CODE is defined where these may be used.
 */
#ifndef LINNET_OPS_CUDA_HOPPER_CUH
#define LINNET_OPS_CUDA_HOPPER_CUH

#include "ops/cuda/cuda_internal.h"
#include "ops/cuda/ptx.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER_CODE 1

/* The same place in the shared memory of another block of the cluster. */
static __device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t block)
{
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
    return mapped;
}

/* True in one lane of the warp. */
static __device__ __forceinline__ bool elected()
{
    uint32_t one;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(one));
    return one;
}

static __device__ __forceinline__ void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

static __device__ __forceinline__ void cluster_wait()
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* 16 bytes on their way into shared memory; zeros if they are not `there`. */
static __device__ __forceinline__ void copy_piece(uint32_t to, const void *from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

static __device__ __forceinline__ void store_in_cluster(uint32_t address, const float *v)
{
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]),
                 "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}

static __device__ __forceinline__ uint32_t transpose_8x8(uint32_t v)
{
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(v));
    return transposed;
}

static __device__ __forceinline__ void mma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void mma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int IN_FLIGHT> static __device__ __forceinline__ void mma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(IN_FLIGHT) : "memory");
}

/* Cores of 8 tokens x 8 columns: 128 bytes to the next 8 columns, 1024 to the next 8 tokens. The
 * upper bits of an address say which block of the cluster it is in. */
static __device__ __forceinline__ uint64_t descriptor(uint32_t address)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(128 >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32;
}

/* clang-format off */
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)
#define R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define R16 R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define R32 R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R64 R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
                ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define R96 R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
                ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define MMA(tokens, registers, a, descriptor_at, add_at, transposed_at)                       \
    "{\n.reg .pred add;\nsetp.ne.b32 add, " add_at ", 0;\n"                                   \
    "wgmma.mma_async.sync.aligned.m64n" tokens "k16.f32.bf16.bf16 {" registers "}, {" a "}, " \
    descriptor_at ", add, 1, 1, " transposed_at ";\n}"
#define OPERANDS "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "n"((int)ADD), "n"((int)TRANSPOSED)

/* d = a b, or d += a b (ADD), for a warpgroup's 64 rows, N tokens and 16 columns. TRANSPOSED: b
 * has its N side by side, not its K. */
template <int N, bool ADD, bool TRANSPOSED = false>
static __device__ __forceinline__ void mma(float (&d)[N / 2], const uint4 &a, uint64_t b)
{
    if constexpr (N == 16)
        asm volatile(MMA("16", R8, "%8,%9,%10,%11", "%12", "%13", "%14") : D8(0) : OPERANDS);
    if constexpr (N == 32)
        asm volatile(MMA("32", R16, "%16,%17,%18,%19", "%20", "%21", "%22") : D16(0) : OPERANDS);
    if constexpr (N == 64)
        asm volatile(MMA("64", R32, "%32,%33,%34,%35", "%36", "%37", "%38") : D32(0) : OPERANDS);
    if constexpr (N == 128)
        asm volatile(MMA("128", R64, "%64,%65,%66,%67", "%68", "%69", "%70") : D64(0) : OPERANDS);
    if constexpr (N == 192)
        asm volatile(MMA("192", R96, "%96,%97,%98,%99", "%100", "%101", "%102")
                     : D64(0), D32(64)
                     : OPERANDS);
}
/* clang-format on */

#undef D4
#undef D8
#undef D16
#undef D32
#undef D64
#undef R8
#undef R16
#undef R32
#undef R64
#undef R96
#undef MMA
#undef OPERANDS

#endif

#endif
