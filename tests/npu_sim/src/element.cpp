#include "element.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace npu_sim {
namespace {

/// bf16 is the upper half of fp32, rounded to nearest even.
struct Bfloat16 {
  uint16_t bits;

  Bfloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const bool nan = (wide & 0x7FFFFFFF) > 0x7F800000;
    bits = nan ? 0x7FC0 : static_cast<uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

template <class T, class Compute = T>
void reduce_as(void* into, const void* from, size_t count, HcclReduceOp op) {
  auto* a = static_cast<T*>(into);
  const auto* b = static_cast<const T*>(from);
  for (size_t i = 0; i < count; ++i) {
    const Compute x = a[i], y = b[i];
    switch (op) {
      case HCCL_REDUCE_SUM: a[i] = static_cast<T>(x + y); break;
      case HCCL_REDUCE_PROD: a[i] = static_cast<T>(x * y); break;
      case HCCL_REDUCE_MAX: a[i] = static_cast<T>(x != x ? x : (x < y || y != y ? y : x)); break;  // NaN wins
      default: a[i] = static_cast<T>(x != x ? x : (y < x || y != y ? y : x)); break;
    }
  }
}

}  // namespace

size_t size_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_HIF8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2:
    case HCCL_DATA_TYPE_FP8E8M0: return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64: return 8;
    case HCCL_DATA_TYPE_INT128: return 16;
    default: return 0;
  }
}

const char* name_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return "int8";
    case HCCL_DATA_TYPE_INT16: return "int16";
    case HCCL_DATA_TYPE_INT32: return "int32";
    case HCCL_DATA_TYPE_INT64: return "int64";
    case HCCL_DATA_TYPE_UINT8: return "uint8";
    case HCCL_DATA_TYPE_UINT16: return "uint16";
    case HCCL_DATA_TYPE_UINT32: return "uint32";
    case HCCL_DATA_TYPE_UINT64: return "uint64";
    case HCCL_DATA_TYPE_FP16: return "fp16";
    case HCCL_DATA_TYPE_FP32: return "fp32";
    case HCCL_DATA_TYPE_FP64: return "fp64";
    case HCCL_DATA_TYPE_BFP16: return "bf16";
    case HCCL_DATA_TYPE_INT128: return "int128";
    case HCCL_DATA_TYPE_HIF8: return "hif8";
    case HCCL_DATA_TYPE_FP8E4M3: return "fp8e4m3";
    case HCCL_DATA_TYPE_FP8E5M2: return "fp8e5m2";
    case HCCL_DATA_TYPE_FP8E8M0: return "fp8e8m0";
    default: return "no type";
  }
}

const char* name_of(HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_SUM: return "sum";
    case HCCL_REDUCE_PROD: return "prod";
    case HCCL_REDUCE_MAX: return "max";
    case HCCL_REDUCE_MIN: return "min";
    default: return "";
  }
}

bool reducible(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_FP32:
    case HCCL_DATA_TYPE_BFP16: return true;
    default: return false;
  }
}

void reduce(void* into, const void* from, size_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t>(into, from, count, op);
    case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t>(into, from, count, op);
    case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t>(into, from, count, op);
    case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t>(into, from, count, op);
    case HCCL_DATA_TYPE_FP16: return reduce_as<_Float16, float>(into, from, count, op);
    case HCCL_DATA_TYPE_FP32: return reduce_as<float>(into, from, count, op);
    case HCCL_DATA_TYPE_BFP16: return reduce_as<Bfloat16, float>(into, from, count, op);
    default: return;  // refused before: see `reducible`
  }
}

}  // namespace npu_sim
