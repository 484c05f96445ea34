// ACL: streams, events, host functions, and the entry by which `aten.py` launches its kernels.
#include <acl/acl_rt.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "device.h"
#include "options.h"
#include "stream.h"
#include "trace.h"

namespace npu_sim {
namespace {

// Never destroyed: at exit, streams may still have work, and Python may be gone that it needs.
Handles<Stream>& streams() {
  static auto* const all = new Handles<Stream>;
  return *all;
}

Handles<Event>& events() {
  static auto* const all = new Handles<Event>;
  return *all;
}

std::atomic<int> stream_numbers{0}, event_numbers{0};

void* new_stream() { return streams().create(std::max(current_device(), 0), stream_numbers++); }

aclError unknown(const char* call, const char* what) {
  return report({ACL_ERROR_RT_INVALID_HANDLE, format("%s of %s that was destroyed or never made", call, what)});
}

aclError create_event(aclrtEvent* event) {
  *event = events().create(event_numbers++);
  return ACL_SUCCESS;
}

aclError push_host_function(void (*function)(void*), void* argument, aclrtStream handle) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return unknown("a host function", "a stream");
  stream->push("host_function", [=] {
    function(argument);
    return Failure{};
  });
  return ACL_SUCCESS;
}

aclError synchronize_device(std::chrono::milliseconds limit) {
  Failure first;
  for (const auto& stream : streams_of(std::max(current_device(), 0))) {
    Failure found = stream->synchronize(limit);
    if (found && !first) first = found;
  }
  return report(first);
}

/// ACL's convention: a negative number of milliseconds is no limit.
std::chrono::milliseconds limit_of(int32_t timeout_ms) {
  return timeout_ms < 0 ? std::chrono::milliseconds::max() : std::chrono::milliseconds(timeout_ms);
}

}  // namespace

std::shared_ptr<Stream> stream_of(void* handle) {
  if (handle != nullptr) return streams().find(handle);
  static std::mutex mutex;
  static std::map<int, void*> defaults;
  const std::lock_guard<std::mutex> lock(mutex);
  void*& made = defaults[std::max(current_device(), 0)];
  if (made == nullptr) made = new_stream();
  return streams().find(made);
}

std::vector<std::shared_ptr<Stream>> streams_of(int device) {
  std::vector<std::shared_ptr<Stream>> own;
  for (auto& stream : streams().all()) {
    if (stream->device == device) own.push_back(stream);
  }
  return own;
}

}  // namespace npu_sim

using namespace npu_sim;

// --------------------------------------------------------------------------------------------------------------
// streams

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  *stream = new_stream();
  return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream) {
  return streams().remove(stream) != nullptr ? ACL_SUCCESS : unknown("aclrtDestroyStream", "a stream");
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return unknown("aclrtSynchronizeStream", "a stream");
  return report(stream->synchronize(limit_of(timeout_ms)));
}

aclError aclrtSynchronizeStream(aclrtStream stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }

aclError aclrtSynchronizeDevice() { return synchronize_device(limit_of(-1)); }

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) { return synchronize_device(limit_of(timeout_ms)); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return unknown("aclrtStreamQuery", "a stream");
  *status = stream->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* number) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return unknown("aclrtStreamGetId", "a stream");
  *number = stream->number;
  return ACL_SUCCESS;
}

/// Streams always stop on a failure, which is the mode that the wheel asks for.
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }

// ---------------------------------------------------------------------------------------------------------------
// events

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return create_event(event); }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return create_event(event); }
aclError aclrtCreateEvent(aclrtEvent* event) { return create_event(event); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  return events().remove(event) != nullptr ? ACL_SUCCESS : unknown("aclrtDestroyEvent", "an event");
}

aclError aclrtRecordEvent(aclrtEvent event_handle, aclrtStream stream_handle) {
  const auto event = events().find(event_handle);
  const auto stream = stream_of(stream_handle);
  if (event == nullptr || stream == nullptr) return unknown("aclrtRecordEvent", "an event or a stream");
  stream->record(event);
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent event_handle) {
  const auto event = events().find(event_handle);
  const auto stream = stream_of(stream_handle);
  if (event == nullptr || stream == nullptr) return unknown("aclrtStreamWaitEvent", "an event or a stream");
  stream->wait(event);
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  const auto event = events().find(handle);
  if (event == nullptr) return unknown("aclrtSynchronizeEvent", "an event");
  return report(event->wait(event->latest()));
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  const auto event = events().find(handle);
  if (event == nullptr) return unknown("aclrtQueryEventStatus", "an event");
  *status = event->reached(event->latest()) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  const auto event = events().find(handle);
  if (event == nullptr) return unknown("aclrtQueryEventWaitStatus", "an event");
  *status = event->reached(event->latest()) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* ms, aclrtEvent start_handle, aclrtEvent end_handle) {
  const auto start = events().find(start_handle), end = events().find(end_handle);
  if (start == nullptr || end == nullptr) return unknown("aclrtEventElapsedTime", "an event");
  for (const auto& event : {start, end}) {
    if (event->latest() == 0 || !event->reached(event->latest())) {
      return report({ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the time of an event that isn't recorded yet"});
    }
  }
  *ms = std::chrono::duration<float, std::milli>(end->time() - start->time()).count();
  return ACL_SUCCESS;
}

/// Nothing to do: each recording is a generation of its own.
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }

// ------------------------------------------------------------------------------------------------------- host
// functions

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* argument) {
  return push_host_function(function, argument, stream);
}

/// Runs in the stream's thread instead of the one that calls aclrtProcessReport, which has nothing left to do.
aclError aclrtLaunchCallback(aclrtCallback function, void* argument, aclrtCallbackBlockType, aclrtStream stream) {
  return push_host_function(function, argument, stream);
}

aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtProcessReport(int32_t timeout_ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(std::clamp(timeout_ms, 1, 100)));
  return ACL_SUCCESS;
}

// --------------------------------------------------------------------------------------------------------------
// kernels

/// A kernel: returns 0, or writes why it failed into `message` (of `size` bytes).
using Kernel = int (*)(void* argument, char* message, size_t size);

extern "C" aclError npu_sim_launch(const char* name, Kernel kernel, void* argument, aclrtStream handle) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return unknown("a launch", "a stream");
  stream->push(name, [kernel, argument, title = std::string(name)]() -> Failure {
    char message[768] = "";
    if (kernel(argument, message, sizeof message) == 0) return {};
    return {ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, format("the kernel of %s failed: %s", title.c_str(), message)};
  });
  return ACL_SUCCESS;
}
