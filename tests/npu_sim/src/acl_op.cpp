// ACL: single operators by name. The wheel's process group uses two in C++, where no Python kernel can take their
// place: it pads tensors before it gathers a list of them, with a constant that it makes by another. Any other is
// refused.
#include <acl/acl.h>
#include <acl/acl_op.h>
#include <acl/acl_op_compiler.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "failure.h"
#include "stream.h"

struct aclTensorDesc {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> shape;
};

struct aclDataBuffer {
  void* data;
  size_t size;
};

/// Only the texts are kept; no operator here depends on the rest.
struct aclopAttr {
  std::map<std::string, std::string> texts;
};

namespace npu_sim {
namespace {

/// A tensor that an operator reads or writes. The description is the host's; the data is on the device or on the host.
struct Operand {
  const aclTensorDesc* desc;
  const aclDataBuffer* buffer;
};

size_t elements(const aclTensorDesc& desc) {
  size_t count = 1;
  for (const int64_t extent : desc.shape) count *= static_cast<size_t>(extent);
  return count;
}

void repeat(char* to, size_t count, const char* value, size_t bytes) {
  for (size_t i = 0; i < count; ++i) std::memcpy(to + i * bytes, value, bytes);
}

/// Fill(shape, value): both are on the host, whose memory is gone by the time it runs; the shape is the output's.
aclError fill(const Operand& value, const Operand& out, const std::shared_ptr<Stream>& stream) {
  const std::string filler(static_cast<const char*>(value.buffer->data), value.buffer->size);
  const size_t count = elements(*out.desc);
  auto* const to = static_cast<char*>(out.buffer->data);
  stream->push("Fill", [=] {
    repeat(to, count, filler.data(), filler.size());
    return Failure{};
  });
  return ACL_SUCCESS;
}

/// `to`, already filled with the padding, gets `from` at an offset in each dimension.
void place(char* to, const std::vector<int64_t>& to_shape, const char* from, const std::vector<int64_t>& from_shape,
           const std::vector<int32_t>& pads, size_t bytes, size_t axis = 0) {
  if (axis == from_shape.size()) {
    std::memcpy(to, from, bytes);
    return;
  }
  size_t to_stride = bytes, from_stride = bytes;
  for (size_t i = axis + 1; i < from_shape.size(); ++i) {
    to_stride *= static_cast<size_t>(to_shape[i]);
    from_stride *= static_cast<size_t>(from_shape[i]);
  }
  for (size_t i = 0; i < static_cast<size_t>(from_shape[axis]); ++i) {
    const size_t offset = i + static_cast<size_t>(pads[2 * axis]);
    place(to + offset * to_stride, to_shape, from + i * from_stride, from_shape, pads, bytes, axis + 1);
  }
}

/// PadV3(x, paddings, value): the paddings, (before, after) for each dimension, are int32 on the host; the value is on
/// the device, made by a Fill.
aclError pad(const Operand& x, const Operand& paddings, const Operand& value, const Operand& out, const aclopAttr& attr,
             const std::shared_ptr<Stream>& stream) {
  const auto mode = attr.texts.find("mode");
  const std::vector<int64_t> shape = x.desc->shape, out_shape = out.desc->shape;
  const auto* numbers = static_cast<const int32_t*>(paddings.buffer->data);
  const std::vector<int32_t> pads(numbers, numbers + 2 * shape.size());
  const bool plain = paddings.desc->type == ACL_INT32 && *std::min_element(pads.begin(), pads.end()) >= 0;
  if (!plain || (mode != attr.texts.end() && mode->second != "constant")) {
    return report(
        {ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "PadV3 is only simulated for int32 paddings >= 0 with a constant"});
  }
  const size_t count = elements(*out.desc), bytes = count > 0 ? out.buffer->size / count : 0;
  const auto *from = static_cast<const char*>(x.buffer->data), *filler = static_cast<const char*>(value.buffer->data);
  auto* const to = static_cast<char*>(out.buffer->data);
  stream->push("PadV3", [=] {
    repeat(to, count, filler, bytes);
    place(to, out_shape, from, shape, pads, bytes);
    return Failure{};
  });
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace npu_sim

using namespace npu_sim;

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int axes, const int64_t* shape, aclFormat format) {
  return new aclTensorDesc{type, format, std::vector<int64_t>(shape, shape + axes)};
}

void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }

aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* extent) {
  if (index >= desc->shape.size())
    return report({ACL_ERROR_INVALID_PARAM, "a tensor description has fewer dimensions"});
  *extent = desc->shape[index];
  return ACL_SUCCESS;
}

aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->shape.size(); }
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }

// The storage format and shape are the device's business, and host memory is the same as device memory here.
void aclSetTensorDescName(aclTensorDesc*, const char*) {}
aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) { return new aclDataBuffer{data, size}; }

aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }

aclError aclopSetAttrString(aclopAttr* attr, const char* name, const char* value) {
  attr->texts[name] = value;
  return ACL_SUCCESS;
}

aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }

aclError aclopCompileAndExecute(const char* name, int inputs, const aclTensorDesc* const input_descs[],
                                const aclDataBuffer* const input_buffers[], int outputs,
                                const aclTensorDesc* const output_descs[], aclDataBuffer* const output_buffers[],
                                const aclopAttr* attr, aclopEngineType, aclopCompileType, const char*,
                                aclrtStream handle) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return report({ACL_ERROR_RT_INVALID_HANDLE, "an operator on a stream that doesn't exist"});
  std::vector<Operand> in, out;
  for (int i = 0; i < inputs; ++i) in.push_back({input_descs[i], input_buffers[i]});
  for (int i = 0; i < outputs; ++i) out.push_back({output_descs[i], output_buffers[i]});
  const std::string op = name;
  if (op == "Fill" && in.size() == 2 && out.size() == 1) return fill(in[1], out[0], stream);
  if (op == "PadV3" && in.size() == 3 && out.size() == 1) return pad(in[0], in[1], in[2], out[0], *attr, stream);
  return report({ACL_ERROR_OP_NOT_FOUND, format("the operator %s isn't simulated", name)});
}
