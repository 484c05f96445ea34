// What the environment asks for. `README.md` documents each variable; this is the only place that reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace npu_sim {

struct Options {
  int devices;         // NPU_SIM_DEVICES: 0 = the wheel can be imported, and that is all
  size_t memory;       // NPU_SIM_MEMORY_MIB, in bytes: what aclrtMalloc gives out on each device
  unsigned delay_us;   // NPU_SIM_DELAY_US: upper bound of a random pause before each task of a stream
  uint64_t seed;       // NPU_SIM_SEED: of those pauses
  double timeout_s;    // NPU_SIM_TIMEOUT_S: how long a rank waits for its peers
  std::string trace;   // NPU_SIM_TRACE: file to write the trace to; "%r" stands for the rank; empty = none
  std::string faults;  // NPU_SIM_FAULTS: see `faults.h`
  std::string run_id;  // NPU_SIM_RUN_ID: part of the names of shared memory, so that a launcher can sweep them
  int rank;            // RANK: this process, in traces and faults
};

const Options& options();

}  // namespace npu_sim
