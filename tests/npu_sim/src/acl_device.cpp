// ACL: start-up, devices and contexts. A context is nothing but its device here: a thread's current one is a number.
#include <acl/acl.h>
#include <acl/acl_rt.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "device.h"
#include "failure.h"
#include "options.h"

namespace npu_sim {
namespace {

thread_local int current = -1;

aclError no_device(int device) {
  return report({ACL_ERROR_RT_INVALID_DEVICEID,
                 format("there is no device %d: NPU_SIM_DEVICES is %d", device, options().devices)});
}

aclError no_context() { return report({ACL_ERROR_RT_CONTEXT_NULL, "this thread has set no device"}); }

}  // namespace

int current_device() { return current; }

}  // namespace npu_sim

using namespace npu_sim;

aclError aclInit(const char*) { return ACL_SUCCESS; }

aclError aclFinalize() { return ACL_SUCCESS; }

const char* aclrtGetSocName() { return "Ascend910B2"; }

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(options().devices);
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= options().devices) return no_device(device);
  current = device;
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* device) {
  if (current < 0) return no_context();
  *device = current;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

// A handle is never null, so contexts count from 1.
aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (current < 0) return no_context();
  *context = reinterpret_cast<aclrtContext>(static_cast<intptr_t>(current + 1));
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  return aclrtSetDevice(static_cast<int32_t>(reinterpret_cast<intptr_t>(context)) - 1);
}

aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return ACL_SUCCESS;
}

/// 24 of each kind of core, as on the SoC that is named above: the wheel shows the number to users and divides by it.
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
  *value = 24;
  return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}

// ------------------------------------------------------------------------------------ settings: kept, without an
// effect

namespace {

std::mutex settings_mutex;
std::map<int, int64_t> settings;

aclError set(int option, int64_t value) {
  const std::lock_guard<std::mutex> lock(settings_mutex);
  settings[option] = value;
  return ACL_SUCCESS;
}

aclError get(int option, int64_t* value) {
  const std::lock_guard<std::mutex> lock(settings_mutex);
  *value = settings[option];
  return ACL_SUCCESS;
}

}  // namespace

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) { return set(option, value); }
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) { return get(option, value); }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return set(option, value); }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) { return get(option, value); }
