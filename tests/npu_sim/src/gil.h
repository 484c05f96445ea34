// Kernels are Python functions that run in the streams' threads. A thread that waits for a stream while it holds the
// GIL would keep them from running, for ever; the wheel doesn't release it everywhere, since a device needs no GIL.
#pragma once

#include <dlfcn.h>

namespace npu_sim {

/// Releases the GIL for its lifetime, if this thread holds it. Found at run time: C programs have no Python.
class GilRelease {
 public:
  GilRelease() {
    static const auto holds = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto running = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
    static const auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (holds != nullptr && running() != 0 && holds() != 0) state_ = save();
  }
  ~GilRelease() {
    static const auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (state_ != nullptr) restore(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  void* state_ = nullptr;
};

}  // namespace npu_sim
