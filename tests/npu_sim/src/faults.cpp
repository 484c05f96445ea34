#include "faults.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "options.h"

namespace npu_sim {
namespace {

struct Armed {
  Fault kind;
  int call;
  int times;
  int seen = 0;
};

Fault kind_of(const std::string& name) {
  if (name == "oom") return Fault::oom;
  if (name == "hccl") return Fault::hccl;
  if (name == "async") return Fault::async;
  std::fprintf(stderr, "npu_sim: no fault is called \"%s\"; there are oom, hccl and async\n", name.c_str());
  std::abort();
}

std::vector<Armed> parse(const std::string& list) {
  std::vector<Armed> found;
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) {
    const size_t at = item.find('@'), times = item.find('x', at), rank = item.find('/');
    const auto part = [&](size_t from) { return std::atoi(item.c_str() + from + 1); };
    const Fault kind = kind_of(item.substr(0, at));
    if (rank != std::string::npos && part(rank) != options().rank) continue;
    found.push_back({kind, at == std::string::npos ? 1 : part(at), times == std::string::npos ? 1 : part(times)});
  }
  return found;
}

std::mutex mutex;

std::vector<Armed>& armed() {
  static std::vector<Armed> list = parse(options().faults);
  return list;
}

}  // namespace

bool strikes(Fault kind) {
  const std::lock_guard<std::mutex> lock(mutex);
  bool strikes = false;
  for (Armed& fault : armed()) {
    if (fault.kind != kind) continue;
    ++fault.seen;
    strikes |= fault.seen >= fault.call && fault.seen < fault.call + fault.times;
  }
  return strikes;
}

}  // namespace npu_sim

/// For scripts: replace the list of faults; calls are counted from now on. "" disarms.
extern "C" void npu_sim_arm(const char* list) {
  const std::lock_guard<std::mutex> lock(npu_sim::mutex);
  npu_sim::armed() = npu_sim::parse(list);
}
