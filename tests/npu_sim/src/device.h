#pragma once

namespace npu_sim {

/// The device that this thread has set; -1 before it has.
int current_device();

}  // namespace npu_sim
