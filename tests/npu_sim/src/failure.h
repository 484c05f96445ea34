// How things fail: a code for the wheel, and a text that it shows to the user (it asks `aclGetRecentErrMsg`).
#pragma once

#include <acl/acl.h>

#include <string>

namespace npu_sim {

/// What went wrong, or nothing (`code` is 0).
struct Failure {
  aclError code = ACL_SUCCESS;
  std::string text;

  explicit operator bool() const { return code != ACL_SUCCESS; }
};

/// Remember `failure` as this thread's latest, for `aclGetRecentErrMsg`, and return its code.
aclError report(const Failure& failure);

/// printf into a string.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

}  // namespace npu_sim
