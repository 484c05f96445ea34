// ACL: device memory is host memory, filled with a pattern before it is given out and again when it is freed.
#include "memory.h"

#include <acl/acl_rt.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "device.h"
#include "faults.h"
#include "options.h"
#include "stream.h"
#include "trace.h"

namespace npu_sim {
namespace {

constexpr size_t kAlignment = 512;         // what ACL promises
constexpr size_t kQuarantine = 64u << 20;  // freed bytes that are kept, to see whether someone still uses them

enum class Home { device, host };

struct Block {
  size_t size;
  Home home;
  int device;
};

struct Freed {
  void* address;
  size_t size;
};

/// All blocks that were given out, by address; and the freed ones that are still watched.
class Blocks {
 public:
  aclError allocate(void** address, size_t size, Home home) {
    const int device = current_device();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (home == Home::device && used_[device] + size > options().memory) {
      return report(
          {ACL_ERROR_RT_MEMORY_ALLOCATION, format("out of memory on device %d: %zu bytes asked for, %zu of %zu in use",
                                                  device, size, used_[device], options().memory)});
    }
    if (posix_memalign(address, kAlignment, size > 0 ? size : 1) != 0) {
      return report({ACL_ERROR_RT_MEMORY_ALLOCATION, format("the host has no %zu bytes of memory", size)});
    }
    std::memset(*address, kNeverWritten, size);
    live_[*address] = {size, home, device};
    if (home == Home::device) used_[device] += size;
    return ACL_SUCCESS;
  }

  aclError free(void* address, Home home) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(address);
    if (found == live_.end() || found->second.home != home) {
      return report(
          {ACL_ERROR_RT_PARAM_INVALID, format("%p is freed, but wasn't given out or was freed before", address)});
    }
    const Block block = found->second;
    live_.erase(found);
    if (home == Home::host) {
      std::free(address);
      return ACL_SUCCESS;
    }
    used_[block.device] -= block.size;
    std::memset(address, kFreed, block.size);
    freed_.push_back({address, block.size});
    watched_ += block.size;
    while (watched_ > kQuarantine && freed_.size() > 1) {
      expect_untouched(freed_.front());
      watched_ -= freed_.front().size;
      std::free(freed_.front().address);
      freed_.pop_front();
    }
    return ACL_SUCCESS;
  }

  /// The live block that holds the address; false if none does.
  bool find(const void* address, const void** begin, Block* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto next = live_.upper_bound(const_cast<void*>(address));
    if (next == live_.begin()) return false;
    --next;
    const auto* start = static_cast<const char*>(next->first);
    if (static_cast<const char*>(address) >= start + next->second.size && address != start) return false;
    *begin = start;
    *block = next->second;
    return true;
  }

  size_t used(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return used_[device];
  }

  void check_freed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Freed& block : freed_) expect_untouched(block);
  }

 private:
  static void expect_untouched(const Freed& block) {
    const auto* bytes = static_cast<const unsigned char*>(block.address);
    for (size_t i = 0; i < block.size; ++i) {
      if (bytes[i] == kFreed) continue;
      std::fprintf(stderr, "npu_sim: byte %zu of the %zu at %p was written after aclrtFree\n", i, block.size,
                   block.address);
      std::abort();
    }
  }

  std::mutex mutex_;
  std::map<void*, Block> live_;
  std::deque<Freed> freed_;
  size_t watched_ = 0;
  std::map<int, size_t> used_;
};

// Never destroyed: streams' threads may outlive the destructors of globals.
Blocks& blocks() {
  static auto* const all = new Blocks;
  return *all;
}

Failure check_copy(const void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind kind) {
  if (size > room) return {ACL_ERROR_RT_PARAM_INVALID, format("a copy of %zu bytes into %zu", size, room)};
  if (kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE) {
    if (Failure wrong = check_device_range("a copy writes", to, size)) return wrong;
  }
  if (kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE)
    return check_device_range("a copy reads", from, size);
  return {};
}

}  // namespace

