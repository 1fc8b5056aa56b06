/* runtime.h - the emulated device, as runtime.cpp keeps it. */
#ifndef LINNET_EMULATOR_RUNTIME_STATE_H
#define LINNET_EMULATOR_RUNTIME_STATE_H

#include "control.h"
#include "cuda_runtime.h"

namespace emulator
{
/* Work for a stream, in its order. */
void enqueue(cudaStream_t stream, const std::function<void()> &work);
} // namespace emulator

#endif
