// Errors on demand. NPU_SIM_FAULTS, or `npu_sim_arm` at run time, hold a comma-separated list of
//
//   KIND@CALL[xTIMES][/RANK]      e.g. "async@3/1,oom@10x4"
//
// "the CALL-th call of that kind, counted from 1 (from when it was armed), and the TIMES-1 after it, on RANK or on
// all". Kinds:
//   oom    aclrtMalloc says that there is no memory
//   hccl   a collective is refused when it is called
//   async  a collective fails while it runs: its stream and its communicator report it later
#pragma once

namespace npu_sim {

enum class Fault { oom, hccl, async };

/// Count one call of this kind; whether it must fail.
bool strikes(Fault kind);

}  // namespace npu_sim
