// Entries that may do nothing, each with the reason. Everything else that the wheel links and that no file here defines
// is generated (`build.py`) as a function that aborts with its name.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <acl/acl_rt.h>

#include <execinfo.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "third_party/acl/inc/profiling/prof_api.h"

// Logs go to the driver's files, and there is no driver.
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

// Profiling: the wheel reports each operator to a profiler, which was never started.
int32_t MsprofRegisterCallback(uint32_t, ProfCommandHandle) { return 0; }
int32_t MsprofReportApi(uint32_t, const MsprofApi*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }
uint64_t MsprofSysCycleTime() { return 0; }
uint64_t MsprofGetHashId(const char*, size_t) { return 0; }

// Failures are returned by the call that finds them; there is no later error to ask for.
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

// Limits of a device's own watchdog. Here a collective has NPU_SIM_TIMEOUT_S, and a kernel ends by itself.
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }

// Number formats and compiler options of kernels: the ones here are the CPU's, compiled long ago.
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
aclError aclopSetCompileFlag(aclOpCompileFlag) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 1; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  if (length > 0) value[0] = '\0';
  return ACL_SUCCESS;
}

extern "C" void npu_sim_missing(const char* name) {
  std::fprintf(stderr, "npu_sim: %s isn't simulated; called from\n", name);
  void* frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), STDERR_FILENO);
  std::abort();
}
