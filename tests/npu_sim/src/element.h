// Element types of collectives, and reductions over them.
#pragma once

#include <cstddef>

#include "third_party/hccl/inc/hccl/hccl.h"

namespace npu_sim {

/// Bytes of one element; 0 for types that HCCL doesn't have.
size_t size_of(HcclDataType type);

/// "fp32" etc., for messages and traces.
const char* name_of(HcclDataType type);
const char* name_of(HcclReduceOp op);

/// Whether HCCL reduces this type: int8, int16, int32, int64, fp16, fp32, bf16; not fp64, nor unsigned integers.
bool reducible(HcclDataType type);

/// `into[i] = op(into[i], from[i])`, rounded to the type each time, as a device that passes partial sums on does.
void reduce(void* into, const void* from, size_t count, HcclDataType type, HcclReduceOp op);

}  // namespace npu_sim
