#include "trace.h"

#include <cstdio>
#include <mutex>

#include "options.h"

namespace npu_sim {
namespace {

std::FILE* file() {
  static std::FILE* const opened = options().trace.empty() ? nullptr : std::fopen(options().trace.c_str(), "w");
  return opened;
}

std::mutex mutex;

}  // namespace

bool tracing() { return file() != nullptr; }

void trace(const std::string& line) {
  if (!tracing()) return;
  const std::lock_guard<std::mutex> lock(mutex);
  std::fprintf(file(), "%s\n", line.c_str());
  std::fflush(file());  // a process that is killed leaves a whole trace
}

}  // namespace npu_sim

/// For scripts: a line of their own between the simulator's.
extern "C" void npu_sim_note(const char* text) { npu_sim::trace(std::string("note ") + text); }
