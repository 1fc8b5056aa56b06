/* host_device.h - HOST_DEVICE: a function that both C and CUDA's kernels call, from one text. */
#ifndef LINNET_BASE_HOST_DEVICE_H
#define LINNET_BASE_HOST_DEVICE_H

#ifdef __CUDACC__
#define HOST_DEVICE static inline __host__ __device__
#else
#define HOST_DEVICE static inline
#endif

#endif
