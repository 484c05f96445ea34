// Sends and receives between pairs of ranks.
#pragma once

#include <vector>

#include "shared_region.h"

namespace npu_sim {

struct Message {
  bool send;
  uint32_t peer;
  char* buffer;
  size_t size;
};

/// Do all of them, in any order between different peers and in the given one for messages of one direction between two
/// ranks. A message that doesn't fit a box needs its receiver at the same time, as HCCL's rendezvous does.
Failure exchange(SharedRegion& region, const std::vector<Message>& messages);

}  // namespace npu_sim
