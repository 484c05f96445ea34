#include "failure.h"

#include <cstdarg>
#include <cstdio>

namespace npu_sim {
namespace {

thread_local std::string recent;

}  // namespace

aclError report(const Failure& failure) {
  if (failure) recent = "npu_sim: " + failure.text;
  return failure.code;
}

std::string format(const char* pattern, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(buffer, sizeof buffer, pattern, arguments);
  va_end(arguments);
  return buffer;
}

}  // namespace npu_sim

extern "C" const char* aclGetRecentErrMsg() { return npu_sim::recent.c_str(); }
