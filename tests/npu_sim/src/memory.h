// Device memory, without the C interface (`acl_memory.cpp`).
#pragma once

#include <cstddef>

#include "failure.h"

namespace npu_sim {

// What memory holds that nobody has written. 0xFF is NaN in every floating-point format and -1 in integers, so it
// can't pass unnoticed through arithmetic; 0xA5 would be -2.9e-16 as fp32, which any tolerance hides. Freed memory
// holds 0x7F: 3.4e38 in fp32 and bf16, NaN in fp16.
constexpr int kNeverWritten = 0xFF;
constexpr int kFreed = 0x7F;

/// Nothing, or why `size` bytes at `address` aren't inside one live block of device memory.
Failure check_device_range(const char* what, const void* address, size_t size);

}  // namespace npu_sim
