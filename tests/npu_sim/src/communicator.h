// One rank's end of a communicator, as the C interface (`hccl.cpp`, `hccl_messages.cpp`) sees it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives.h"
#include "third_party/hccl/inc/hccl/hccl.h"

namespace npu_sim {

struct Communicator {
  Communicator(std::string name, std::shared_ptr<SharedRegion> region)
      : name(std::move(name)), region(std::move(region)) {}

  const std::string name;
  const std::shared_ptr<SharedRegion> region;
  std::atomic<HcclResult> error{HCCL_SUCCESS};  // of a call that has failed while it ran
};

std::shared_ptr<Communicator> communicator_of(HcclComm handle);

using Run = std::function<Failure(SharedRegion&)>;

/// Push one call on a stream, after checking the handles and that `buffers` are device memory.
HcclResult push_call(HcclComm comm, aclrtStream stream, const std::string& text, const std::vector<Piece>& buffers,
                     const Run& run);

/// The result of a call that is refused, with a text for the user.
HcclResult refuse(HcclResult code, const std::string& text);

}  // namespace npu_sim
