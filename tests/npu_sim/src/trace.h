// A log of what the program asked for and of what the streams did: one line each, without times or addresses, so that
// a test can compare it with an expected one. `README.md` lists the lines.
#pragma once

#include <string>

namespace npu_sim {

/// Whether NPU_SIM_TRACE names a file; asked first, so that no text is made for nothing.
bool tracing();

/// Append one line. Lines of one stream's tasks come in the order of execution, those of one thread in program order.
void trace(const std::string& line);

}  // namespace npu_sim
