#include "options.h"

#include <cstdlib>

namespace npu_sim {
namespace {

std::string text(const char* name, const char* otherwise = "") {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

double number(const char* name, double otherwise) {
  const std::string value = text(name);
  return value.empty() ? otherwise : std::atof(value.c_str());
}

std::string with_rank(std::string path, int rank) {
  const size_t at = path.find("%r");
  return at == std::string::npos ? path : path.replace(at, 2, std::to_string(rank));
}

Options read() {
  Options o;
  o.rank = static_cast<int>(number("RANK", 0));
  o.devices = static_cast<int>(number("NPU_SIM_DEVICES", 8));
  o.memory = static_cast<size_t>(number("NPU_SIM_MEMORY_MIB", 4096) * (1 << 20));
  o.delay_us = static_cast<unsigned>(number("NPU_SIM_DELAY_US", 0));
  o.seed = static_cast<uint64_t>(number("NPU_SIM_SEED", 0));
  o.timeout_s = number("NPU_SIM_TIMEOUT_S", 60);
  o.trace = with_rank(text("NPU_SIM_TRACE"), o.rank);
  o.faults = text("NPU_SIM_FAULTS");
  o.run_id = text("NPU_SIM_RUN_ID", "run");
  return o;
}

}  // namespace

const Options& options() {
  static const Options once = read();
  return once;
}

}  // namespace npu_sim