Failure check_device_range(const char* what, const void* address, size_t size) {
  if (size == 0) return {};
  const void* begin;
  Block block;
  if (!blocks().find(address, &begin, &block) || block.home != Home::device) {
    return {ACL_ERROR_RT_PARAM_INVALID, format("%s %p, which isn't device memory, or not any more", what, address)};
  }
  const size_t offset = static_cast<size_t>(static_cast<const char*>(address) - static_cast<const char*>(begin));
  if (offset + size > block.size) {
    return {ACL_ERROR_RT_PARAM_INVALID,
            format("%s %zu bytes at offset %zu of a block of %zu", what, size, offset, block.size)};
  }
  return {};
}

}  // namespace npu_sim

using namespace npu_sim;

aclError aclrtMalloc(void** address, size_t size, aclrtMemMallocPolicy) {
  if (current_device() < 0)
    return report({ACL_ERROR_RT_CONTEXT_NULL, "aclrtMalloc, but this thread has set no device"});
  if (strikes(Fault::oom))
    return report({ACL_ERROR_RT_MEMORY_ALLOCATION, "out of memory, as NPU_SIM_FAULTS asked for"});
  return blocks().allocate(address, size, Home::device);
}

aclError aclrtMallocAlign32(void** address, size_t size, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, size, policy);
}

aclError aclrtFree(void* address) { return blocks().free(address, Home::device); }

aclError aclrtMallocHost(void** address, size_t size) { return blocks().allocate(address, size, Home::host); }

aclError aclrtMallocHostWithCfg(void** address, uint64_t size, aclrtMallocConfig*) {
  return aclrtMallocHost(address, size);
}

aclError aclrtFreeHost(void* address) { return blocks().free(address, Home::host); }

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  const void* begin;
  Block block{};
  const bool known = blocks().find(address, &begin, &block);
  attributes->location.id = known && block.home == Home::device ? static_cast<uint32_t>(block.device) : 0;
  attributes->location.type = !known                       ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                              : block.home == Home::device ? ACL_MEM_LOCATION_TYPE_DEVICE
                                                           : ACL_MEM_LOCATION_TYPE_HOST;
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  *total = options().memory;
  *free = *total - blocks().used(current_device());
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind kind) {
  if (Failure wrong = check_copy(to, room, from, size, kind)) return report(wrong);
  std::memcpy(to, from, size);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind kind,
                          aclrtStream handle) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return report({ACL_ERROR_RT_INVALID_HANDLE, "a copy on a stream that doesn't exist"});
  if (Failure wrong = check_copy(to, room, from, size, kind)) return report(wrong);
  stream->push("copy", [=] {
    std::memmove(to, from, size);
    return Failure{};
  });
  return ACL_SUCCESS;
}

aclError aclrtMemset(void* address, size_t room, int32_t value, size_t size) {
  if (size > room) return report({ACL_ERROR_RT_PARAM_INVALID, format("%zu bytes set in %zu", size, room)});
  if (Failure wrong = check_device_range("aclrtMemset writes", address, size)) return report(wrong);
  std::memset(address, value, size);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* address, size_t room, int32_t value, size_t size, aclrtStream handle) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return report({ACL_ERROR_RT_INVALID_HANDLE, "a memset on a stream that doesn't exist"});
  if (size > room) return report({ACL_ERROR_RT_PARAM_INVALID, format("%zu bytes set in %zu", size, room)});
  if (Failure wrong = check_device_range("aclrtMemsetAsync writes", address, size)) return report(wrong);
  stream->push("memset", [=] {
    std::memset(address, value, size);
    return Failure{};
  });
  return ACL_SUCCESS;
}

/// For scripts and tests: abort, with a message, if freed memory that is still watched has been written.
extern "C" void npu_sim_check_freed() { blocks().check_freed(); }
