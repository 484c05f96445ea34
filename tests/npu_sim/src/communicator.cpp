// HCCL: making, asking and ending communicators, and the way from a call to its stream.
#include "communicator.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>

#include "faults.h"
#include "memory.h"
#include "options.h"
#include "stream.h"
#include "trace.h"

namespace npu_sim {
namespace {

Handles<Communicator>& communicators() {
  static auto* const all = new Handles<Communicator>;
  return *all;
}

HcclResult join(const std::string& region_name, const std::string& name, uint32_t ranks, uint32_t rank,
                HcclComm* comm) {
  Failure failure;
  auto region = SharedRegion::open(region_name, ranks, rank, &failure);
  if (region == nullptr) {
    return refuse(failure.code == ACL_ERROR_RT_FFTS_PLUS_TIMEOUT ? HCCL_E_TIMEOUT : HCCL_E_INTERNAL,
                  "no communicator: " + failure.text);
  }
  if (tracing()) trace(format("communicator name=%s rank=%u ranks=%u", name.c_str(), rank, ranks));
  *comm = communicators().create(name, std::move(region));
  return HCCL_SUCCESS;
}

/// The name that the user has chosen, or else the region's.
std::string name_in(const HcclCommConfig* config, const std::string& otherwise) {
  return config != nullptr && config->hcclCommName[0] != '\0' ? config->hcclCommName : otherwise;
}

HcclResult result_of(const Failure& failure) {
  switch (failure.code) {
    case ACL_SUCCESS: return HCCL_SUCCESS;
    case ACL_ERROR_RT_FFTS_PLUS_TIMEOUT: return HCCL_E_TIMEOUT;
    case ACL_ERROR_RT_SUSPECT_REMOTE_ERROR: return HCCL_E_REMOTE;
    default: return HCCL_E_INTERNAL;
  }
}

}  // namespace

std::shared_ptr<Communicator> communicator_of(HcclComm handle) { return communicators().find(handle); }

HcclResult refuse(HcclResult code, const std::string& text) {
  report({ACL_ERROR_RT_PARAM_INVALID, text});
  return code;
}

HcclResult push_call(HcclComm handle, aclrtStream stream_handle, const std::string& text,
                     const std::vector<Piece>& buffers, const Run& run) {
  const auto comm = communicator_of(handle);
  if (comm == nullptr) return refuse(HCCL_E_PTR, text + " on a communicator that was destroyed or never made");
  const auto stream = stream_of(stream_handle);
  if (stream == nullptr) return refuse(HCCL_E_PTR, text + " on a stream that doesn't exist");
  if (strikes(Fault::hccl)) return refuse(HCCL_E_INTERNAL, text + " is refused, as NPU_SIM_FAULTS asked for");
  for (const Piece& buffer : buffers) {
    if (Failure wrong = check_device_range(text.c_str(), buffer.data, buffer.size))
      return refuse(HCCL_E_PARA, wrong.text);
  }
  if (tracing()) {
    trace(format("collective stream=%d communicator=%s call=%s", stream->number, comm->name.c_str(), text.c_str()));
  }
  const bool fails = strikes(Fault::async);
  stream->push(text, [comm, text, run, fails]() -> Failure {
    const std::lock_guard<std::mutex> alone(comm->region->in_use);
    Failure failure = fails ? Failure{ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "it fails, as NPU_SIM_FAULTS asked for"}
                            : run(*comm->region);
    if (!failure) return {};
    failure.text = format("%s on communicator %s: ", text.c_str(), comm->name.c_str()) + failure.text;
    comm->region->give_up(failure);
    comm->error = result_of(failure);
    std::fprintf(stderr, "npu_sim: rank %d: %s\n", options().rank, failure.text.c_str());
    return failure;
  });
  return HCCL_SUCCESS;
}

}  // namespace npu_sim

using namespace npu_sim;

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  std::random_device random;
  std::memset(info, 0, sizeof *info);
  std::snprintf(info->internal, sizeof info->internal, "/npu-sim-%s-%d-%08x%08x", options().run_id.c_str(), getpid(),
                random(), random());
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
  return join(info->internal, name_in(config, info->internal), ranks, rank, comm);
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
  return HcclCommInitRootInfoConfig(ranks, info, rank, nullptr, comm);
}

/// Called by the listed ranks of `parent` alone. They know its name and the number, so they need no root info.
HcclResult HcclCreateSubCommConfig(HcclComm* parent, uint32_t ranks, uint32_t*, uint64_t number, uint32_t rank,
                                   HcclCommConfig* config, HcclComm* comm) {
  const auto whole = communicator_of(*parent);
  if (whole == nullptr) return refuse(HCCL_E_PTR, "a part of a communicator that was destroyed or never made");
  const std::string own =
      format("/npu-sim-%s-sub-%zx-%lx", options().run_id.c_str(), std::hash<std::string>{}(whole->name), number);
  return join(own, name_in(config, own), ranks, rank, comm);
}

HcclResult HcclCommDestroy(HcclComm comm) {
  return communicators().remove(comm) != nullptr ? HCCL_SUCCESS
                                                 : refuse(HCCL_E_PTR, "a communicator is destroyed twice");
}

HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* error) {
  const auto comm = communicator_of(handle);
  if (comm == nullptr) return HCCL_E_PTR;
  *error = comm->error;
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm handle, char* name) {
  const auto comm = communicator_of(handle);
  if (comm == nullptr) return HCCL_E_PTR;
  std::snprintf(name, COMM_NAME_MAX_LENGTH, "%s", comm->name.c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm handle, uint32_t* ranks) {
  const auto comm = communicator_of(handle);
  if (comm == nullptr) return HCCL_E_PTR;
  *ranks = comm->region->ranks;
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  const auto comm = communicator_of(handle);
  if (comm == nullptr) return HCCL_E_PTR;
  *rank = comm->region->rank;
  return HCCL_SUCCESS;
}

/// Deterministic reductions and the like: they are, here.
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

/// The number of configuration fields that may be set; only the name has an effect.
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
