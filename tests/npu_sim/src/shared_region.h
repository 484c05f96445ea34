// The memory that the ranks of one communicator share, and how they meet in it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "failure.h"

namespace npu_sim {

/// What a rank is about to do; all ranks of a communicator must be about to do the same.
struct Call {
  char text[96];    // "all_gather of 6 fp32": compared between the ranks, and shown when it differs
  uint64_t rounds;  // how many chunks this rank needs; the ranks may differ, and all go on until the last one is done
};

/// A message between two ranks of which one part fits; see `messages.h`.
struct Box {
  static constexpr size_t kBytes = 32 << 10;
  std::atomic<uint64_t> written;  // parts put in, and taken out, since the communicator was made
  std::atomic<uint64_t> read;
  uint64_t total;  // bytes of the whole message
  char data[kBytes];
};

/// A named region of POSIX shared memory. Each rank has a slot, which it writes and all others read.
///
/// A wait for other ranks ends at the latest after NPU_SIM_TIMEOUT_S, and at once if one of them has died or given up.
class SharedRegion {
 public:
  static constexpr size_t kSlotBytes = 1 << 20;

  /// Communicates: returns when all ranks have opened the region.
  static std::shared_ptr<SharedRegion> open(const std::string& name, uint32_t ranks, uint32_t rank, Failure* failure);
  ~SharedRegion();

  char* slot(uint32_t of_rank);
  Box& box(uint32_t from, uint32_t to);

  /// Wait until all ranks have come here.
  Failure barrier();
  /// Wait until all ranks have come here with a call, and check that it is the same. Returns the most rounds.
  Failure agree(const Call& mine, uint64_t* rounds);
  /// Wait until `ready`, which depends on those peers for which `involved` holds, and on any one of them.
  Failure await(const std::function<bool(uint32_t)>& involved, const std::function<bool()>& ready);
  /// Tell the others that this rank has given up.
  void give_up(const Failure& why);

  const uint32_t ranks, rank;
  std::mutex in_use;  // one call at a time, whatever stream it is on

 private:
  struct Member;

  SharedRegion(uint32_t ranks, uint32_t rank, void* memory, size_t size);
  Member& member(uint32_t of_rank);
  Failure wait_until(const std::function<bool(uint32_t)>& met);
  std::string missing(const std::function<bool(uint32_t)>& met);

  void* memory_;
  size_t size_;
  uint64_t met_ = 0;    // barriers that this rank has reached
  uint64_t calls_ = 0;  // calls that it has agreed on
};

}  // namespace npu_sim
