// An allocator to put in place of the wheel's caching one (NPU_SIM_STRICT_MEMORY). That one hands a freed block on
// without going through ACL, so a use after free reads what the next owner has written, which may well be right.
//
// Here no block is handed on. It is filled with the pattern of freed memory at the earliest point where the caching
// allocator could have handed it on: at the next allocation on its stream, in the order of that stream, and not before
// the streams that `record_stream` has named have come to where it was freed. A stream that was forgotten reads the
// pattern, if it comes late (NPU_SIM_DELAY_US).
#include <acl/acl_rt.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "stream.h"

namespace npu_sim {
namespace {

/// A freed block on its way back. Whoever comes last of those that it waits for gives it to ACL.
struct Freed {
  void* block;
  std::atomic<size_t> awaited;

  Failure arrive() {
    if (awaited.fetch_sub(1) == 1) aclrtFree(block);
    return {};
  }
};

std::mutex mutex;
std::map<void*, std::set<void*>> users;                         // streams of a block beside its own
std::map<void*, std::vector<std::shared_ptr<Freed>>> reusable;  // by the stream whose next allocation could take them

void push_arrival(void* handle, const std::shared_ptr<Freed>& freed) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) {  // destroyed, so it has come there
    freed->arrive();
    return;
  }
  stream->push("free", [freed] { return freed->arrive(); }, Stream::After::run);
}

}  // namespace
}  // namespace npu_sim

using namespace npu_sim;

/// Null if there is no memory; the wheel makes an exception of it.
extern "C" void* npu_sim_allocate(size_t size, int, aclrtStream stream) {
  std::vector<std::shared_ptr<Freed>> blocks;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    blocks.swap(reusable[stream]);
  }
  for (const auto& freed : blocks) push_arrival(stream, freed);
  void* block = nullptr;
  return aclrtMalloc(&block, size, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_SUCCESS ? block : nullptr;
}

/// The block is used on this stream too, up to the point where it will be freed.
extern "C" void npu_sim_use(void* block, aclrtStream stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  users[block].insert(stream);
}

extern "C" void npu_sim_free(void* block, size_t, int, aclrtStream own) {
  std::set<void*> others;
  std::shared_ptr<Freed> freed;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    others.swap(users[block]);
    users.erase(block);
    others.erase(own);
    freed.reset(new Freed{block, {others.size() + 1}});
    reusable[own].push_back(freed);
  }
  for (void* handle : others) push_arrival(handle, freed);
}
